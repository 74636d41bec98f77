"""A `CycleConfig` becomes an ordered list of stages and an estimate. Pure: the launch form shows it before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.models import Stage, StageKind
from stages.config import CycleConfig, RPRConfig, RSRConfig
from stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage. `name` is the name of the checkpoint that it ends in."""

    index: int
    kind: StageKind
    round: int
    name: str
    parent: str | None  # name of the checkpoint that it starts from


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted cost of a stage or a cycle."""

    attempts: int  # sandboxes started
    updates: int  # optimiser steps, an upper bound for distillation
    wall_s: tuple[float, float]  # low, high, on the embedded default with two cores

    def __add__(self, other: Estimate) -> Estimate:
        low, high = self.wall_s[0] + other.wall_s[0], self.wall_s[1] + other.wall_s[1]
        return Estimate(
            attempts=self.attempts + other.attempts, updates=self.updates + other.updates, wall_s=(low, high)
        )


# Seconds per attempt and per update of the embedded model, measured on two cores; the range covers a busy machine.
ATTEMPT_S = (0.025, 0.06)
UPDATE_S = (0.2, 0.6)


def plan(config: CycleConfig) -> list[StagePlan]:
    """Base, then one RSR and one RPR per round (`direct_ppo`: RPR alone); after `fork`, up to `last_stage`.

    Raises ConfigError when one of these names no stage.
    """
    stages = [StagePlan(index=0, kind=StageKind.BASE, round=0, name="Base", parent=None)]
    kinds = [(StageKind.RPR, "RPR")] if config.direct_ppo else [(StageKind.RSR, "RSR"), (StageKind.RPR, "RPR")]
    for round_ in range(1, config.rounds + 1):
        for kind, label in kinds:
            stages.append(
                StagePlan(index=len(stages), kind=kind, round=round_, name=f"{label}-{round_}", parent=stages[-1].name)
            )
    names = [s.name for s in stages]
    last = _index(names, config.last_stage, "last_stage") if config.last_stage else len(stages) - 1
    first = _index(names, config.fork.stage, "fork.stage") + 1 if config.fork else 0
    if first > last:
        raise ConfigError(
            f"nothing is left to do between fork.stage = {names[first - 1]} and last_stage = {names[last]}; there is: "
            + ", ".join(names)
        )
    return stages[first : last + 1]


def _index(names: list[str], name: str, key: str) -> int:
    if name not in names:
        raise ConfigError(f"{key} = {name!r}: this cycle has no such stage; it has {', '.join(names)}")
    return names.index(name)


def stage_rows(config: CycleConfig) -> list[Stage]:
    """The plan as rows (`Stages.plan` sets their cycle), so that all five nodes show before anything runs."""
    return [
        Stage(
            cycle_id=0,
            index=p.index,
            kind=p.kind,
            round=p.round,
            name=p.name,
            plan={"parent": p.parent},
            expected_s=sum(estimate_stage(config, p).wall_s) / 2,
        )
        for p in plan(config)
    ]


def estimate(config: CycleConfig) -> Estimate:
    """The sum over all stages."""
    total = Estimate(attempts=0, updates=0, wall_s=(0.0, 0.0))
    for stage in plan(config):
        total += estimate_stage(config, stage)
    return total


def estimate_stage(config: CycleConfig, stage: StagePlan) -> Estimate:
    """Attempts and updates of one stage, its evaluation included."""
    attempts = config.reported_size * config.evaluate.attempts_per_task * len(config.reported_suites)
    updates = 0
    validation = config.validation_size * config.validate_.attempts_per_task
    if stage.kind is StageKind.RSR:
        more, updates = _rsr(config.rsr_of(stage.round), config.pool_size)
        attempts += more + validation * len(config.rsr_of(stage.round).distil.candidates)
    elif stage.kind is StageKind.RPR:
        rpr = config.rpr_of(stage.round)
        more, updates = _rpr(
            rpr, config.pool_size, warm=(stage.round == 1 or not rpr.inherit_critic) and not rpr.critic_reset
        )
        attempts += more + validation * max(1, len(rpr.keep_steps))
    return _cost(attempts, updates)


def _rsr(config: RSRConfig, pool: int) -> tuple[int, int]:
    tasks = config.explore.draw.n_tasks or pool
    books = tasks * config.rewrite.runbooks_per_task
    attempts = tasks * config.explore.attempts_per_task + books * config.replay.attempts_per_runbook
    attempts += 2 * config.replay.control_runbooks
    return attempts, config.distil.epochs * max(1, round(tasks / config.distil.batch_size))


def _rpr(config: RPRConfig, pool: int, *, warm: bool) -> tuple[int, int]:
    profile = (config.profile.draw.n_tasks or pool) * config.profile.attempts_per_task
    steps = config.critic_only_steps + config.joint_steps
    updates = config.critic_only_steps + 2 * config.joint_steps
    if warm:
        updates += config.warmup.epochs * max(1, round(profile / config.warmup.batch_size))
    return profile + steps * config.over_sampling_batch_size, updates


def _cost(attempts: int, updates: int) -> Estimate:
    low, high = (attempts * ATTEMPT_S[i] + updates * UPDATE_S[i] for i in (0, 1))
    return Estimate(attempts=attempts, updates=updates, wall_s=(low, high))
