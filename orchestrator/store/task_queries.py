"""Reads about one task, and the lists of attempts that deserve a second look."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, text
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.trajectories import WITHOUT_LOG
from stages.domain import CheckStatus, Phase


class TaskQueries(Repository):
    """`TaskQueries(store)`; joins the store's transactions."""

    def versions(self, suite: str, task_id: str) -> Sequence[tuple[m.Suite, m.Task]]:
        """The task in every stored version of its suite, newest first."""
        query = (
            select(m.Suite, m.Task)
            .join(m.Task, col(m.Task.suite_id) == col(m.Suite.id))
            .where(col(m.Suite.name) == suite, col(m.Task.task_id) == task_id)
            .order_by(col(m.Suite.id).desc())
        )
        with self._session() as session:
            return session.execute(query).tuples().all()

    def attempts_of(
        self, suite: str, task_id: str, checkpoint_ids: Sequence[int], *, limit: int = 500
    ) -> dict[int, list[m.Trajectory]]:
        """Checkpoint id -> its evaluation attempts at a task, in order of attempt; the newest `limit` of all."""
        own = m.Trajectory
        query = (
            select(own)
            .where(col(own.suite) == suite, col(own.task_id) == task_id, col(own.checkpoint_id).in_(checkpoint_ids))
            .where((col(own.phase) == Phase.EVALUATE) | col(own.phase).is_(None))
            .order_by(col(own.seq).desc())
            .limit(limit)
            .options(WITHOUT_LOG)
        )
        found: dict[int, list[m.Trajectory]] = {}
        with self._session() as session:
            for row in session.execute(query).scalars():
                found.setdefault(row.checkpoint_id or 0, []).append(row)
        return {i: sorted(rows, key=lambda t: (t.attempt, t.seq or 0)) for i, rows in found.items()}

    def check_rates(
        self, suite: str, task_id: str, *, within: int
    ) -> tuple[Sequence[tuple[str, str, int, int, int]], int]:
        """(check, role, passed, failed, not run) over the newest `within` attempts, in order of report; and how many
        attempts these are."""
        newest = (
            select(col(m.Trajectory.id))
            .where(col(m.Trajectory.suite) == suite, col(m.Trajectory.task_id) == task_id)
            .order_by(col(m.Trajectory.seq).desc())
            .limit(within)
            .cte("newest")
        )
        status = col(m.CheckResult.status)
        query = (
            select(
                col(m.CheckResult.check_id),
                col(m.CheckResult.role),
                *(func.count().filter(status == s) for s in (CheckStatus.PASSED, CheckStatus.FAILED)),
                func.count().filter(status == CheckStatus.NOT_RUN),
            )
            .join(newest, newest.c.id == col(m.CheckResult.trajectory_id))
            .group_by(col(m.CheckResult.check_id), col(m.CheckResult.role))
            .order_by(func.min(col(m.CheckResult.index)), col(m.CheckResult.check_id))
        )
        with self._session() as session:
            rows = [(name, role.value, p, f, n) for name, role, p, f, n in session.execute(query).tuples()]
            return rows, session.execute(select(func.count()).select_from(newest)).scalar_one()

    def suspicious(
        self, *, cycle_id: int | None = None, before: int | None = None, limit: int = 50
    ) -> Page[m.Trajectory]:
        """Attempts that passed although something was flagged, newest first, with the verifier's log."""
        query = select(m.Trajectory).where(text("strict AND flags <> '[]'::jsonb"))  # as the partial index has it
        if cycle_id is not None:
            query = query.where(col(m.Trajectory.cycle_id) == cycle_id)
        if before is not None:
            query = query.where(col(m.Trajectory.seq) < before)
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.Trajectory.seq).desc()).limit(limit + 1)).scalars().all()
        return page(rows, limit, "seq")
