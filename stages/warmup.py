"""Critic warm-up, once, before RPR-1: one epoch with the actor frozen gives φ_seed (spec §2.2); and the cold critic."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from stages.backends.learner.checkpoint import MANIFEST
from stages.backends.protocols import OptimConfig
from stages.batch import score
from stages.config import RPRConfig
from stages.context import StageContext
from stages.domain import Phase, Trajectory
from stages.records import PhaseDone, PhaseStarted, Progress, Record, StepDone
from stages.rewards import RewardModel
from stages.seeds import rng


def warm_up(
    ctx: StageContext, config: RPRConfig, pool: Sequence[Trajectory], reward: RewardModel, *, actor_dir: Path
) -> Generator[Record, None, Path]:
    """Returns the seed critic's folder. Each batch's EV is measured before the critic trains on it (spec §3.5)."""
    settings, learner = config.warmup, ctx.backends.learner
    _zero_head(ctx, config, actor_dir, lr=settings.lr)
    n = max(1, round(len(pool) / settings.batch_size))
    yield PhaseStarted(phase=Phase.WARMUP, total=n * settings.epochs)
    step = 0
    curve: list[float | None] = []
    for epoch in range(settings.epochs):
        order = list(pool)
        rng(*ctx.seed, Phase.WARMUP, epoch).shuffle(order)
        for i in range(n):
            batch = score(learner, config, order[i::n], reward)
            metrics = batch.metrics | learner.critic_step(batch.sequences, value_clip=config.value_clip)
            step += 1
            curve.append(metrics["critic/vf_explained_var"])
            yield StepDone(phase=Phase.WARMUP, step=step, metrics=metrics)
            yield Progress(phase=Phase.WARMUP, done=step, total=n * settings.epochs)
    path = ctx.work_dir / "seed-critic"
    _, digest = learner.save(path)
    yield PhaseDone(
        phase=Phase.WARMUP,
        facts={"updates": step, "ev_first": curve[0], "ev_last": curve[-1], "critic_digest": digest},
    )
    return path / "critic"


def cold_critic(ctx: StageContext, config: RPRConfig, *, actor_dir: Path) -> Path:
    """The value model as before any warm-up: the backbone of the actor that enters the stage, and a zero head (spec §2.4).

    Returns its folder. Nothing in it was learnt about returns; v = 0 everywhere.
    """
    path = ctx.work_dir / "cold-critic"
    if not (path / MANIFEST).exists():
        _zero_head(ctx, config, actor_dir, lr=config.critic_lr)
        ctx.backends.learner.save(path)
    return path / "critic"


def _zero_head(ctx: StageContext, config: RPRConfig, actor_dir: Path, *, lr: float) -> None:
    learner = ctx.backends.learner
    learner.load(actor_dir, None)
    learner.init_critic()
    learner.start_phase(actor=None, critic=OptimConfig(lr=lr, clip_grad=config.critic_clip_grad))
