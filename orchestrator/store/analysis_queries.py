"""Reads and small writes of import, audit and comparison: outcomes as columns, evaluations with their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, String, func, literal_column, or_, select, text, type_coerce
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.trajectories import TrajectoryFilter
from orchestrator.store.trajectories import _filtered as filtered
from stages.domain import CheckRole, CheckStatus, EndReason, Phase, Verdict
from stages.records import EvaluationDone, TaskScore

OUTCOMES = (
    "id",
    "task_id",
    "family",
    "stratum",
    "attempt",
    "verdict",
    "strict",
    "progress",
    "n_checks",
    "only_gate_failed",
    "nop_progress",
    "n_turns",
    "n_sampled",
    "duration_s",
)
VERDICTS = {v.value: v for v in Verdict}


class AuditLine(NamedTuple):
    """An audit as a list shows it."""

    id: int
    name: str
    set_digest: str
    created_by: str
    created_at: datetime
    selection: Mapping[str, Any]
    labels: Sequence[str]
    verdicts: int
    masked: int

    @property
    def scales(self) -> str:
        return str(self.selection.get("scales", ""))

    @property
    def recalibrated(self) -> bool:
        return bool(self.selection.get("recalibrated"))


class AnalysisQueries(Repository):
    """`AnalysisQueries(store)`; joins the store's transactions."""

    def outcomes(self, where: TrajectoryFilter) -> Sequence[Any]:
        """Rows with the fields of OUTCOMES, in the order in which they were recorded."""
        query = filtered(select(*(getattr(m.Trajectory, name) for name in OUTCOMES)), where)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Trajectory.seq))).all()

    def scored_columns(self, where: TrajectoryFilter) -> tuple[dict[str, Sequence[Any]], int]:
        """Columns of the attempts that have a verdict, in the order of recording, and how many have none.

        A million rows are read at once for an audit, so words stay plain strings and no row object is made.
        """
        own = m.Trajectory
        columns: dict[str, Any] = {
            "id": col(own.id),
            "family": col(own.family),
            "stratum": type_coerce(col(own.stratum), String),
            "strict": col(own.strict),
            "progress": col(own.progress),
            "n_checks": col(own.n_checks),
            "only_gate_failed": col(own.only_gate_failed),
            "nop_progress": col(own.nop_progress),
            "n_turns": col(own.n_turns),
        }
        counts = col(own.verdict).in_([Verdict.PASSED, Verdict.FAILED])
        chosen: Select[Any] = select(*columns.values()).where(counts)
        query = filtered(chosen, where).order_by(col(own.seq))
        with self._session() as session:
            every = session.execute(filtered(select(func.count()).select_from(own), where)).scalar_one()
            rows = session.execute(query).tuples().all()
        found = zip(*rows, strict=True) if rows else ((),) * len(columns)
        return dict(zip(columns, found, strict=True)), every - len(rows)

    def by_step(self, stage_id: int, phase: Phase) -> Sequence[Any]:
        """(step, id, family, verdict, strict, n_turns, n_sampled, end_reason) of everything that a phase started, dropped
        or not, each step's attempts in order of index."""
        names = ("step", "id", "family", "verdict", "strict", "n_turns", "n_sampled", "end_reason")
        query = select(*(getattr(m.Trajectory, name) for name in names)).where(
            col(m.Trajectory.stage_id) == stage_id, col(m.Trajectory.phase).in_([phase, phase.surplus])
        )
        with self._session() as session:
            return session.execute(query.order_by(col(m.Trajectory.step), col(m.Trajectory.seq))).all()

    def passed_gates(self, where: TrajectoryFilter) -> dict[str, int]:
        """Trajectory id -> how many gate checks it passed, where it passed one (the T1 count counts them)."""
        query = select(col(m.CheckResult.trajectory_id), func.count()).where(
            col(m.CheckResult.role) == CheckRole.GATE,
            col(m.CheckResult.status) == CheckStatus.PASSED,
            col(m.CheckResult.trajectory_id).in_(filtered(select(col(m.Trajectory.id)), where)),
        )
        with self._session() as session:
            return dict(session.execute(query.group_by(col(m.CheckResult.trajectory_id))).tuples().all())

    def set_sampled(self, counts: Mapping[str, int]) -> None:
        """Trajectory id -> tokens that its model wrote, for attempts without token arrays."""
        query = text(
            "UPDATE trajectory SET n_sampled = s.n FROM unnest(CAST(:ids AS text[]), CAST(:counts AS int[])) AS s(id, n) "
            "WHERE trajectory.id = s.id"
        )
        with self._session() as session:
            session.execute(query, {"ids": list(counts), "counts": list(counts.values())})

    def evaluation_rows(self, checkpoint_ids: Sequence[int], suite: str | None = None) -> Sequence[m.Evaluation]:
        """Every evaluation of these checkpoints, newest first, without its tasks."""
        query = select(m.Evaluation).where(col(m.Evaluation.checkpoint_id).in_(checkpoint_ids))
        if suite is not None:
            query = query.where(col(m.Evaluation.suite) == suite)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Evaluation.id).desc())).scalars().all()

    def records(self, rows: Sequence[m.Evaluation]) -> dict[int, EvaluationDone]:
        """Evaluation id -> the evaluation with its tasks in order of id; resources stand among its settings."""
        own = m.EvaluationTask
        names = ("evaluation_id", "task_id", "family", "stratum", "verdicts", "checks_passed", "checks_total")
        query = select(*(getattr(own, name) for name in names)).where(
            col(own.evaluation_id).in_([row.id for row in rows if row.id is not None])
        )
        tasks: dict[int, list[TaskScore]] = {}
        with self._session() as session:
            for evaluation, task, family, stratum, verdicts, passed, total in session.execute(
                query.order_by(col(own.task_id))
            ).tuples():
                tasks.setdefault(evaluation, []).append(
                    TaskScore(
                        task_id=task,
                        family=family,
                        stratum=stratum.value,
                        verdicts=tuple(VERDICTS[v] for v in verdicts),
                        checks_passed=tuple(passed),
                        checks_total=total,
                    )
                )
        limits = self._store.evaluations.settings([r.resource_digest for r in rows if r.resource_digest])
        return {
            row.id: _record(row, tasks.get(row.id, []), limits.get(row.resource_digest or "", {}))
            for row in rows
            if row.id is not None
        }

    def suites_of(self, checkpoint_ids: Sequence[int]) -> Sequence[str]:
        """Suites on which at least one of these checkpoints was measured, by name."""
        query = select(col(m.Evaluation.suite)).where(col(m.Evaluation.checkpoint_id).in_(checkpoint_ids)).distinct()
        with self._session() as session:
            return sorted(session.execute(query).scalars())

    def suites_by_checkpoint(self, checkpoint_ids: Sequence[int]) -> dict[int, list[str]]:
        """Checkpoint id -> suites on which it was measured, by name."""
        own = m.Evaluation
        query = select(col(own.checkpoint_id), col(own.suite)).where(col(own.checkpoint_id).in_(checkpoint_ids))
        found: dict[int, list[str]] = {}
        with self._session() as session:
            for checkpoint, suite in session.execute(query.distinct().order_by(col(own.suite))).tuples():
                found.setdefault(checkpoint or 0, []).append(suite)
        return found

    def measured_checkpoints(
        self, *, words: str = "", before: int | None = None, limit: int = 60
    ) -> Page[m.Checkpoint]:
        """Checkpoints with an evaluation, newest first; `words` are looked for in their names and their cycles' names."""
        measured = select(col(m.Evaluation.id)).where(col(m.Evaluation.checkpoint_id) == col(m.Checkpoint.id))
        query = select(m.Checkpoint).where(measured.exists())
        if words:
            named = select(col(m.Cycle.id)).where(col(m.Cycle.name).icontains(words, autoescape=True))
            query = query.where(
                or_(col(m.Checkpoint.name).icontains(words, autoescape=True), col(m.Checkpoint.cycle_id).in_(named))
            )
        if before is not None:
            query = query.where(col(m.Checkpoint.id) < before)
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.Checkpoint.id).desc()).limit(limit + 1)).scalars().all()
        return page(rows, limit, "id")

    def task_digests(self, suite: str, digest: str) -> dict[str, str]:
        """Task id -> digest of a suite version; {} when the version is not stored."""
        query = (
            select(col(m.Task.task_id), col(m.Task.digest))
            .join(m.Suite, col(m.Suite.id) == col(m.Task.suite_id))
            .where(col(m.Suite.name) == suite, col(m.Suite.digest) == digest)
        )
        with self._session() as session:
            return dict(session.execute(query).tuples().all())

    def task_categories(self, suite: str, digest: str) -> dict[str, Sequence[str]]:
        """Task id -> categories of a suite version (of the newest, when this one is not stored)."""
        found = self._store.suites.named(suite, digest) or self._store.suites.named(suite)
        if found is None:
            return {}
        query = select(col(m.Task.task_id), col(m.Task.categories)).where(col(m.Task.suite_id) == found.id)
        with self._session() as session:
            return {task: own for task, own in session.execute(query).tuples() if own}

    def end_reasons(self, checkpoint_ids: Sequence[int], suite: str) -> dict[int, dict[EndReason, int]]:
        """Checkpoint id -> how its stored attempts on a suite ended."""
        own = m.Trajectory
        query = (
            select(col(own.checkpoint_id), col(own.end_reason), func.count())
            .where(col(own.checkpoint_id).in_(checkpoint_ids), col(own.suite) == suite)
            .where(or_(col(own.phase).is_(None), col(own.phase) == Phase.EVALUATE))
            .group_by(col(own.checkpoint_id), col(own.end_reason))
        )
        found: dict[int, dict[EndReason, int]] = {}
        with self._session() as session:
            for checkpoint, end, count in session.execute(query).tuples():
                found.setdefault(checkpoint or 0, {})[end] = count
        return found

    def audit_page(
        self, *, cycle_id: int | None = None, set_digest: str = "", before: int | None = None, limit: int = 50
    ) -> Page[AuditLine]:
        """Audits, newest first, without their results; with `set_digest` those that re-scored the same attempts."""
        own = m.Audit
        result = col(own.result)
        query = select(
            *(getattr(own, name) for name in ("id", "name", "set_digest", "created_by", "created_at", "selection")),
            func.jsonb_path_query_array(col(own.formulas), literal_column("'$[*].label'::jsonpath")),
            result["verdicts"],
            result["masked"],
        )
        if cycle_id is not None:
            query = query.where(col(own.cycle_id) == cycle_id)
        if set_digest:
            query = query.where(col(own.set_digest) == set_digest)
        if before is not None:
            query = query.where(col(own.id) < before)
        with self._session() as session:
            rows = session.execute(query.order_by(col(own.id).desc()).limit(limit + 1)).tuples().all()
        return page([AuditLine(*row) for row in rows], limit, "id")

    def profiled_stages(self, *, limit: int = 200) -> list[tuple[str, str]]:
        """(CYCLE/STAGE, in words) of the newest stages that have profiled family scales."""
        query = (
            select(col(m.Stage.cycle_id), col(m.Stage.name), func.max(col(m.Profile.id)))
            .join(m.Profile, col(m.Profile.stage_id) == col(m.Stage.id))
            .where(col(m.Stage.arm) == "main")
            .group_by(col(m.Stage.cycle_id), col(m.Stage.name))
            .order_by(func.max(col(m.Profile.id)).desc())
            .limit(limit)
        )
        with self._session() as session:
            return [(f"{c}/{name}", f"cycle {c}, {name}") for c, name, _ in session.execute(query).tuples()]


def _record(row: m.Evaluation, tasks: Sequence[TaskScore], resources: Mapping[str, Any]) -> EvaluationDone:
    return EvaluationDone(
        suite=row.suite,
        suite_digest=row.suite_digest,
        checkpoint=row.checkpoint,
        k=row.k,
        passed=row.passed,
        attempts=row.attempts,
        verdicts=row.verdicts,
        tasks=tuple(tasks),
        turns=row.turns,
        tokens=row.tokens,
        wall_s=row.wall_s,
        settings=row.settings | {f"resources.{k}": v for k, v in resources.items()},
    )
