"""What an arm really spent on its way, counted in sampled tokens and optimiser steps (spec §2.4: compute-matched arms)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.lineage import line_of
from orchestrator.store import Store
from stages.config import CycleConfig
from stages.domain import Phase
from stages.errors import ConfigError

# Measuring is no training: evaluations and validation attempts are the same for every arm and are left out.
COUNTED = (
    Phase.EXPLORE,
    Phase.REWRITE,
    Phase.REPLAY,
    Phase.DISTIL,
    Phase.PROFILE,
    Phase.WARMUP,
    Phase.CALIBRATE,
    Phase.JOINT,
)
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of one arm with one seed, from Base to its last stage."""

    attempts: int
    tokens: int  # sampled: attempts and the planner's replies
    updates: int  # optimiser steps; a joint step is two
    by_phase: Mapping[Phase, tuple[int, int, int]]  # attempts, tokens, updates


def spent(store: Store, cycle_id: int) -> Spent:
    """Everything on the path of a branch that is done."""
    cycles = line_of(store, cycle_id)
    attempts = dict.fromkeys(COUNTED, 0)
    tokens, updates = dict(attempts), dict(attempts)
    for row in store.experiments.attempts_of(cycles):
        if (phase := row.phase.paid_by) in attempts:  # what a batch had no room for was sampled all the same
            attempts[phase] += row.attempts
            tokens[phase] += row.sampled
    for _, phase, steps in store.experiments.updates_of(cycles):
        if phase in updates:
            updates[phase] += 2 * steps if phase is Phase.JOINT else steps
    for cycle in cycles:
        for phases in store.stages.phases_of_cycle(cycle).values():
            tokens[Phase.REWRITE] += sum(int(p.facts.get("tokens") or 0) for p in phases if p.phase is Phase.REWRITE)
    return Spent(
        attempts=sum(attempts.values()),
        tokens=sum(tokens.values()),
        updates=sum(updates.values()),
        by_phase={p: (attempts[p], tokens[p], updates[p]) for p in COUNTED},
    )


def base_tokens_per_attempt(store: Store, cycle_id: int) -> float:
    """Mean sampled tokens of Base's own training attempts: those of the first stage that sampled at all.

    Raises ConfigError when there are none.
    """
    oldest = line_of(store, cycle_id)[-1]
    order = {row.id: row.index for row in store.stages.of_cycle(oldest)}
    rows = [
        r
        for r in store.experiments.attempts_of([oldest])
        if r.phase in (Phase.EXPLORE, Phase.PROFILE) and r.attempts and r.sampled
    ]
    if not rows:
        raise ConfigError(f"cycle {oldest} has no attempt of Base to learn the length of attempts from")
    first = min(rows, key=lambda r: order[r.stage_id])
    return first.sampled / first.attempts


def matched(config: CycleConfig, goal: Spent, tokens_per_attempt: float) -> CycleConfig:
    """Direct PPO that spends what `goal` says: updates fix the number of joint steps, tokens the size of a batch.

    One RPR round straight from Base with the recipe's own profile and calibration; what these spend is subtracted first.
    Raises ConfigError when the goal is too small for that, or asks for more than 4,000 steps.
    """
    rpr = config.rpr_of(1)
    profile = (rpr.profile.draw.n_tasks or config.pool_size) * rpr.profile.attempts_per_task
    warm = rpr.warmup.epochs * max(1, round(profile / rpr.warmup.batch_size))
    steps = round((goal.updates - warm - rpr.critic_only_steps) / 2)
    batches = steps + rpr.critic_only_steps
    batch = round((goal.tokens / tokens_per_attempt - profile) / batches) if steps > 0 else 0
    if steps < 1 or batch < 1 or steps > MAX_STEPS:
        raise ConfigError(
            f"direct PPO cannot be matched: {goal.updates} updates and {goal.tokens} tokens leave {steps} joint steps of {batch} "
            f"attempts after a profile of {profile} attempts and a warm-up of {warm} updates; make rpr.0.profile smaller or "
            "rpr.0.warmup.batch_size larger for this arm"
        )
    keep = sorted({max(1, round(steps * part)) for part in (0.25, 0.5, 0.75, 1.0)})
    surplus = rpr.over_sampling_batch_size / rpr.global_batch_size
    own = rpr.model_copy(
        update={
            "joint_steps": steps,
            "keep_steps": tuple(keep),
            "global_batch_size": max(1, round(batch / surplus)),
            "over_sampling_batch_size": batch,
        }
    )
    return config.model_copy(update={"rpr": (own,), "rounds": 1, "direct_ppo": True})


def ratio(own: Spent, goal: Spent) -> tuple[float, float]:
    """(tokens, updates) spent as fractions of the goal: what matching really came to."""
    return own.tokens / max(1, goal.tokens), own.updates / max(1, goal.updates)
