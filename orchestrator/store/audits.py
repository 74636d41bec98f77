"""Reward audits, those in the making, and published reference rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Select, func, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Page, Repository, page
from stages.errors import StoreError


class Audits(Repository):
    def add(self, audit: m.Audit) -> m.Audit:
        with self._session() as session:
            session.add(audit)
            session.flush()
        return audit

    def get(self, audit_id: int) -> m.Audit:
        with self._session() as session:
            if (found := session.get(m.Audit, audit_id)) is None:
                raise StoreError(f"There is no audit {audit_id}. `rsi audit list` shows those that exist.")
            return found

    def list(self, *, cycle_id: int | None = None, before: int | None = None, limit: int = 50) -> Page[m.Audit]:
        """Newest first."""
        query = select(m.Audit).order_by(col(m.Audit.id).desc()).limit(limit + 1)
        if cycle_id is not None:
            query = query.where(col(m.Audit.cycle_id) == cycle_id)
        if before is not None:
            query = query.where(col(m.Audit.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")


class AuditJobs(Repository):
    """Audits of large sets in the making. What was asked for stays until it is done, whatever becomes of a process."""

    def add(self, job: m.AuditJob) -> int:
        with self._session() as session:
            session.add(job)
            session.flush()
            return job.id or 0

    def get(self, number: int) -> m.AuditJob | None:
        with self._session() as session:
            return session.get(m.AuditJob, number, populate_existing=True)

    def count(self, *states: m.AuditJobState) -> int:
        query = select(func.count()).where(_not_done(), col(m.AuditJob.state).in_(states))
        with self._session() as session:
            return int(session.execute(query.select_from(m.AuditJob)).scalar_one())

    def any_free(self) -> bool | None:
        """Whether a process could take up a job now: False when others hold all that are left, None when none is left."""
        free = self._unfinished().with_for_update(skip_locked=True)
        with self._session() as session:
            if session.execute(free).first() is not None:
                return True
            return False if session.execute(self._unfinished()).first() is not None else None

    def not_done(self, *, limit: int = 20) -> Sequence[m.AuditJob]:
        """Those that wait, run or have failed, newest first."""
        query = select(m.AuditJob).where(_not_done()).order_by(col(m.AuditJob.id).desc()).limit(limit)
        with self._session() as session:
            return session.execute(query).scalars().all()

    def claim(self, *, most_starts: int) -> m.AuditJob | None:
        """The oldest job that no process holds, marked as running; None when there is none.

        One that `most_starts` processes have begun and none has ended is failed instead.
        """
        free = self._unfinished().with_for_update(skip_locked=True).execution_options(populate_existing=True)
        while True:
            with self._session() as session:
                if (job := session.execute(free).scalars().first()) is None:
                    return None
                if job.starts < most_starts:
                    job.state, job.starts, job.started_at = m.AuditJobState.RUNNING, job.starts + 1, now()
                    return job
                job.state, job.finished_at = m.AuditJobState.FAILED, now()
                job.error = (
                    f"it was begun {job.starts} times, and each time its process was gone before the end. Is there enough "
                    "memory? A narrower set needs less."
                )

    @staticmethod
    def _unfinished() -> Select[Any]:
        """The oldest job that waits or runs."""
        query = select(m.AuditJob).where(_not_done(), col(m.AuditJob.state) != m.AuditJobState.FAILED)
        return query.order_by(col(m.AuditJob.id)).limit(1)

    def hold(self, number: int) -> bool:
        """Lock a running job until the transaction ends; False when another process has it, or has ended it."""
        query = select(col(m.AuditJob.id)).where(
            col(m.AuditJob.id) == number, col(m.AuditJob.state) == m.AuditJobState.RUNNING
        )
        with self._session() as session:
            return session.execute(query.with_for_update(skip_locked=True)).first() is not None

    def finish(self, number: int, *, audit_id: int | None = None, error: str = "") -> None:
        state = m.AuditJobState.DONE if audit_id is not None else m.AuditJobState.FAILED
        change = update(m.AuditJob).where(col(m.AuditJob.id) == number)
        with self._session() as session:
            session.execute(change.values(state=state, audit_id=audit_id, error=error, finished_at=now()))

    def again(self, number: int) -> bool:
        """A failed job waits once more; False when it has not failed."""
        change = update(m.AuditJob).where(col(m.AuditJob.id) == number, col(m.AuditJob.state) == m.AuditJobState.FAILED)
        fresh = {"state": m.AuditJobState.WAITING, "starts": 0, "error": "", "started_at": None, "finished_at": None}
        with self._session() as session:
            return bool(session.execute(change.values(fresh).returning(col(m.AuditJob.id))).first())


def _not_done() -> ColumnElement[bool]:
    """As the index has it: a bound value would not be recognised."""
    return literal_column("audit_job.state <> 'done'", Boolean)


class References(Repository):
    """Numbers of other papers and harnesses; shown, never ranked in."""

    def load(self, rows: Sequence[m.ReferenceRow]) -> None:
        """Store rows; one of the same source, label, suite and metric is replaced."""
        if not rows:
            return
        values = [row.model_dump(exclude={"id"}) for row in rows]
        query = insert(m.ReferenceRow)
        same = ("source", "label", "suite", "metric")
        replaced = {name: query.excluded[name] for name in values[0] if name not in same}
        with self._session() as session:
            session.execute(query.on_conflict_do_update(index_elements=same, set_=replaced), values)

    def list(self, *, suite: str | None = None) -> Sequence[m.ReferenceRow]:
        query = select(m.ReferenceRow).order_by(
            col(m.ReferenceRow.source), col(m.ReferenceRow.suite), col(m.ReferenceRow.id)
        )
        if suite is not None:
            query = query.where(col(m.ReferenceRow.suite) == suite)
        with self._session() as session:
            return session.execute(query).scalars().all()
