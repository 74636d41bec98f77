"""RPR: exactly four critic-only updates, then joint PPO (spec §2.3, §5). An experiment's arm may leave the four out.

One step is one fresh batch, one update of the critic and, in joint steps, one of the actor. After every step everything is
saved, so that a killed run continues with the step that would have followed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from stages.alarms import alarms
from stages.backends.learner.checkpoint import digest_weights
from stages.backends.protocols import OptimConfig
from stages.batch import Batch, collect, score, with_log_probs
from stages.config import RPRConfig
from stages.context import StageContext, serve
from stages.domain import Phase, Task
from stages.errors import UpdateError
from stages.records import CheckpointSaved, PhaseDone, PhaseStarted, Progress, Record, StepDone
from stages.rewards import RewardModel


def refine(
    ctx: StageContext,
    config: RPRConfig,
    pool: Sequence[Task],
    reward: RewardModel,
    *,
    actor_dir: Path,
    critic_dir: Path,
) -> Generator[Record, None, list[tuple[int, Path]]]:
    """Returns (joint step, checkpoint folder) of every candidate in `keep_steps` (else the last step).

    `actor_dir`, `critic_dir`: the parents. A previous, interrupted call with the same `ctx.work_dir` is continued.
    """
    plan = [(Phase.CALIBRATE, s) for s in range(1, config.critic_only_steps + 1)]
    plan += [(Phase.JOINT, s) for s in range(1, config.joint_steps + 1)]
    keep = set(config.keep_steps) or {config.joint_steps}
    folders = [ctx.work_dir / "steps" / f"{phase.value}-{step}" for phase, step in plan]
    done = max((i + 1 for i, f in enumerate(folders) if (f / "manifest.json").exists()), default=0)
    learner = ctx.backends.learner
    if done:
        learner.restore(folders[done - 1])
    else:
        learner.load(actor_dir, critic_dir)
        learner.start_phase(actor=None, critic=_critic_optim(config))
    _serve(ctx, folders[done - 1] / "actor" if done else actor_dir, done)
    for index, (phase, step) in enumerate(plan):
        last = config.critic_only_steps if phase is Phase.CALIBRATE else config.joint_steps
        if index < done:  # records that follow a save may have been lost with the process: they are repeated
            if phase is Phase.JOINT and step in keep:
                yield _saved(folders[index], step)
            if step == last:
                yield PhaseDone(phase=phase, facts={"steps": step})
            continue
        if step == 1:
            yield PhaseStarted(phase=phase, total=last)
        if phase is Phase.JOINT and step == 1:  # moments are reset per stage; the critic's go on from calibration
            learner.start_phase(actor=_actor_optim(config), critic=_critic_optim(config), keep_moments=True)
        metrics, batch = yield from _step(ctx, config, pool, reward, phase, step)
        yield StepDone(phase=phase, step=step, metrics=metrics, trained_on=batch.trained_on)
        learner.save(folders[index])
        if phase is Phase.JOINT:
            _serve(ctx, folders[index] / "actor", index + 1)
            if step in keep:
                yield _saved(folders[index], step)
        _prune(folders[:index], plan[:index], keep)
        yield Progress(phase=phase, done=step, total=last, text=_line(metrics))
        if step == last:
            moments = {"critic_moments": "kept from calibration"} if phase is Phase.JOINT and config.calibrate else {}
            facts = {"steps": step, "ev_last": metrics["critic/vf_explained_var"], **moments}
            yield PhaseDone(phase=phase, facts=facts)
    return [(s, f) for (p, s), f in zip(plan, folders, strict=True) if p is Phase.JOINT and s in keep]


def _step(
    ctx: StageContext, config: RPRConfig, pool: Sequence[Task], reward: RewardModel, phase: Phase, step: int
) -> Generator[Record, None, tuple[dict[str, float | None], Batch]]:
    learner = ctx.backends.learner
    started = time.monotonic()
    trajectories, masked = yield from collect(ctx, config, pool, phase, step)
    sampled = time.monotonic()
    batch = score(learner, config, trajectories, reward)
    if config.keep_log_probs and phase is Phase.JOINT:
        batch = with_log_probs(learner, batch)
    metrics = dict(batch.metrics) | {"rollout/masked": masked}
    metrics |= learner.critic_step(batch.sequences, value_clip=config.value_clip)
    if phase is Phase.JOINT:
        metrics |= learner.actor_step(
            batch.sequences, eps_clip=config.eps_clip, eps_clip_high=config.eps_clip_high, temperature=1.0
        )
    metrics["perf/rollout_s"], metrics["perf/train_s"] = sampled - started, time.monotonic() - sampled
    broken = alarms(metrics)
    metrics["alarms"] = float(len(broken))
    if fatal := [a for a in broken if a.stop]:  # not saved: a resumed stage starts from the step before
        raise UpdateError(f"{phase.value} step {step}: {'; '.join(map(str, fatal))}")
    return metrics, batch


def _saved(folder: Path, step: int) -> CheckpointSaved:
    return CheckpointSaved(
        name=f"step {step}",
        path=folder,
        actor_digest=digest_weights(folder / "actor"),
        critic_digest=digest_weights(folder / "critic"),
        step=step,
    )


def _actor_optim(config: RPRConfig) -> OptimConfig:
    return OptimConfig(lr=config.actor_lr, clip_grad=config.actor_clip_grad)


def _critic_optim(config: RPRConfig) -> OptimConfig:
    return OptimConfig(lr=config.critic_lr, clip_grad=config.critic_clip_grad)


def _serve(ctx: StageContext, actor: Path, index: int) -> None:
    serve(ctx, actor, f"{'/'.join(map(str, ctx.seed[1:]))}/update-{index}")


def _prune(folders: Sequence[Path], plan: Sequence[tuple[Phase, int]], keep: set[int]) -> None:
    """Only the newest step and the candidates stay on disk."""
    for folder, (phase, step) in zip(folders, plan, strict=True):
        if not (phase is Phase.JOINT and step in keep) and folder.exists():
            shutil.rmtree(folder)


def _line(metrics: dict[str, float | None]) -> str:
    ev = metrics["critic/vf_explained_var"]
    return f"success {metrics['rollout/success']:.2f}, EV {'—' if ev is None else f'{ev:.2f}'}"
