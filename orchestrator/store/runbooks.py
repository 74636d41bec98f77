"""Runbooks and their revisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.connection import clean_json, clean_text
from stages import domain
from stages.errors import StoreError

OPEN = (m.RunbookState.WRITTEN, m.RunbookState.WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookDetail:
    runbook: m.Runbook
    reviews: Sequence[m.Review]
    findings: Sequence[m.Finding]
    replays: Sequence[m.Replay]


class Runbooks(Repository):
    def write(
        self, book: domain.Runbook, *, cycle_id: int | None = None, stage_id: int | None = None, author: str = ""
    ) -> None:
        """Store a revision. The same one again changes nothing; a new one supersedes the older ones."""
        values = {
            "id": book.id,
            "revision": book.revision,
            "cycle_id": cycle_id,
            "stage_id": stage_id,
            "task_id": book.task_id,
            "source_trajectory_id": book.source_trajectory_id,
            "planner": book.planner,
            "author": author,
            "lines": clean_json([{"text": line.text, "cites": list(line.cites)} for line in book.lines]),
            "raw_text": clean_text(book.raw_text),
            "state": m.RunbookState.WRITTEN,
        }
        with self._session() as session:
            session.execute(insert(m.Runbook).values(values).on_conflict_do_nothing())
            older = update(m.Runbook).where(col(m.Runbook.id) == book.id, col(m.Runbook.revision) < book.revision)
            session.execute(
                older.where(col(m.Runbook.state) != m.RunbookState.CONSUMED).values(state=m.RunbookState.SUPERSEDED)
            )

    def set_state(self, runbook_id: str, revision: int, state: m.RunbookState) -> None:
        with self._session() as session:
            change = update(m.Runbook).where(col(m.Runbook.id) == runbook_id, col(m.Runbook.revision) == revision)
            session.execute(change.values(state=state))

    def set_created(self, runbook_id: str, created_at: datetime) -> None:
        """A planted copy is as old as its original."""
        with self._session() as session:
            session.execute(update(m.Runbook).where(col(m.Runbook.id) == runbook_id).values(created_at=created_at))

    def settle(self, runbook_id: str, revision: int, state: m.RunbookState) -> None:
        """An automatic verdict: only an open runbook moves, a rejection is not lifted by a later approval, and where people
        have spoken nothing moves."""
        people = select(col(m.Review.id)).where(
            col(m.Review.runbook_id) == runbook_id,
            col(m.Review.revision) == revision,
            col(m.Review.reviewer).startswith("person:"),
        )
        with self._session() as session:
            change = update(m.Runbook).where(
                col(m.Runbook.id) == runbook_id, col(m.Runbook.revision) == revision, ~people.exists()
            )
            movable = OPEN if state is not m.RunbookState.REJECTED else (*OPEN, m.RunbookState.APPROVED)
            session.execute(change.where(col(m.Runbook.state).in_(movable)).values(state=state))

    def consume(self, stage_id: int) -> int:
        """The replay phase takes the approved runbooks; from here on no verdict on them is undone. Returns how many."""
        with self._session() as session:
            change = update(m.Runbook).where(
                col(m.Runbook.stage_id) == stage_id, col(m.Runbook.state) == m.RunbookState.APPROVED
            )
            taken = session.execute(change.values(state=m.RunbookState.CONSUMED).returning(col(m.Runbook.id)))
            return len(taken.all())

    def get(self, runbook_id: str, revision: int | None = None) -> m.Runbook:
        """A revision, or the newest. Raises StoreError when there is none."""
        query = select(m.Runbook).where(col(m.Runbook.id) == runbook_id).order_by(col(m.Runbook.revision).desc())
        if revision is not None:
            query = query.where(col(m.Runbook.revision) == revision)
        with self._session() as session:
            found = session.execute(query.execution_options(populate_existing=True)).scalars().first()
        if found is None:
            raise StoreError(f"There is no runbook {runbook_id}" + (f", revision {revision}." if revision else "."))
        return found

    def detail(self, runbook_id: str, revision: int | None = None) -> RunbookDetail:
        with self._session():
            book = self.get(runbook_id, revision)
            return RunbookDetail(
                runbook=book,
                reviews=self._store.reviews.of(book.id, book.revision),
                findings=self._store.reviews.findings(book.id, book.revision),
                replays=self._store.replays.of_runbook(book.id),
            )

    def list(
        self,
        *,
        states: Sequence[m.RunbookState] = (),
        cycle_id: int | None = None,
        stage_id: int | None = None,
        task_id: str | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> Page[m.Runbook]:
        """Newest first. Planted leaks are in the reviewers' queue only."""
        planted = select(col(m.KnownLeak.runbook_id)).where(col(m.KnownLeak.runbook_id) == col(m.Runbook.id))
        query = select(m.Runbook).where(~planted.exists()).order_by(col(m.Runbook.seq).desc()).limit(limit + 1)
        if states:
            query = query.where(col(m.Runbook.state).in_(states))
        for name, value in (("cycle_id", cycle_id), ("stage_id", stage_id), ("task_id", task_id)):
            if value is not None:
                query = query.where(getattr(m.Runbook, name) == value)
        if before is not None:
            query = query.where(col(m.Runbook.seq) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "seq")

    def counts(self, *, cycle_id: int | None = None, stage_id: int | None = None) -> dict[m.RunbookState, int]:
        query = select(col(m.Runbook.state), func.count()).group_by(col(m.Runbook.state))
        if cycle_id is not None:
            query = query.where(col(m.Runbook.cycle_id) == cycle_id)
        if stage_id is not None:
            query = query.where(col(m.Runbook.stage_id) == stage_id)
        with self._session() as session:
            return {m.RunbookState(state): count for state, count in session.execute(query)}

    def revisions(self, runbook_id: str) -> Sequence[m.Runbook]:
        """Every revision, oldest first."""
        query = select(m.Runbook).where(col(m.Runbook.id) == runbook_id).order_by(col(m.Runbook.revision))
        with self._session() as session:
            return session.execute(query.execution_options(populate_existing=True)).scalars().all()

    def authors(self, stage_id: int) -> dict[str, str]:
        """Runbook id -> who edited its newest revision, empty for the planner."""
        query = select(col(m.Runbook.id), col(m.Runbook.author)).where(
            col(m.Runbook.stage_id) == stage_id, col(m.Runbook.state) != m.RunbookState.SUPERSEDED
        )
        with self._session() as session:
            return dict(session.execute(query).tuples().all())

    def load(self, stage_id: int, states: Sequence[m.RunbookState] = ()) -> Sequence[domain.Runbook]:
        """Newest revisions of a stage as the method knows them, in the order in which they were written."""
        query = (
            select(m.Runbook)
            .where(col(m.Runbook.stage_id) == stage_id, col(m.Runbook.state) != m.RunbookState.SUPERSEDED)
            .order_by(col(m.Runbook.seq))
        )
        if states:
            query = query.where(col(m.Runbook.state).in_(states))
        with self._session() as session:
            return [to_domain(row) for row in session.execute(query).scalars()]


def to_domain(row: m.Runbook) -> domain.Runbook:
    return domain.Runbook(
        id=row.id,
        task_id=row.task_id,
        source_trajectory_id=row.source_trajectory_id,
        planner=row.planner,
        lines=tuple(domain.RunbookLine(text=line["text"], cites=tuple(line["cites"])) for line in row.lines),
        revision=row.revision,
        raw_text=row.raw_text,
    )
