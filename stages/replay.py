"""RSR phase 4: the policy executes each passing runbook afresh (spec §2.1).

The runbook is in the actor's context; the sandbox is new. `a_x(τ) = V_x(τ) · q_leak(τ)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from stages.config import ReplayConfig
from stages.context import StageContext, attempts
from stages.domain import Phase, Runbook, Task, Trajectory
from stages.records import PhaseDone, PhaseStarted, Record, ReplayJudged
from stages.review import ReviewContext, q_leak
from stages.rollout import AttemptSpec
from stages.seeds import rng


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstration:
    """An accepted replay: one member of `Q_clean`."""

    runbook: Runbook
    trajectory: Trajectory


def replay(
    ctx: StageContext, config: ReplayConfig, books: Sequence[Runbook], tasks: Mapping[str, Task]
) -> Generator[Record, None, list[Demonstration]]:
    """Returns the accepted replays. The arms "none" and "other" only measure what the runbook is worth."""
    ctx = ctx.with_harness(config.harness)
    plan = _plan(ctx, config, books, tasks)
    yield PhaseStarted(phase=Phase.REPLAY, total=len(plan))
    done = yield from attempts(ctx, Phase.REPLAY, [spec for _, _, spec in plan], config.sampling)
    accepted: list[Demonstration] = []
    tally: dict[str, list[int]] = {"own": [0, 0], "none": [0, 0], "other": [0, 0]}
    for (arm, book, spec), trajectory in zip(plan, done, strict=True):
        if trajectory.verdict.counts:
            tally[arm][0] += trajectory.strict
            tally[arm][1] += 1
        reason = _reject_reason(ctx, config, book, trajectory, spec.task) if arm == "own" else "control arm"
        yield ReplayJudged(trajectory_id=trajectory.id, runbook_id=book.id, accepted=not reason, reason=reason, arm=arm)
        if not reason:
            accepted.append(Demonstration(runbook=book, trajectory=trajectory))
    facts: dict[str, float | int | str | None] = {"runbooks": len(books), "accepted": len(accepted)}
    for arm, (passed, verdicts) in tally.items():
        facts |= {f"{arm}_passed": passed, f"{arm}_verdicts": verdicts}
    yield PhaseDone(phase=Phase.REPLAY, facts=facts)
    return accepted


def _plan(
    ctx: StageContext, config: ReplayConfig, books: Sequence[Runbook], tasks: Mapping[str, Task]
) -> list[tuple[str, Runbook, AttemptSpec]]:
    order = {book.id: i for i, book in enumerate(books)}

    def spec(arm: str, book: Runbook, shown: Runbook | None, attempt: int) -> tuple[str, Runbook, AttemptSpec]:
        key = (order[book.id], arm, attempt)
        return arm, book, AttemptSpec(task=tasks[book.task_id], attempt=attempt, key=key, runbook=shown)

    m = config.attempts_per_runbook
    plan = [spec("own", book, book, a) for book in books for a in range(m)]  # equal prompts of a wave are computed once
    sample = rng(*ctx.seed, Phase.REPLAY, "controls").sample(list(books), min(config.control_runbooks, len(books)))
    for book in sample:
        others = [b for b in books if b.task_id != book.task_id]
        plan.append(spec("none", book, None, 0))
        if others:
            other = rng(*ctx.seed, Phase.REPLAY, order[book.id]).choice(others)
            plan.append(spec("other", book, other, 0))
    return plan


def _reject_reason(ctx: StageContext, config: ReplayConfig, book: Runbook, trajectory: Trajectory, task: Task) -> str:
    """Why a replay is not accepted; empty when it is."""
    if not trajectory.strict:
        return f"verdict {trajectory.verdict.value}"
    clean, findings = q_leak(
        trajectory, ReviewContext.for_task(task, trajectory, literal_lines=ctx.rollout.harness == "shell")
    )
    if not clean:
        return f"leak: {findings[0].message}"
    if config.only_faithful:
        if len(trajectory.turns) > len(book.lines) + 1:
            return "more turns than the runbook has lines"
        if any(t.exit_code for t in trajectory.turns):
            return "a command failed"
    return ""
