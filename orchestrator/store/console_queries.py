"""Reads that only the console needs: what a page shows, in as few statements as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Select, func, or_, select
from sqlmodel import col

from orchestrator import models as m
from orchestrator.memo import Memo
from orchestrator.store.base import Page, Repository, page


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """k/n of one checkpoint on one suite, with its interval (spec §8)."""

    evaluation_id: int
    checkpoint_id: int | None
    cycle_id: int | None
    checkpoint: str
    suite: str
    suite_digest: str
    k: int  # attempts per task
    n_tasks: int
    passed: int
    verdicts: int
    attempts: int
    low: float | None  # 95 % interval of passed/verdicts, clustered by task; None: not estimable
    high: float | None
    method: str
    turns: int
    tokens: int
    settings: Mapping[str, object]
    reference_only: bool

    @property
    def rate(self) -> float | None:
        """passed / verdicts."""
        return self.passed / self.verdicts if self.verdicts else None

    @property
    def label(self) -> str:
        """Says which attempts n counts."""
        return "k / verdicts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSummary:
    """A cycle with its stages, for lists."""

    cycle: m.Cycle
    stages: Sequence[m.Stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookInfo:
    runbook: m.Runbook
    findings: Sequence[m.Finding]
    reviews: Sequence[m.Review]


class ConsoleQueries(Repository):
    """`ConsoleQueries(store)`; joins the store's transactions."""

    def cycle(self, cycle_id: int) -> m.Cycle | None:
        with self._session() as session:
            return session.get(m.Cycle, cycle_id, populate_existing=True)

    def checkpoint(self, checkpoint_id: int) -> m.Checkpoint | None:
        with self._session() as session:
            return session.get(m.Checkpoint, checkpoint_id, populate_existing=True)

    def trajectory(self, trajectory_id: str) -> m.Trajectory | None:
        with self._session() as session:
            return session.get(m.Trajectory, trajectory_id, populate_existing=True)

    def summaries(self, cycles: Sequence[m.Cycle]) -> list[CycleSummary]:
        stages = self._store.stages.of_cycles([c.id for c in cycles if c.id is not None])
        return [CycleSummary(cycle=c, stages=stages[c.id]) for c in cycles if c.id is not None]

    def cycle_names(self, ids: Sequence[int]) -> dict[int, str]:
        with self._session() as session:
            rows = session.execute(select(col(m.Cycle.id), col(m.Cycle.name)).where(col(m.Cycle.id).in_(ids)))
            return {i: name for i, name in rows.tuples() if i is not None}

    def waiting(self, cycle_ids: Sequence[int]) -> dict[int, int]:
        """Cycle id -> runbooks that wait for people."""
        query = (
            select(col(m.Runbook.cycle_id), func.count())
            .where(col(m.Runbook.cycle_id).in_(cycle_ids), col(m.Runbook.state) == m.RunbookState.WAITING)
            .group_by(col(m.Runbook.cycle_id))
        )
        with self._session() as session:
            return {i: n for i, n in session.execute(query).tuples() if i is not None}

    def main_checkpoints(self, cycle_ids: Sequence[int]) -> dict[int, list[m.Checkpoint]]:
        """Cycle id -> its checkpoints that are no candidates of single steps, in order."""
        found: dict[int, list[m.Checkpoint]] = {i: [] for i in cycle_ids}
        query = (
            select(m.Checkpoint)
            .where(
                col(m.Checkpoint.cycle_id).in_(cycle_ids),
                or_(col(m.Checkpoint.step).is_(None), col(m.Checkpoint.retained)),
            )
            .order_by(col(m.Checkpoint.id))
        )
        with self._session() as session:
            for row in session.execute(query).scalars():
                if row.cycle_id is not None:
                    found[row.cycle_id].append(row)
        return found

    def latest_checkpoints(self, limit: int = 1) -> Sequence[m.Checkpoint]:
        """The newest checkpoints that were measured, newest first."""
        measured = select(col(m.Evaluation.checkpoint_id)).where(col(m.Evaluation.checkpoint_id).is_not(None))
        query = (
            select(m.Checkpoint)
            .where(col(m.Checkpoint.id).in_(measured), col(m.Checkpoint.actor_parent_id).is_not(None))
            .order_by(col(m.Checkpoint.id).desc())
            .limit(limit)
        )
        with self._session() as session:
            return session.execute(query).scalars().all()

    def scores(self, *, cycle_ids: Sequence[int] = (), checkpoint_ids: Sequence[int] = ()) -> list[Score]:
        """Every evaluation of these cycles or checkpoints, oldest first, with an interval clustered by task."""
        if not cycle_ids and not checkpoint_ids:
            return []
        wanted = or_(col(m.Evaluation.cycle_id).in_(cycle_ids), col(m.Evaluation.checkpoint_id).in_(checkpoint_ids))
        with self._session() as session:
            # Columns, not objects: a list of cycles reads hundreds of evaluations.
            own = select(*(getattr(m.Evaluation, name) for name in _SCORED))
            rows: Sequence[Any] = session.execute(own.where(wanted).order_by(col(m.Evaluation.id))).all()
            keys = {row.id: (row.id, row.created_at) for row in rows if row.id is not None}
            known = {i: found for i, key in keys.items() if (found := _INTERVALS.get(key)) is not None}
            missing = [i for i in keys if i not in known]
            task = m.EvaluationTask
            per_task = select(
                col(task.evaluation_id), func.array_agg(col(task.passed)), func.array_agg(col(task.verdict_count))
            ).where(col(task.evaluation_id).in_(missing))
            tasks: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
            if missing:
                grouped = session.execute(per_task.group_by(col(task.evaluation_id))).tuples()
                tasks = {i: (passed, of) for i, passed, of in grouped}
        for row in rows:
            if row.id in missing:
                known[row.id] = _INTERVALS.put(keys[row.id], _interval(row, *tasks.get(row.id, ((), ()))))
        return [_score(row, known[row.id]) for row in rows if row.id is not None]

    def instruction(self, task_id: str, suite: str = "") -> str:
        """The public text of a task, empty when it is not stored. The newest version wins."""
        query = select(col(m.Task.instruction)).join(m.Suite, col(m.Suite.id) == col(m.Task.suite_id))
        query = query.where(col(m.Task.task_id) == task_id)
        if suite:
            query = query.where(col(m.Suite.name) == suite)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Suite.id).desc()).limit(1)).scalar() or ""

    def runbook(self, runbook_id: str) -> RunbookInfo | None:
        """The newest revision with its findings and verdicts."""
        query = select(m.Runbook).where(col(m.Runbook.id) == runbook_id).order_by(col(m.Runbook.revision).desc())
        with self._session() as session:
            row = session.execute(query.limit(1)).scalars().first()
            return self._info(row) if row else None

    def runbooks_from(self, trajectory_id: str) -> list[RunbookInfo]:
        """Runbooks that were written from a trajectory; copies with a planted leak are not among them."""
        planted = select(col(m.KnownLeak.runbook_id)).where(col(m.KnownLeak.runbook_id) == col(m.Runbook.id))
        query = select(m.Runbook).where(col(m.Runbook.source_trajectory_id) == trajectory_id, ~planted.exists())
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.Runbook.seq))).scalars().all()
            return [self._info(row) for row in rows]

    def _info(self, row: m.Runbook) -> RunbookInfo:
        same = {"runbook_id": row.id, "revision": row.revision}
        with self._session() as session:
            findings = select(m.Finding).filter_by(**same).order_by(col(m.Finding.line), col(m.Finding.id))
            reviews = select(m.Review).filter_by(**same).order_by(col(m.Review.id))
            return RunbookInfo(
                runbook=row,
                findings=session.execute(findings).scalars().all(),
                reviews=session.execute(reviews).scalars().all(),
            )

    def replay(self, trajectory_id: str) -> m.Replay | None:
        with self._session() as session:
            return session.get(m.Replay, trajectory_id)

    def events(self, kinds: Sequence[m.EventKind], *, limit: int, within: int = 5000) -> Sequence[m.Event]:
        """The newest events of some kinds among the last `within`, newest first: a bounded walk back along the key."""
        newest = select(func.coalesce(func.max(col(m.Event.id)), 0)).scalar_subquery()
        query = select(m.Event).where(col(m.Event.kind).in_(kinds), col(m.Event.id) > newest - within)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Event.id).desc()).limit(limit)).scalars().all()

    def state_since(self, cycle_id: int) -> datetime | None:
        """When the cycle entered its state; None before its first move. A short walk back: moves are recent or the last."""
        query = select(col(m.Event.created_at)).where(
            col(m.Event.cycle_id) == cycle_id, col(m.Event.kind) == m.EventKind.CYCLE_STATE.value
        )
        with self._session() as session:
            return session.execute(query.order_by(col(m.Event.id).desc()).limit(1)).scalar()

    def alarms(self, stage_id: int, cycle_id: int, *, limit: int = 50) -> Sequence[m.Event]:
        """A stage's newest alarms, newest first."""
        query = select(m.Event).where(
            col(m.Event.cycle_id) == cycle_id,
            col(m.Event.stage_id) == stage_id,
            col(m.Event.kind) == m.EventKind.ALARM.value,
        )
        with self._session() as session:
            return session.execute(query.order_by(col(m.Event.id).desc()).limit(limit)).scalars().all()

    def any_trajectory(self) -> bool:
        with self._session() as session:
            return session.execute(select(col(m.Trajectory.id)).limit(1)).first() is not None

    def checkpoint_page(
        self, *, cycle_id: int | None = None, candidates: bool = False, before: int | None = None, limit: int = 50
    ) -> Page[m.Checkpoint]:
        """Newest first; without `candidates` those of single steps only where they were kept."""
        query = _kept(select(m.Checkpoint), cycle_id, candidates).order_by(col(m.Checkpoint.id).desc())
        if before is not None:
            query = query.where(col(m.Checkpoint.id) < before)
        with self._session() as session:
            return page(session.execute(query.limit(limit + 1)).scalars().all(), limit, "id")

    def count_checkpoints(self, *, cycle_id: int | None = None) -> int:
        """How many `checkpoint_page` pages through."""
        with self._session() as session:
            query = _kept(select(func.count()).select_from(m.Checkpoint), cycle_id, candidates=False)
            return int(session.execute(query).scalar_one())


def _kept(query: Select[Any], cycle_id: int | None, candidates: bool) -> Select[Any]:
    if cycle_id is not None:
        query = query.where(col(m.Checkpoint.cycle_id) == cycle_id)
    if not candidates:
        query = query.where(or_(col(m.Checkpoint.step).is_(None), col(m.Checkpoint.retained)))
    return query


_SCORED = (
    *("id", "created_at", "checkpoint_id", "cycle_id", "checkpoint", "suite", "suite_digest", "k"),
    *("passed", "verdicts", "attempts", "turns", "tokens", "settings", "reference_only"),
)


@dataclass(frozen=True, slots=True)
class _Interval:
    low: float | None
    high: float | None
    method: str
    n_tasks: int


# Lists show hundreds of scores, whose intervals need every task's result: kept per state of an evaluation, which keeps its
# id and gets a new time when it is measured again.
_INTERVALS: Memo[_Interval] = Memo(20_000)


def _interval(row: Any, passed: Sequence[int], of: Sequence[int]) -> _Interval:
    from stages.statistics import clustered_wilson, wilson  # loads scipy, which a page without scores does not need

    found = clustered_wilson(np.asarray(passed), np.asarray(of)) if len(of) else wilson(row.passed, row.verdicts)
    if found is None:
        return _Interval(None, None, "", len(of))
    return _Interval(found.low, found.high, found.method, len(of))


def _score(row: Any, interval: _Interval) -> Score:
    return Score(
        evaluation_id=row.id or 0,
        checkpoint_id=row.checkpoint_id,
        cycle_id=row.cycle_id,
        checkpoint=row.checkpoint,
        suite=row.suite,
        suite_digest=row.suite_digest,
        k=row.k,
        n_tasks=interval.n_tasks,
        passed=row.passed,
        verdicts=row.verdicts,
        attempts=row.attempts,
        low=interval.low,
        high=interval.high,
        method=interval.method,
        turns=row.turns,
        tokens=row.tokens,
        settings=row.settings,
        reference_only=row.reference_only,
    )
