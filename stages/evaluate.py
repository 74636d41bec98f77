"""Mean@k of one checkpoint on one suite (spec §8), and the choice among candidates on the protected validation suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stages.config import EvaluateConfig
from stages.context import StageContext, attempts, repeat, serve
from stages.domain import CheckRole, Phase, Task, Trajectory
from stages.records import (
    AttemptFinished,
    Candidate,
    EvaluationDone,
    PhaseDone,
    PhaseStarted,
    Record,
    Selected,
    TaskScore,
)
from stages.tasks.harbor import Suite


def evaluate(
    ctx: StageContext,
    config: EvaluateConfig,
    suite: Suite,
    checkpoint: str,
    actor_dir: Path,
    *,
    phase: Phase = Phase.EVALUATE,
    keep_attempts: bool = True,
) -> Generator[Record, None, EvaluationDone]:
    """k independent attempts per task, on a fixed prefix of the suite.

    `keep_attempts=False` (validation of candidates) keeps the outcomes and drops the transcripts.
    """
    tasks = suite.tasks[: config.n_tasks] if config.n_tasks else suite.tasks
    yield PhaseStarted(phase=phase, total=len(tasks) * config.attempts_per_task)
    serve(ctx, actor_dir, checkpoint)
    # Candidates of one selection share their attempts' seeds, so that they differ in their weights alone.
    own = replace(ctx, seed=(ctx.seed[0], "evaluate", suite.digest, "" if phase is Phase.VALIDATE else checkpoint))
    done: list[Trajectory] = yield from _maybe_kept(own, phase, tasks, config, keep_attempts)
    result = _score(suite, checkpoint, config, done, ctx)
    if phase is not Phase.VALIDATE:  # a candidate's score stands in its selection; it is no reported evaluation
        yield result
    yield PhaseDone(phase=phase, facts={"suite": suite.name, "passed": result.passed, "attempts": result.attempts})
    return result


def _maybe_kept(
    ctx: StageContext, phase: Phase, tasks: Sequence[Task], config: EvaluateConfig, keep: bool
) -> Generator[Record, None, list[Trajectory]]:
    """Validation attempts of candidates are many and alike: their outcomes are kept, their transcripts are not."""
    stream = attempts(ctx, phase, repeat(tasks, config.attempts_per_task), config.sampling)
    while True:
        try:
            record = next(stream)
        except StopIteration as stop:
            return stop.value
        if keep or not isinstance(record, AttemptFinished):
            yield record


def _score(
    suite: Suite, checkpoint: str, config: EvaluateConfig, done: Sequence[Trajectory], ctx: StageContext
) -> EvaluationDone:
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in done:
        by_task[trajectory.task_id].append(trajectory)
    scores = tuple(
        TaskScore(
            task_id=task_id,
            family=group[0].family,
            stratum=group[0].stratum.value,
            verdicts=tuple(t.verdict for t in group),
            checks_passed=tuple(t.progress for t in group),
            checks_total=max(sum(c.role is CheckRole.SCENARIO for c in t.checks) for t in group),
        )
        for task_id, group in by_task.items()
    )
    settings = {f"sampling.{k}": v for k, v in config.sampling.model_dump().items()}
    rollout = ctx.rollout
    settings |= {
        "harness": rollout.harness,
        "observation_chars": rollout.observation_chars,
        "max_context_tokens": rollout.max_context_tokens,
        "max_turns": rollout.max_turns or "of the task",
        "max_tokens_per_attempt": rollout.max_tokens_per_attempt or "none",
    }
    if rollout.harness == "terminus2":
        settings["compaction"] = rollout.compaction
    return EvaluationDone(
        suite=suite.name,
        suite_digest=suite.digest,
        checkpoint=checkpoint,
        k=config.attempts_per_task,
        passed=sum(t.strict for t in done),
        attempts=len(done),
        verdicts=sum(t.verdict.counts for t in done),
        tasks=scores,
        turns=sum(len(t.turns) for t in done),
        tokens=sum(t.sampled_tokens for t in done),
        wall_s=sum(t.duration_s for t in done),
        settings=settings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate's weights. Order is preference: of equal scores the later one is kept."""

    label: str
    actor_dir: Path
    step: int | None = None
    is_parent: bool = False


def select(
    ctx: StageContext, config: EvaluateConfig, validation: Suite, phase: Phase, options: Sequence[Option]
) -> Generator[Record, None, Option]:
    """Score every option on the protected validation suite and keep the best (spec §2.3).

    All options meet the same tasks with the same attempt seeds.
    """
    scored: list[tuple[Option, Candidate]] = []
    for option in options:
        version = f"{'/'.join(map(str, ctx.seed[1:]))}/{option.label}"
        result = yield from evaluate(
            ctx, config, validation, version, option.actor_dir, phase=Phase.VALIDATE, keep_attempts=False
        )
        candidate = Candidate(
            label=option.label,
            passed=result.passed,
            attempts=result.attempts,
            verdicts=result.verdicts,
            step=option.step,
        )
        scored.append((option, candidate))
    # A missing verdict is in no denominator: it neither helps nor hurts a candidate.
    best, _ = max(enumerate(scored), key=lambda i: (i[1][1].passed / max(1, i[1][1].verdicts), i[0]))
    chosen = scored[best][0]
    yield Selected(
        phase=phase,
        chosen=chosen.label,
        candidates=tuple(c for _, c in scored),
        suite=validation.name,
        suite_digest=validation.digest,
        parent_kept=chosen.is_parent,
    )
    return chosen
