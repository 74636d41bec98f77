"""What the commands about cycles print: tables of cycles, stages and scores, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator import models as m
    from orchestrator.store.facade import Store

FOLLOW_S = 1.0  # between two looks at the log


def active_table(store: Store) -> Table | None:
    """The cycles that are at work or wait for something; None when there are none."""
    from orchestrator.models import CycleState

    ended = {CycleState.DONE, CycleState.CANCELLED, CycleState.FAILED}
    found = store.cycles.list(states=[s for s in CycleState if s not in ended], limit=50).items
    return cycle_table(store, found) if found else None


def cycle_table(store: Store, cycles: Sequence[m.Cycle]) -> Table:
    stages = store.stages.of_cycles([c.id for c in cycles if c.id is not None])
    rows = terminal.table(
        "Cycle", "Name", "Recipe", "Seed", "State", "At", "Progress", "Launched", right=("Cycle", "Seed")
    )
    for cycle in cycles:
        current = _current(stages[cycle.id or 0])
        rows.add_row(
            str(cycle.id),
            cycle.name,
            cycle.recipe,
            str(cycle.seed),
            cycle.state,
            f"{current.name} {current.phase or ''}".strip() if current else terminal.MISSING,
            _progress(current),
            f"{terminal.age(cycle.created_at)} ago",
        )
    return rows


def _current(stages: list[m.Stage]) -> m.Stage | None:
    """The stage at work, else the last that began."""
    begun = [s for s in stages if s.started_at is not None]
    running = [s for s in begun if s.state == "running"]
    candidates = running or begun
    return candidates[-1] if candidates else None


def _progress(stage: m.Stage | None) -> str:
    if stage is None or not (stage.progress_done or stage.progress_total):
        return terminal.MISSING
    return f"{stage.progress_done}/{stage.progress_total or '?'} {stage.progress_text}".strip()


def stage_table(stages: Sequence[m.Stage]) -> Table:
    rows = terminal.table(
        "Stage", "State", "Phase", "Progress", "Took", "Expected", "Starts", right=("Took", "Expected", "Starts")
    )
    for stage in stages:
        took = None
        if stage.started_at:
            took = (stage.finished_at.timestamp() if stage.finished_at else time.time()) - stage.started_at.timestamp()
        rows.add_row(
            stage.name,
            stage.state,
            stage.phase or terminal.MISSING,
            _progress(stage),
            terminal.duration(took),
            terminal.duration(stage.expected_s),
            str(stage.attempt),
        )
    return rows


def score_table(store: Store, cycle_id: int) -> Table | str:
    checkpoints = store.checkpoints.of_cycle(cycle_id)
    if not checkpoints:
        return "No checkpoint yet."
    found = store.evaluations.by_size(checkpoint_ids=[c.id for c in checkpoints if c.id is not None])
    suites = sorted({e.suite for e in found})
    scores = {(e.checkpoint_id, e.suite): e for e in found}
    names = [suite.removeprefix("embedded:") for suite in suites]
    rows = terminal.table("Id", "Checkpoint", "Actor", "Critic", *names, right=("Id", *names))
    for checkpoint in checkpoints:
        cells = [scores.get((checkpoint.id, suite)) for suite in suites]
        rows.add_row(
            str(checkpoint.id),
            checkpoint.name + (" (parent kept)" if checkpoint.parent_kept else ""),
            terminal.short(checkpoint.actor_digest),
            terminal.short(checkpoint.critic_digest) if checkpoint.critic_digest else "no critic yet",
            *(_score(cell) for cell in cells),
        )
    return rows


def certificate_table(store: Store, stages: Sequence[m.Stage]) -> Table | None:
    """The consistency certificate of every local step (spec §6); None before the first one."""
    from orchestrator.health import CERTIFIED, certificates

    points = store.metrics.curve([name for _, name in CERTIFIED], stage_ids=[s.id for s in stages if s.id is not None])
    if not (steps := certificates(points)):
        return None
    labels = [label for label, _ in CERTIFIED]
    shown = [n for n in range(len(labels)) if any(step.values[n] is not None for step in steps)]
    columns = [labels[n] for n in shown]
    rows = terminal.table("Stage", "Phase", "Step", *columns, right=("Step", *columns))
    for step in steps:
        cells = (step.values[n] for n in shown)
        rows.add_row(
            step.stage,
            step.phase.value,
            str(step.step),
            *(terminal.MISSING if v is None else f"{v:.4g}" for v in cells),
        )
    return rows


def _score(evaluation: m.Evaluation | None) -> str:
    if evaluation is None or not evaluation.attempts:
        return terminal.MISSING
    share = 100 * evaluation.passed / evaluation.attempts
    return f"{share:.1f} % ({evaluation.passed}/{evaluation.attempts})"


def print_log(
    cycle_id: int,
    *,
    follow: bool,
    stage: str | None = None,
    level: str = "info",
    lines: int = 50,
    everything: bool = False,
) -> None:
    from stages.errors import ConfigError

    least = logging.getLevelNamesMapping().get(level.upper())
    if least is None:
        raise ConfigError(f"There is no level {level!r}. Choose debug, info, warning or error.")
    with terminal.opened_store() as store:
        cycle = store.cycles.get(cycle_id)
        stage_id = None
        if stage:
            if (row := store.stages.named(cycle_id, stage)) is None:
                names = ", ".join(s.name for s in store.stages.of_cycle(cycle_id))
                raise ConfigError(f"Cycle {cycle_id} has no stage {stage!r}. It has {names or 'none yet'}.")
            stage_id = row.id
        if everything:
            for line in store.logs.everything(cycle_id):
                if line.level >= least and stage_id in (None, line.stage_id):
                    _print_line(line)
            return
        last = 0
        for line in store.logs.read(cycle_id, stage_id=stage_id, min_level=least, limit=lines):
            _print_line(line)
            last = line.id or last
        while follow:
            # The state is read before the lines: lines written before the end are never missed.
            cycle = store.cycles.get(cycle_id)
            new = store.logs.read(cycle_id, stage_id=stage_id, min_level=least, after=last or -1)
            for line in new:
                _print_line(line)
                last = line.id or last
            if not new and cycle.state in {"done", "failed", "cancelled", "paused", "suspended"}:
                terminal.console().print(
                    f"Cycle {cycle_id}: {cycle.state}" + (f" — {cycle.error}" if cycle.error else "")
                )
                return
            time.sleep(FOLLOW_S)


def _print_line(line: m.LogLine) -> None:
    moment = line.created_at.astimezone().strftime("%H:%M:%S")
    print(f"{moment} {logging.getLevelName(line.level):<7} {line.text}", flush=True)
