"""RSR phase 1: the current actor attempts each task K times (spec §2.1)."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from stages.config import ExploreConfig
from stages.context import StageContext, attempts, repeat
from stages.domain import Phase, Task, Trajectory
from stages.records import PhaseDone, PhaseStarted, Record
from stages.tasks.draw import draw_tasks


def explore(
    ctx: StageContext, config: ExploreConfig, pool: Sequence[Task]
) -> Generator[Record, None, list[Trajectory]]:
    """Returns all attempts; only those with V_x(τ) = 1 go on to the rewrite."""
    drawn = draw_tasks(pool, config.draw, seed=(*ctx.seed, Phase.EXPLORE))
    tasks = list({t.id: t for t in drawn}.values())  # a small stratum is drawn repeatedly; K attempts are enough
    yield PhaseStarted(phase=Phase.EXPLORE, total=len(tasks) * config.attempts_per_task)
    done = yield from attempts(ctx, Phase.EXPLORE, repeat(tasks, config.attempts_per_task), config.sampling)
    solved = {t.task_id for t in done if t.strict}
    yield PhaseDone(
        phase=Phase.EXPLORE,
        facts={
            "tasks": len(tasks),
            "attempts": len(done),
            "verdicts": sum(t.verdict.counts for t in done),
            "passed": sum(t.strict for t in done),
            "tasks_solved": len(solved),
        },
    )
    return done
