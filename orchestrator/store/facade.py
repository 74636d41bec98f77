"""`Store`: the database and the artifact store behind one object.

    store = Store.open("postgresql://…", "/data/artifacts")
    with store.transaction():        # optional: without it each call is a transaction of its own
        cycle = store.cycles.create(…)
        store.stages.plan(cycle.id, …)

Transactions nest: an inner one joins the outer one. Events wait until the outermost transaction ends and are then
written under a lock, so that their ids become visible in order: a reader that has seen id n has seen every id below n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlmodel import Session

from orchestrator.artifacts import ArtifactStore
from orchestrator.store.accounts import ApiTokens, SignInFailures, SignInLinks, SignIns
from orchestrator.store.audits import AuditJobs, Audits, References
from orchestrator.store.checkpoints import Checkpoints
from orchestrator.store.connection import connect
from orchestrator.store.cycles import Cycles
from orchestrator.store.evaluations import Evaluations
from orchestrator.store.events import Events, write_pending
from orchestrator.store.experiments import Experiments
from orchestrator.store.files import Files
from orchestrator.store.logs import Logs
from orchestrator.store.metrics import Metrics
from orchestrator.store.notices import Notices
from orchestrator.store.people import AuditTrail, Users
from orchestrator.store.profiles import Profiles
from orchestrator.store.replays import Replays
from orchestrator.store.review_queue import ReviewQueue
from orchestrator.store.reviews import Reviews
from orchestrator.store.runbooks import Runbooks
from orchestrator.store.selections import Selections
from orchestrator.store.stages import Stages
from orchestrator.store.suites import Suites
from orchestrator.store.trajectories import Trajectories
from stages.errors import StoreError


class Store:
    """Thread-safe: each thread (and each asyncio task) has its own transaction."""

    def __init__(self, engine: Engine, artifacts: ArtifactStore) -> None:
        self.engine = engine
        self.artifacts = artifacts
        self._current: ContextVar[Session | None] = ContextVar("rsi_session", default=None)
        self.cycles = Cycles(self)
        self.stages = Stages(self)
        self.checkpoints = Checkpoints(self)
        self.selections = Selections(self)
        self.suites = Suites(self)
        self.trajectories = Trajectories(self)
        self.runbooks = Runbooks(self)
        self.reviews = Reviews(self)
        self.review_queue = ReviewQueue(self)
        self.replays = Replays(self)
        self.metrics = Metrics(self)
        self.evaluations = Evaluations(self)
        self.profiles = Profiles(self)
        self.audits = Audits(self)
        self.audit_jobs = AuditJobs(self)
        self.references = References(self)
        self.experiments = Experiments(self)
        self.events = Events(self)
        self.logs = Logs(self)
        self.files = Files(self)
        self.notices = Notices(self)
        self.users = Users(self)
        self.audit_trail = AuditTrail(self)
        self.sign_ins = SignIns(self)
        self.sign_in_links = SignInLinks(self)
        self.sign_in_failures = SignInFailures(self)
        self.api_tokens = ApiTokens(self)

    @classmethod
    def open(cls, database_url: str, artifact_url: str | Path, *, pool_size: int = 5) -> Store:
        return cls(connect(database_url, pool_size=pool_size), ArtifactStore(artifact_url))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """All or nothing. Do not start an asyncio task or thread inside that uses the store.

        Raises:
            StoreError: the database cannot be reached, or refuses a row.
        """
        if (outer := self._current.get()) is not None:
            yield outer
            return
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                token = self._current.set(session)
                try:
                    yield session
                    session.flush()
                    write_pending(session)
                finally:
                    self._current.reset(token)
        except IntegrityError as error:
            raise StoreError(f"The database refuses a row: {_short(error)}") from error
        except (OperationalError, PoolTimeout) as error:
            raise StoreError(
                f"The database cannot be used: {_short(error)}. Is it running? `rsi status` shows."
            ) from error
        except DBAPIError as error:
            raise StoreError(f"The database refuses a statement: {_short(error)}") from error


def _short(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip()[:500]
