"""RPR: exactly four critic-only updates, then joint PPO (spec §2.3, §5). An experiment's arm may leave the four out.

One step is one fresh batch, one update of the critic and, in joint steps, one of the actor. After every step everything is
saved, so that a killed run continues with the step that would have followed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from stages.alarms import EV_STALE, SCALES_DRIFTED, alarms
from stages.backends.learner.checkpoint import digest_weights
from stages.backends.protocols import OptimConfig
from stages.batch import Batch, collect, score, with_log_probs
from stages.certificate import GAP, REPLAYED, gap
from stages.config import RPRConfig
from stages.context import StageContext, serve
from stages.domain import Phase, Task
from stages.errors import UpdateError
from stages.recalibration import ScaleDrift
from stages.records import BatchReady, CheckpointSaved, PhaseDone, PhaseStarted, Progress, Record, StepDone
from stages.refine_state import RefineState, Step, forget, resumed, step_folder
from stages.rewards import RewardModel
from stages.values import Staleness


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

    `actor_dir`, `critic_dir`: the parents. A previous, interrupted call with the same `ctx.work_dir` is continued. A stale
    critic (spec §3.5) is told, gets a further block of critic-only updates, or ends the stage with UpdateError, as
    `ev_alarm` says.
    """
    state, done = resumed(ctx.work_dir, config)
    keep = set(config.keep_steps) or {config.joint_steps}
    learner = ctx.backends.learner
    if done:
        last = step_folder(ctx.work_dir, state.plan[done - 1])
        learner.restore(last)
    else:
        learner.load(actor_dir, critic_dir)
        learner.start_phase(actor=None, critic=_critic_optim(config))
    _serve(ctx, last / "actor" if done else actor_dir, done)
    index = -1
    while (index := index + 1) < len(state.plan):  # the plan grows where a stale critic is recalibrated
        phase, step = state.plan[index]
        folder = step_folder(ctx.work_dir, (phase, step))
        if index < done:  # records that follow a save may have been lost with the process: they are repeated
            if phase is Phase.JOINT and step in keep:
                yield _saved(folder, step)
            if state.ends_block(index):
                yield PhaseDone(phase=phase, facts={"steps": step} | _recalibrations(state, config))
            continue
        total = state.last_step(index)
        if state.starts_block(index) or (index == done and phase is Phase.CALIBRATE):
            yield PhaseStarted(phase=phase, total=total)
        if phase is Phase.JOINT and step == 1:  # moments are reset per stage; the critic's go on from calibration
            learner.start_phase(actor=_actor_optim(config), critic=_critic_optim(config), keep_moments=True)
        metrics, batch = yield from _step(ctx, config, pool, state.reward(reward), phase, step)
        if config.reward.online:
            metrics |= _followed(state.follow(config, reward, batch.trajectories))
        stale = _stale(config, state, index, metrics)
        certificate = replace(batch.certificate, gap=metrics.get(GAP), replayed_share=metrics.get(REPLAYED))
        yield StepDone(phase=phase, step=step, metrics=metrics, trained_on=batch.trained_on, certificate=certificate)
        state.save(folder)
        learner.save(folder)
        if phase is Phase.JOINT:
            _serve(ctx, folder / "actor", index + 1)
            if step in keep:
                yield _saved(folder, step)
        _prune(ctx.work_dir, state.plan[:index], keep)
        yield Progress(phase=phase, done=step, total=total, text=_line(metrics))
        if state.ends_block(index):
            moments = {"critic_moments": "kept from calibration"} if phase is Phase.JOINT and config.calibrate else {}
            facts = {"steps": step, "ev_last": metrics["critic/vf_explained_var"], **moments}
            yield PhaseDone(phase=phase, facts=facts | _recalibrations(state, config))
        if stale is not None and config.ev_alarm == "stop":
            raise UpdateError(
                f"joint step {step}: EV was below 0 in {stale.steps} steps in a row (lowest {stale.lowest:.2f}), and "
                'ev_alarm = "stop". The step is saved: resume the cycle to go on from it all the same.'
            )
    candidates = [s for phase, s in state.plan if phase is Phase.JOINT and s in keep]
    return [(s, step_folder(ctx.work_dir, (Phase.JOINT, s))) for s in candidates]


def _stale(config: RPRConfig, state: RefineState, index: int, metrics: dict[str, float | None]) -> Staleness | None:
    """Adds a step to the EV curve; where that makes the critic stale, the alarm is logged and answered in the plan."""
    phase, step = state.plan[index]
    state.add(phase, step, metrics["critic/vf_explained_var"])
    if phase is Phase.CALIBRATE and step > config.critic_only_steps:
        metrics["critic/recalibration"] = 1.0
    stale = state.stale(config.ev_alarm_steps)
    if stale is None:
        return None
    metrics[EV_STALE] = float(stale.steps)
    metrics["alarms"] = (metrics["alarms"] or 0.0) + 1.0
    if config.ev_alarm == "recalibrate" and not state.ends_block(index):
        state.recalibrate(index, config.num_critic_only_steps)
    elif config.ev_alarm == "stop":
        state.answered = len(state.curve)
    return stale


def _followed(drifts: Sequence[ScaleDrift]) -> dict[str, float | None]:
    """Online scales after a step, and how many have left the phase's start too far (spec §4.5)."""
    found: dict[str, float | None] = {f"reward/scale/{d.family}": d.after for d in drifts}
    return found | {SCALES_DRIFTED: float(sum(d.alarm for d in drifts))}


def _recalibrations(state: RefineState, config: RPRConfig) -> dict[str, float | int | str | None]:
    """Critic-only updates beyond the calibration; {} where there are none."""
    extra = sum(phase is Phase.CALIBRATE for phase, _ in state.plan) - config.critic_only_steps
    return {"recalibration_updates": extra} if extra else {}


def _step(
    ctx: StageContext, config: RPRConfig, pool: Sequence[Task], reward: RewardModel, phase: Phase, step: int
) -> Generator[Record, None, tuple[dict[str, float | None], Batch]]:
    learner = ctx.backends.learner
    started = time.monotonic()
    trajectories, counted = yield from collect(ctx, config, pool, phase, step)
    sampled = time.monotonic()
    batch = score(learner, config, trajectories, reward)
    yield BatchReady(phase=phase, step=step, trajectories=batch.trajectories)
    if config.keep_log_probs and phase is Phase.JOINT:
        batch = with_log_probs(learner, batch)
    metrics = dict(batch.metrics) | counted
    if phase is Phase.CALIBRATE:  # in joint steps the actor's own update measures the gap with its first forward
        metrics[GAP] = gap(batch.sequences, learner.log_probs(batch.sequences))
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


def _prune(work_dir: Path, done: Sequence[Step], keep: set[int]) -> None:
    """Only the newest step and the candidates stay on disk."""
    for phase, step in done:
        folder = step_folder(work_dir, (phase, step))
        forget(folder)
        if not (phase is Phase.JOINT and step in keep) and folder.exists():
            shutil.rmtree(folder)


def _line(metrics: dict[str, float | None]) -> str:
    ev = metrics["critic/vf_explained_var"]
    return f"success {metrics['rollout/success']:.2f}, EV {'—' if ev is None else f'{ev:.2f}'}"
