"""RSR phase 6: clean sampling and distillation (spec §2.1).

`L(θ) = −E[Σ_j m_j log π_θ(y_j | h_j)]` over `Q_clean`, on the sampled ids as they are. The critic is not touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import numpy as np

from stages.backends.learner.checkpoint import MANIFEST
from stages.backends.protocols import Learner, OptimConfig, TrainSequence
from stages.chat import Chat
from stages.config import DistilConfig, EvaluateConfig, HarnessName
from stages.context import StageContext
from stages.domain import Phase, Segment, Task
from stages.errors import BatchError
from stages.evaluate import Option, select
from stages.harness.terminus2.prompt import runbook_block, runbook_lines
from stages.records import PhaseDone, PhaseStarted, Progress, Record, StepDone
from stages.replay import Demonstration
from stages.seeds import rng
from stages.tasks.harbor import Suite


def distil(
    ctx: StageContext,
    config: DistilConfig,
    validate: EvaluateConfig,
    demonstrations: Sequence[Demonstration],
    tasks: Mapping[str, Task],
    validation: Suite,
    *,
    actor_dir: Path,
    critic_dir: Path | None,
    selected: str | None = None,
    harness: HarnessName | None = None,
) -> Generator[Record, None, Option]:
    """Trains the actor on accepted replays and keeps the best candidate on validation ("parent" = discard).

    `selected`: what an interrupted run had already kept. Training that was saved whole is not repeated; one that was
    interrupted starts again from the parent. `harness`: the one that replayed; None: the rollout's. Raises BatchError when there is nothing to learn from.
    """
    if not demonstrations:
        raise BatchError(
            "distillation has no accepted replay: no runbook passed review and replay. Explore more tasks or look at the findings."
        )
    by_task = _sequences(ctx.chat, config, demonstrations, tasks, harness or ctx.rollout.harness)
    learner = ctx.backends.learner
    learner.load(actor_dir, None)
    learner.start_phase(actor=OptimConfig(lr=config.lr, clip_grad=config.clip_grad), critic=None)
    total = sum(len(_batches(_draw(ctx, config, by_task, e), config, ctx, e)) for e in range(config.epochs))
    yield PhaseStarted(phase=Phase.DISTIL, total=total)
    folders = {label: ctx.work_dir / "distil" / label for label in _labels(config)}
    step = total if (folders["last"] / MANIFEST).exists() else 0
    for epoch in range(config.epochs) if not step else ():
        for batch in _batches(_draw(ctx, config, by_task, epoch), config, ctx, epoch):
            sequences = [s for execution in batch for s in execution]
            metrics = learner.distil_step(sequences, lr=_lr(config, step, total), trajectories=len(batch))
            step += 1
            yield StepDone(phase=Phase.DISTIL, step=step, metrics=metrics)
            yield Progress(phase=Phase.DISTIL, done=step, total=total)
        label = "last" if epoch + 1 == config.epochs else f"epoch-{epoch + 1}"
        if label in folders:
            learner.save_actor_only(folders[label], critic_from=critic_dir)
    options = _options(config, actor_dir, critic_dir, folders, learner)
    chosen = next((o for o in options if o.label == selected), None)
    if chosen is None:
        chosen = yield from select(ctx, validate, validation, Phase.DISTIL, options)
    yield PhaseDone(
        phase=Phase.DISTIL,
        facts={
            "demonstrations": len(demonstrations),
            "tasks": len(by_task),
            "steps": step,
            "chosen": chosen.label,
        },
    )
    return chosen


def _labels(config: DistilConfig) -> list[str]:
    """Candidates that are folders of their own; the last weights are always kept, resume looks for them."""
    return list(dict.fromkeys([c for c in config.candidates if c != "parent"] + ["last"]))


def _options(
    config: DistilConfig, parent: Path, critic_dir: Path | None, folders: Mapping[str, Path], learner: Learner
) -> list[Option]:
    """In the recipe's order. Every folder holds the parent's critic, byte for byte."""
    options = []
    for label in config.candidates:
        if label == "parent":
            options.append(Option(label=label, actor_dir=parent, is_parent=True))
            continue
        if label == "midpoint" and not (folders[label] / MANIFEST).exists():
            learner.save_midpoint(parent, folders["last"] / "actor", folders[label], critic_from=critic_dir)
        options.append(Option(label=label, actor_dir=folders[label] / "actor"))
    return options


def _lr(config: DistilConfig, step: int, total: int) -> float:
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    decay = max(0.1, 1 - step / total) if config.decay == "linear" else 1.0
    return config.lr * warm * decay


def _draw(
    ctx: StageContext, config: DistilConfig, by_task: Mapping[str, list[list[TrainSequence]]], epoch: int
) -> list[list[TrainSequence]]:
    """`per_task`: one execution per task and epoch, uniformly; `pooled`: every execution (spec §2.1)."""
    if config.clean_sampling == "pooled":
        return [execution for group in by_task.values() for execution in group]
    return [rng(*ctx.seed, Phase.DISTIL, epoch, task_id).choice(group) for task_id, group in by_task.items()]


def _batches(
    executions: Sequence[list[TrainSequence]], config: DistilConfig, ctx: StageContext, epoch: int
) -> list[list[list[TrainSequence]]]:
    """Batches of whole trajectories (each a list of segments), shuffled, all of nearly the same size."""
    order = list(executions)
    rng(*ctx.seed, Phase.DISTIL, "order", epoch).shuffle(order)
    n = max(1, round(len(order) / config.batch_size))
    return [order[i::n] for i in range(n)]


def _sequences(
    chat: Chat,
    config: DistilConfig,
    demonstrations: Sequence[Demonstration],
    tasks: Mapping[str, Task],
    harness: HarnessName,
) -> dict[str, list[list[TrainSequence]]]:
    by_task: dict[str, list[list[TrainSequence]]] = defaultdict(list)
    for demo in demonstrations:
        segments = [s for s in demo.trajectory.segments if s.loss_mask.any()]
        if config.distil_prompt == "as_executed":
            execution = [_sequence(s, s.tokens[:0], 0) for s in segments]
        elif harness == "shell":
            execution = _without_task_runbook(chat, demo, tasks[demo.trajectory.task_id], segments)
        else:
            execution = [_without_block(chat, demo, s) for s in segments]
        by_task[demo.trajectory.task_id].append(execution)
    return dict(by_task)


def _without_task_runbook(
    chat: Chat, demo: Demonstration, task: Task, segments: Sequence[Segment]
) -> list[TrainSequence]:
    """The segments of one replay with the runbook cut out of each prompt, ids kept otherwise."""
    book = chat.encode(chat.render([chat.task_message(task.instruction, demo.runbook)], generate=False))
    plain = chat.encode(chat.render([chat.task_message(task.instruction)], generate=False))
    if any(s.tokens[: len(book)].tolist() != book for s in segments):
        raise BatchError(f"replay {demo.trajectory.id}: its prompt does not start with the runbook's task message")
    return [_sequence(s, np.asarray(plain, dtype=np.int32), len(book)) for s in segments]


def _without_block(chat: Chat, demo: Demonstration, segment: Segment) -> TrainSequence:
    """Terminus-2: the runbook's part of the first message is cut out of what precedes the first sampled token."""
    first = int(np.flatnonzero(segment.loss_mask)[0])
    text, block = (
        chat.decode(segment.tokens[:first].tolist()),
        runbook_block([chat.clean(x) for x in runbook_lines(demo.runbook) or ()]),
    )
    if block not in text:
        raise BatchError(f"replay {demo.trajectory.id}: its prompt does not hold the runbook")
    return _sequence(segment, np.asarray(chat.encode(text.replace(block, "")), dtype=np.int32), first)


def _sequence(segment: Segment, prefix: np.ndarray, cut: int) -> TrainSequence:
    """`segment` with its first `cut` tokens, none of them sampled, replaced by `prefix`."""
    n = len(prefix)
    return TrainSequence(
        tokens=np.concatenate([prefix, segment.tokens[cut:]]),
        loss_mask=np.concatenate([np.zeros(n, dtype=bool), segment.loss_mask[cut:]]),
        rollout_log_probs=np.concatenate([np.zeros(n, dtype=np.float32), segment.rollout_log_probs[cut:]]),
    )
