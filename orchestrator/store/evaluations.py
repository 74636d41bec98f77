"""Evaluations: numerators and denominators, per suite version and per task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.connection import canonical
from stages.domain import Stratum, Verdict
from stages.errors import StoreError
from stages.records import EvaluationDone


class Evaluations(Repository):
    def save(
        self,
        record: EvaluationDone,
        *,
        cycle_id: int | None = None,
        stage_id: int | None = None,
        checkpoint_id: int | None = None,
        resources: Mapping[str, Any] | None = None,
        reference_only: bool = False,
    ) -> int:
        """Store an evaluation with its tasks; the same measurement again replaces the old one. Returns its id."""
        with self._session() as session:
            suite = self._store.suites.named(record.suite, record.suite_digest)
            values = {
                "cycle_id": cycle_id,
                "stage_id": stage_id,
                "checkpoint_id": checkpoint_id,
                "checkpoint": record.checkpoint,
                "suite": record.suite,
                "suite_digest": record.suite_digest,
                "suite_version": suite.version if suite else "",
                "k": record.k,
                "passed": record.passed,
                "attempts": record.attempts,
                "verdicts": record.verdicts,
                "turns": record.turns,
                "tokens": record.tokens,
                "wall_s": record.wall_s,
                "settings": dict(record.settings),
                "harness_digest": self._setting(m.HarnessSetting, dict(record.settings)),
                "resource_digest": self._setting(m.ResourceSetting, dict(resources)) if resources else None,
                "reference_only": reference_only,
            }
            same = ("stage_id", "checkpoint_id", "checkpoint", "k", "suite", "suite_digest", "harness_digest")
            query = pg.insert(m.Evaluation).values(values)
            query = query.on_conflict_do_update(
                index_elements=same,
                set_={name: query.excluded[name] for name in values if name not in same} | {"created_at": now()},
            )
            evaluation_id = session.execute(query.returning(col(m.Evaluation.id))).scalar_one()
            assert evaluation_id is not None
            session.execute(delete(m.EvaluationTask).where(col(m.EvaluationTask.evaluation_id) == evaluation_id))
            rows = [
                {
                    "evaluation_id": evaluation_id,
                    "task_id": task.task_id,
                    "family": task.family,
                    "stratum": Stratum(task.stratum),
                    "passed": sum(v is Verdict.PASSED for v in task.verdicts),
                    "attempts": len(task.verdicts),
                    "verdict_count": sum(v.counts for v in task.verdicts),
                    "verdicts": [v.value for v in task.verdicts],
                    "checks_passed": list(task.checks_passed),
                    "checks_total": task.checks_total,
                }
                for task in record.tasks
            ]
            if rows:
                session.execute(insert(m.EvaluationTask), rows)
            return evaluation_id

    def _setting(self, table: type[m.HarnessSetting] | type[m.ResourceSetting], settings: dict[str, Any]) -> str:
        digest = hashlib.sha256(canonical(settings).encode()).hexdigest()
        with self._session() as session:
            session.execute(pg.insert(table).values(digest=digest, settings=settings).on_conflict_do_nothing())
        return digest

    def get(self, evaluation_id: int) -> m.Evaluation:
        with self._session() as session:
            if (found := session.get(m.Evaluation, evaluation_id)) is None:
                raise StoreError(f"There is no evaluation {evaluation_id}.")
            return found

    def list(
        self,
        *,
        cycle_id: int | None = None,
        stage_id: int | None = None,
        checkpoint_ids: Sequence[int] = (),
        suite: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Page[m.Evaluation]:
        """Newest first."""
        query = select(m.Evaluation).order_by(col(m.Evaluation.id).desc()).limit(limit + 1)
        for name, value in (("cycle_id", cycle_id), ("stage_id", stage_id), ("suite", suite)):
            if value is not None:
                query = query.where(getattr(m.Evaluation, name) == value)
        if checkpoint_ids:
            query = query.where(col(m.Evaluation.checkpoint_id).in_(checkpoint_ids))
        if before is not None:
            query = query.where(col(m.Evaluation.id) < before)
        with self._session() as session:
            return page(session.execute(query.execution_options(populate_existing=True)).scalars().all(), limit, "id")

    def by_size(self, *, cycle_id: int | None = None, checkpoint_ids: Sequence[int] = ()) -> Sequence[m.Evaluation]:
        """Smallest first, older first among equals: the last one of a suite is the one that is shown, as in the console."""
        found = self.list(cycle_id=cycle_id, checkpoint_ids=checkpoint_ids, limit=1000).items
        return sorted(found, key=lambda e: (e.attempts, e.id or 0))

    def tasks(self, evaluation_ids: Sequence[int]) -> Mapping[int, Sequence[m.EvaluationTask]]:
        """Evaluation id -> its tasks in order of task id."""
        query = select(m.EvaluationTask).where(col(m.EvaluationTask.evaluation_id).in_(evaluation_ids))
        found = {i: _rows() for i in evaluation_ids}
        with self._session() as session:
            for row in session.execute(query.order_by(col(m.EvaluationTask.task_id))).scalars():
                found[row.evaluation_id].append(row)
        return found

    def of_task(self, task_id: str, *, limit: int = 500) -> Sequence[tuple[m.Evaluation, m.EvaluationTask]]:
        """One task over all evaluations, oldest first (`/tasks/{pool}/{task}`)."""
        query = (
            select(m.Evaluation, m.EvaluationTask)
            .join(m.EvaluationTask, col(m.EvaluationTask.evaluation_id) == col(m.Evaluation.id))
            .where(col(m.EvaluationTask.task_id) == task_id)
            .order_by(col(m.Evaluation.id))
            .limit(limit)
        )
        with self._session() as session:
            return session.execute(query).tuples().all()

    def settings(self, digests: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Harness or resource digest -> settings; a comparison flags differing ones."""
        found: dict[str, dict[str, Any]] = {}
        with self._session() as session:
            for table in (m.HarnessSetting, m.ResourceSetting):
                for row in session.execute(select(table).where(col(table.digest).in_(digests))).scalars():
                    found[row.digest] = row.settings
        return found


def _rows() -> list[m.EvaluationTask]:
    return []
