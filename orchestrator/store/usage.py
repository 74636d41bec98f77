"""What cycles really cost: attempts, tokens, sandbox and sampler time, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Float, case, cast, func, select
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Repository
from stages.domain import Phase

RANGE = (0.25, 0.75)  # of attempts: what half of them lie between


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sums over the attempts of one cycle, and the middle half of single attempts (None without one)."""

    attempts: int
    updates: int  # optimiser steps; a joint step updates the critic and the actor
    tokens: int  # sampled
    sandbox_s: float
    sampler_s: float
    tokens_each: tuple[float, float] | None
    sandbox_s_each: tuple[float, float] | None
    sampler_s_each: tuple[float, float] | None


class UsageQueries(Repository):
    """`UsageQueries(store)`; joins the store's transactions."""

    def of_cycle(self, cycle_id: int) -> Usage:
        t = m.Trajectory
        each = [
            func.percentile_cont(list(RANGE)).within_group(cast(column, Float))
            for column in (col(t.n_sampled), col(t.sandbox_s), col(t.sampler_s))
        ]
        sums = [func.coalesce(func.sum(c), 0) for c in (col(t.n_sampled), col(t.sandbox_s), col(t.sampler_s))]
        attempts = select(func.count(), *sums, *each).where(col(t.cycle_id) == cycle_id)
        steps = (
            select(col(m.StepMetric.stage_id), col(m.StepMetric.phase), col(m.StepMetric.step))
            .join(m.Stage, col(m.Stage.id) == col(m.StepMetric.stage_id))
            .where(col(m.Stage.cycle_id) == cycle_id)
            .distinct()
            .subquery()
        )
        updates = select(func.coalesce(func.sum(case((steps.c.phase == Phase.JOINT, 2), else_=1)), 0))
        with self._session() as session:
            n, tokens, sandbox_s, sampler_s, *ranges = session.execute(attempts).one()
            return Usage(
                attempts=n,
                updates=int(session.execute(updates).scalar_one()),
                tokens=int(tokens),
                sandbox_s=float(sandbox_s),
                sampler_s=float(sampler_s),
                tokens_each=_pair(ranges[0]),
                sandbox_s_each=_pair(ranges[1]),
                sampler_s_each=_pair(ranges[2]),
            )


def _pair(values: Sequence[float] | None) -> tuple[float, float] | None:
    return (float(values[0]), float(values[1])) if values else None
