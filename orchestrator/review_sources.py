"""What a runbook is reviewed against: its task's folder with the hidden files, and the trajectory that it came from.

Hidden texts are for the rules and for reviewers' eyes. Nothing here is ever given to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator import models as m
from orchestrator.recipes import parse_config
from orchestrator.store import Store
from stages.domain import Task
from stages.errors import TaskError
from stages.leaks import ReviewContext, load_hidden_texts
from stages.tasks.harbor import load_task


def task_of(store: Store, runbook: m.Runbook) -> Task:
    """The task of a runbook, from its folder. Raises TaskError where this machine does not have it."""
    suite = store.trajectories.get(runbook.source_trajectory_id).suite
    row = store.suites.task(suite, runbook.task_id)
    if row is None or not row.path or not Path(row.path).is_dir():
        raise TaskError(
            f"the folder of task {runbook.task_id} ({suite or 'no suite'}) is not on this machine, so neither hidden files "
            "nor the rules can be looked at here; run the console where the pool is, or copy the pool"
        )
    return load_task(Path(row.path), suite)


def hidden_texts(store: Store, runbook: m.Runbook) -> Mapping[str, str]:
    """Tests and reference solution, name -> text. Raises TaskError where this machine does not have them."""
    return load_hidden_texts(task_of(store, runbook))


def review_context(store: Store, runbook: m.Runbook, stage: m.Stage) -> ReviewContext:
    """As the review phase of `stage` would build it. Raises TaskError as `task_of`."""
    config = parse_config(store.cycles.get(stage.cycle_id).config, f"cycle {stage.cycle_id}")
    review = config.rsr_of(max(1, stage.round)).review
    return ReviewContext.for_task(
        task_of(store, runbook),
        store.trajectories.whole(runbook.source_trajectory_id),
        max_lines=review.max_lines,
        max_line_chars=review.max_line_chars,
        literal_lines=config.rollout.harness == "shell",
    )
