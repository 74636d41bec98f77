"""RPR phase 1: family scales D_f, profiled by the actor that enters the phase and frozen for it (spec §4.2, §4.5)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from stages.config import RPRConfig, SamplingConfig
from stages.context import StageContext, attempts
from stages.domain import FamilyScale, Phase, Stratum, Task, Trajectory
from stages.recalibration import family_calibrations, recalibrate
from stages.records import PhaseDone, PhaseStarted, Record, ScalesProfiled
from stages.rewards import RewardModel, fit_scales
from stages.rollout import AttemptSpec
from stages.tasks.draw import draw_tasks


def profile(
    ctx: StageContext, config: RPRConfig, pool: Sequence[Task]
) -> Generator[Record, None, tuple[list[Trajectory], tuple[FamilyScale, ...]]]:
    """Returns the profiling attempts (the warm-up pool of round 1) and the scales."""
    tasks = draw_tasks(pool, config.profile.draw, seed=(*ctx.seed, Phase.PROFILE))
    k = config.profile.attempts_per_task
    yield PhaseStarted(phase=Phase.PROFILE, total=len(tasks) * k)
    specs = [AttemptSpec(task=t, attempt=a, key=(i, a)) for i, t in enumerate(tasks) for a in range(k)]
    done = yield from attempts(ctx, Phase.PROFILE, specs, SamplingConfig(max_new_tokens=ctx.max_new_tokens))
    counted = [t for t in done if t.verdict.counts]
    scales = scales_of(config, counted, {t.family: t.stratum for t in pool})
    yield ScalesProfiled(phase=Phase.PROFILE, scales=scales)
    floored = [s.family for s in scales if s.floored]
    yield PhaseDone(
        phase=Phase.PROFILE,
        facts={"attempts": len(done), "families": len(scales), "floored": ", ".join(floored) or None},
    )
    return counted, scales


def scales_of(
    config: RPRConfig, counted: Sequence[Trajectory], families: Mapping[str, Stratum]
) -> tuple[FamilyScale, ...]:
    """D_f, or D'_f = c_f · D_f where the recipe recalibrates. `families`: all that may occur, with their stratum."""
    r = config.reward
    if not r.kind.needs_scales:
        return ()
    scales = fit_scales(
        counted,
        quantile=r.quantile,
        d_min=r.d_min,
        min_attempts=r.min_attempts,
        progress=r.progress,
        families=families,
    )
    if not r.recalibrate:
        return scales
    return recalibrate(scales, family_calibrations(scales, counted, progress=r.progress), d_min=r.d_min)


def reward_model(config: RPRConfig, scales: Sequence[FamilyScale]) -> RewardModel:
    """The reward of a phase under its frozen scales."""
    return RewardModel(kind=config.reward.kind, scales=tuple(scales), progress=config.reward.progress)
