"""Trajectories: bulk writes, lists, one trajectory's inside, and domain objects for a resumed flow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Select, delete, func, select, text, update
from sqlalchemy.orm import defer
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.bulk import copy_rows
from orchestrator.store.trajectory_rows import (
    check_rows,
    segment_rows,
    trajectory_row,
    turn_rows,
)
from stages import domain
from stages.domain import EndReason, Phase, Stratum, Verdict
from stages.errors import StoreError

WITHOUT_LOG = defer(m.Trajectory.verifier_log)  # type: ignore[arg-type]
FEW = 1_000  # rows that are read by their filters rather than by time
COUNT_CAP = 10_000  # a list says "more than 10,000" instead of counting a million rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """What a list shows; every field that is not None narrows it."""

    cycle_id: int | None = None
    stage_id: int | None = None
    phase: Phase | None = None
    step: int | None = None
    checkpoint_id: int | None = None
    suite: str | None = None
    task_id: str | None = None
    family: str | None = None
    stratum: Stratum | None = None
    verdict: Verdict | None = None
    end_reason: EndReason | None = None
    runbook_id: str | None = None
    only_gate_failed: bool | None = None
    flagged: bool | None = None


class Success(NamedTuple):
    """k/n of one phase or step, with both denominators (spec §8)."""

    stage_id: int | None
    phase: Phase | None
    step: int
    suite: str
    passed: int
    verdicts: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryDetail:
    trajectory: m.Trajectory
    turns: Sequence[m.Turn]
    checks: Sequence[m.CheckResult]
    segments: Sequence[m.Segment]


class Trajectories(Repository):
    def add(
        self,
        trajectories: Sequence[domain.Trajectory],
        *,
        cycle_id: int | None = None,
        stage_id: int | None = None,
        phase: Phase | None = None,
        steps: Sequence[int] | None = None,
        checkpoint_ids: Sequence[int | None] | None = None,
        suites: Mapping[str, str] | None = None,
        artifact: str | None = None,
    ) -> None:
        """Store a chunk with its turns, checks and segments. An attempt with a known id replaces the old one whole.

        `steps` and `checkpoint_ids` are aligned with `trajectories`; `suites` maps task ids to suites for trajectories
        that do not say theirs.
        """
        known = suites or {}
        rows = [
            trajectory_row(
                t,
                cycle_id=cycle_id,
                stage_id=stage_id,
                phase=phase,
                step=steps[n] if steps else 0,
                suite=known.get(t.task_id, ""),
                checkpoint_id=checkpoint_ids[n] if checkpoint_ids else None,
                artifact=artifact,
            )
            for n, t in enumerate(trajectories)
        ]
        with self._session() as session:
            session.execute(delete(m.Trajectory).where(col(m.Trajectory.id).in_([t.id for t in trajectories])))
            copy_rows(session, m.Trajectory, rows)
            copy_rows(session, m.Turn, (row for t in trajectories for row in turn_rows(t)))
            copy_rows(session, m.CheckResult, (row for t in trajectories for row in check_rows(t)))
            copy_rows(session, m.Segment, (row for t in trajectories for row in segment_rows(t)))

    def set_trained(self, rewards: Mapping[str, float], artifact: str | None = None) -> None:
        """Trajectory id -> reward that training used; `artifact` holds values and advantages (`orchestrator.trained`)."""
        query = text(
            "UPDATE trajectory SET reward = r.reward, trained_on = :artifact "
            "FROM unnest(CAST(:ids AS text[]), CAST(:rewards AS float8[])) AS r(id, reward) WHERE trajectory.id = r.id"
        )
        with self._session() as session:
            session.execute(query, {"ids": list(rewards), "rewards": list(rewards.values()), "artifact": artifact})

    def set_phase(self, ids: Sequence[str], phase: Phase) -> None:
        """Move attempts to another phase: those that their step's batch had no room for."""
        with self._session() as session:
            session.execute(update(m.Trajectory).where(col(m.Trajectory.id).in_(ids)).values(phase=phase))

    # ----------------------------------------------------------------- reading

    def list(
        self, where: TrajectoryFilter, *, before: int | None = None, limit: int = 50, count: int | None = None
    ) -> Page[m.Trajectory]:
        """Newest first, without the verifier's log. `count`: what `count` has said, where it was asked before."""
        query = self._chosen(where, count)
        if before is not None:
            query = query.where(col(m.Trajectory.seq) < before)
        query = query.order_by(col(m.Trajectory.seq).desc()).limit(limit + 1)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "seq")

    def count(self, where: TrajectoryFilter, *, cap: int = COUNT_CAP) -> int:
        """How many there are; `cap + 1` means more than `cap`."""
        some = _filtered(select(col(m.Trajectory.seq)), where).limit(cap + 1).subquery()
        with self._session() as session:
            return session.execute(select(func.count()).select_from(some)).scalar_one()

    def _chosen(self, where: TrajectoryFilter, count: int | None) -> Select[Any]:
        """The rows of a filter. In order of time a page of a few among a million would walk back through all of them, so
        a few are looked up by the filter first."""
        if count is None or count > FEW:
            return _filtered(select(m.Trajectory), where).options(WITHOUT_LOG)
        with self._session() as session:
            seqs = session.execute(_filtered(select(col(m.Trajectory.seq)), where).limit(COUNT_CAP + 1)).scalars().all()
        return select(m.Trajectory).where(col(m.Trajectory.seq).in_(seqs)).options(WITHOUT_LOG)

    def expensive_failures(
        self, where: TrajectoryFilter, *, limit: int = 50, count: int | None = None
    ) -> Sequence[m.Trajectory]:
        """Attempts that used most sampled tokens and were not solved, most expensive first. `count`: as in `list`."""
        query = self._chosen(where, count)
        query = query.where(~col(m.Trajectory.strict)).order_by(
            col(m.Trajectory.n_sampled).desc(), col(m.Trajectory.seq)
        )
        with self._session() as session:
            return session.execute(query.limit(limit)).scalars().all()

    def success(self, cycle_id: int) -> Sequence[Success]:
        """Passed, verdicts and attempts per stage, phase, step and suite of a cycle, in the order of the loop."""
        passed, verdict = col(m.Trajectory.strict), col(m.Trajectory.verdict)
        by = [getattr(m.Trajectory, name) for name in ("stage_id", "phase", "step", "suite")]
        query = (
            select(
                *by,
                func.count().filter(passed),
                func.count().filter(verdict.in_([Verdict.PASSED, Verdict.FAILED])),
                func.count(),
            )
            .where(col(m.Trajectory.cycle_id) == cycle_id)
            .group_by(*by)
            .order_by(func.min(col(m.Trajectory.seq)))
        )
        with self._session() as session:
            return [Success(*row) for row in session.execute(query)]

    def get(self, trajectory_id: str) -> m.Trajectory:
        with self._session() as session:
            if (found := session.get(m.Trajectory, trajectory_id, populate_existing=True)) is None:
                raise StoreError(f"There is no trajectory {trajectory_id}.")
            return found

    def detail(self, trajectory_id: str, *, first_turn: int = 0, turns: int = 6000) -> TrajectoryDetail:
        """A trajectory with up to `turns` turns from `first_turn` on."""
        with self._session() as session:
            trajectory = self.get(trajectory_id)
            of = {"trajectory_id": trajectory_id}
            shown = select(m.Turn).filter_by(**of).where(col(m.Turn.index) >= first_turn)
            return TrajectoryDetail(
                trajectory=trajectory,
                turns=session.execute(shown.order_by(col(m.Turn.index)).limit(turns)).scalars().all(),
                checks=session.execute(select(m.CheckResult).filter_by(**of).order_by(col(m.CheckResult.index)))
                .scalars()
                .all(),
                segments=session.execute(select(m.Segment).filter_by(**of).order_by(col(m.Segment.index)))
                .scalars()
                .all(),
            )

    def search_turns(self, trajectory_id: str, words: str, *, limit: int = 500) -> Sequence[int]:
        """Indices of turns whose action or observation contains `words`."""
        held = col(m.Turn.action).icontains(words, autoescape=True)
        held |= col(m.Turn.observation).icontains(words, autoescape=True)
        query = select(col(m.Turn.index)).where(col(m.Turn.trajectory_id) == trajectory_id, held)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Turn.index)).limit(limit)).scalars().all()

    def whole(self, trajectory_id: str) -> domain.Trajectory:
        """One trajectory with its token arrays and raw answers, from its artifact."""
        row = self.get(trajectory_id)
        if row.artifact is None:
            raise StoreError(f"The trajectory {trajectory_id} has no token arrays (imported, or they were not kept).")
        return self._store.artifacts.load_trajectories(row.artifact, [trajectory_id])[0]

    def raw_answers(self, ids: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The sampler's own answers as they are stored. Raises StoreError for an attempt without them."""
        query = select(col(m.Trajectory.id), col(m.Trajectory.artifact)).where(col(m.Trajectory.id).in_(list(ids)))
        with self._session() as session:
            rows = session.execute(query).tuples().all()
        if missing := set(ids) - {trajectory_id for trajectory_id, artifact in rows if artifact}:
            raise StoreError(f"{len(missing)} attempts are not stored with their answers (first: {min(missing)}).")
        found: dict[str, tuple[str, ...]] = {}
        for key in {artifact for _, artifact in rows if artifact}:
            found |= self._store.artifacts.load_answers(key, {i for i, artifact in rows if artifact == key})
        return found

    def load(self, stage_id: int, phase: Phase, *, step: int | None = None) -> Sequence[domain.Trajectory]:
        """Everything a phase (or one step of it) has recorded, in the order in which it was recorded."""
        query = select(col(m.Trajectory.id), col(m.Trajectory.artifact)).where(
            col(m.Trajectory.stage_id) == stage_id, col(m.Trajectory.phase) == phase
        )
        if step is not None:
            query = query.where(col(m.Trajectory.step) == step)
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.Trajectory.seq))).tuples().all()
        found: dict[str, domain.Trajectory] = {}
        for key in dict.fromkeys(artifact for _, artifact in rows):
            if key is None:
                raise StoreError(
                    f"Attempts of stage {stage_id}, phase {phase}, have no token arrays; run the phase again."
                )
            ids = {trajectory_id for trajectory_id, artifact in rows if artifact == key}
            chunk = self._store.artifacts.load_trajectories(key)
            found |= {t.id: t for t in chunk if t.id in ids}
        return [found[trajectory_id] for trajectory_id, _ in rows]

    def outcomes(self, where: TrajectoryFilter) -> Sequence[Any]:
        """Columns that a re-scoring needs, as plain tuples: id, family, strict, progress, n_checks, n_turns, verdict, …"""
        names = (
            "id task_id family stratum strict progress n_checks only_gate_failed n_turns n_sampled verdict reward "
            "nop_progress"
        )
        query = _filtered(
            select(*(getattr(m.Trajectory, name) for name in names.split())),
            where,
        )
        with self._session() as session:
            return session.execute(query.order_by(col(m.Trajectory.seq))).all()

    def boundaries(self, stage_id: int) -> dict[str, int]:
        """Boundary outcome -> count over a stage, and `drift_tokens` (design: invariant 2)."""
        query = text(
            "SELECT key, sum(value::bigint) FROM trajectory, jsonb_each_text(boundaries) WHERE stage_id = :stage "
            "GROUP BY key UNION ALL SELECT 'drift_tokens', COALESCE(sum(drift_tokens), 0) FROM trajectory "
            "WHERE stage_id = :stage"
        )
        with self._session() as session:
            return {key: int(count) for key, count in session.execute(query, {"stage": stage_id})}

    def verdict_counts(self, stage_id: int) -> Sequence[Any]:
        """(phase, step, verdict, end_reason, count) of a stage: the masked ones are counted too."""
        by = [getattr(m.Trajectory, name) for name in ("phase", "step", "verdict", "end_reason")]
        query = select(*by, func.count()).where(col(m.Trajectory.stage_id) == stage_id).group_by(*by)
        with self._session() as session:
            return session.execute(query).all()

    def ids(self, stage_id: int, phase: Phase, step: int | None = None) -> set[str]:
        """Ids that a phase has recorded: a resumed flow need not repeat them."""
        query = select(col(m.Trajectory.id)).where(
            col(m.Trajectory.stage_id) == stage_id, col(m.Trajectory.phase) == phase
        )
        if step is not None:
            query = query.where(col(m.Trajectory.step) == step)
        with self._session() as session:
            return set(session.execute(query).scalars())


def _filtered(query: Select[Any], where: TrajectoryFilter) -> Select[Any]:
    equal: Iterable[str] = set(TrajectoryFilter.__dataclass_fields__) - {"flagged", "only_gate_failed"}
    for name in sorted(equal):
        if (value := getattr(where, name)) is not None:
            query = query.where(getattr(m.Trajectory, name) == value)
    if where.only_gate_failed is not None:  # a bare boolean, as the partial index has it
        only = col(m.Trajectory.only_gate_failed)
        query = query.where(only if where.only_gate_failed else ~only)
    if where.flagged is not None:
        some = text("flags <> '[]'::jsonb")  # as the partial index has it
        query = query.where(some if where.flagged else ~col(m.Trajectory.flags).op("<>")(text("'[]'::jsonb")))
    return query
