"""Metrics of optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from stages.domain import Phase

EV = "critic/vf_explained_var"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One logged value of a curve."""

    stage_id: int
    stage: str
    arm: str
    phase: Phase
    step: int
    name: str
    value: float | None


class Metrics(Repository):
    def add(self, stage_id: int, phase: Phase, step: int, metrics: Mapping[str, float | None]) -> None:
        """Store one step; the same step again replaces its values."""
        if not metrics:
            return
        rows = [
            {"stage_id": stage_id, "phase": phase, "step": step, "name": name, "value": value, "created_at": now()}
            for name, value in metrics.items()
        ]
        query = insert(m.StepMetric)
        query = query.on_conflict_do_update(
            index_elements=["stage_id", "phase", "step", "name"], set_={"value": query.excluded.value}
        )
        with self._session() as session:
            session.execute(query, rows)

    def curve(
        self, names: Sequence[str], *, cycle_id: int | None = None, stage_ids: Sequence[int] = ()
    ) -> Sequence[Point]:
        """Values stage by stage in the order in which they were first logged: blocks of critic-only updates may come between
        joint steps."""
        query = (
            select(m.StepMetric, col(m.Stage.name), col(m.Stage.arm))
            .join(m.Stage, col(m.Stage.id) == col(m.StepMetric.stage_id))
            .where(col(m.StepMetric.name).in_(names))
            .order_by(col(m.Stage.index), col(m.StepMetric.created_at), col(m.StepMetric.step))
        )
        if cycle_id is not None:
            query = query.where(col(m.Stage.cycle_id) == cycle_id)
        if stage_ids:
            query = query.where(col(m.StepMetric.stage_id).in_(stage_ids))
        with self._session() as session:
            return [
                Point(
                    stage_id=row.stage_id,
                    stage=stage,
                    arm=arm,
                    phase=row.phase,
                    step=row.step,
                    name=row.name,
                    value=row.value,
                )
                for row, stage, arm in session.execute(query)
            ]

    def names(self, stage_id: int) -> Sequence[str]:
        """Which metrics a stage has logged."""
        query = select(col(m.StepMetric.name)).where(col(m.StepMetric.stage_id) == stage_id).distinct()
        with self._session() as session:
            return sorted(session.execute(query).scalars())

    def steps(self, stage_id: int, phase: Phase) -> dict[int, dict[str, float | None]]:
        """Step -> its metrics."""
        query = select(m.StepMetric).where(col(m.StepMetric.stage_id) == stage_id, col(m.StepMetric.phase) == phase)
        found: dict[int, dict[str, float | None]] = {}
        with self._session() as session:
            for row in session.execute(query.order_by(col(m.StepMetric.step), col(m.StepMetric.name))).scalars():
                found.setdefault(row.step, {})[row.name] = row.value
        return found

    def last_step(self, stage_id: int, phase: Phase) -> int:
        """The newest step of a phase, 0 when there is none."""
        return max(self.steps(stage_id, phase), default=0)
