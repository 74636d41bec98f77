"""What a cycle will cost, as ranges, and what it did cost.

Attempts, updates and wall time come from the plan (`plan.estimate`); tokens, sandbox time and sampler time from single
attempts of a cycle that was measured: the one it is cloned from, or the newest done one of the same recipe.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import models as m
from orchestrator.plan import estimate
from orchestrator.store import Store
from orchestrator.store.usage import Usage, UsageQueries
from stages.config import CycleConfig

Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Stored in `cycle.estimate`. None: nothing comparable was measured yet."""

    attempts: int
    updates: int
    wall_s: Range
    tokens: Range | None = None
    sandbox_s: Range | None = None
    sampler_s: Range | None = None
    like: int | None = None  # the cycle whose attempts were measured

    def values(self) -> dict[str, Any]:
        return asdict(self)


def predict(store: Store, config: CycleConfig, *, like: int | None = None) -> Prediction:
    """Raises ConfigError when the configuration has no plan. `like`: the cycle it is cloned from."""
    plan = estimate(config)
    measured_id, measured = _measured(store, config.recipe, like)
    return Prediction(
        attempts=plan.attempts,
        updates=plan.updates,
        wall_s=plan.wall_s,
        tokens=_times(measured.tokens_each, plan.attempts) if measured else None,
        sandbox_s=_times(measured.sandbox_s_each, plan.attempts) if measured else None,
        sampler_s=_times(measured.sampler_s_each, plan.attempts) if measured else None,
        like=measured_id,
    )


def _measured(store: Store, recipe: str, like: int | None) -> tuple[int | None, Usage | None]:
    done = store.cycles.list(states=[m.CycleState.DONE], recipe=recipe, limit=1).items
    for cycle_id in filter(None, (like, *(c.id for c in done))):
        usage = UsageQueries(store).of_cycle(cycle_id)
        if usage.attempts:
            return cycle_id, usage
    return None, None


def _times(each: Range | None, n: int) -> Range | None:
    return None if each is None else (each[0] * n, each[1] * n)
