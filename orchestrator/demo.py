"""`rsi demo`: the whole loop with progress bars, then the table of five checkpoints."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from orchestrator import models as m
from orchestrator.accounts import sign_in_hint
from orchestrator.embedded import control, database
from orchestrator.launch import launch_cycle
from orchestrator.plan import estimate
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.errors import RsiError
from stages.statistics import wilson

POLL_S = 0.5


def run_demo(*, seed: int | None = None, settings: Settings) -> int:
    """Bring everything up, run the recipe `demo`, print what came out; returns the exit status.

    Leaves the services running for a person. Without a terminal (CI, a pipe) they are stopped again at the end,
    after an error too. Ctrl-C while the loop runs leaves it running in the background, and says how to go on.
    """
    out = Console(highlight=False)
    interactive = sys.stdout.isatty()
    try:
        with (
            out.status("starting Postgres, Prefect, worker and console …") if interactive else contextlib.nullcontext()
        ):
            control.up(settings)
        return _loop(seed, control.running_settings(settings), out)
    finally:
        if not interactive:
            control.down(settings)


def _loop(seed: int | None, settings: Settings, out: Console) -> int:
    """Launch, follow, print; returns the exit status. The services stay as they are."""
    url = settings.console_public
    out.print(f"Console: {url}")
    store = Store.open(database.url(settings), settings.artifacts, pool_size=2)
    try:
        out.print(sign_in_hint(store, settings), soft_wrap=True)
        overrides = {} if seed is None else {"seed": seed}
        low, high = estimate(load_recipe("demo", overrides=overrides)).wall_s
        cycle_id = launch_cycle("demo", overrides=overrides, actor="demo", settings=settings, store=store)
        out.print(
            f"Cycle {cycle_id} is launched; expected {low / 60:.0f}-{high / 60:.0f} minutes. Watch it at {url}/cycles/{cycle_id}"
        )
        try:
            cycle = follow(store, cycle_id, out)
        except KeyboardInterrupt:
            if not sys.stdout.isatty():
                raise  # the services are stopped, and the cycle with them
            out.print(
                f"\nCycle {cycle_id} goes on in the background. `rsi cycle show {cycle_id}` looks at it, "
                f"`rsi cycle pause {cycle_id}` pauses it, `rsi down` stops everything."
            )
            return 130
        out.print(results(store, cycle_id))
        return _farewell(out, cycle, url)
    finally:
        store.close()


def follow(store: Store, cycle_id: int, out: Console) -> m.Cycle:
    """One bar per stage until the cycle rests."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]:<10} {task.fields[text]}"),
        TimeElapsedColumn(),
    )
    shown: dict[str, str] = {}
    with Progress(*columns, console=out, disable=not out.is_terminal) as bars:
        rows: dict[str, TaskID] = {}
        while True:
            cycle = store.cycles.get(cycle_id)
            for stage in store.stages.of_cycle(cycle_id):
                if stage.name not in rows:
                    rows[stage.name] = bars.add_task(stage.name, total=None, start=False, phase="", text="")
                _draw(bars, rows[stage.name], stage)
                phase = f"{stage.phase or ''} {stage.state}"
                if not out.is_terminal and stage.started_at and shown.get(stage.name) != phase:
                    shown[stage.name] = phase
                    out.print(f"{stage.name}: {phase} {stage.progress_text}", soft_wrap=True)
            if cycle.state in RESTING:
                return cycle
            time.sleep(POLL_S)


RESTING = (m.CycleState.DONE, m.CycleState.FAILED, m.CycleState.CANCELLED, m.CycleState.PAUSED, m.CycleState.SUSPENDED)


def _draw(bars: Progress, bar: TaskID, stage: m.Stage) -> None:
    if stage.started_at is None:
        return
    task = bars.tasks[bar]
    if not task.started:
        bars.start_task(bar)
    if stage.state is m.StageState.DONE:
        if task.fields["phase"] != "done":
            bars.update(bar, total=1, completed=1, phase="done", text="")
            bars.stop_task(bar)
        return
    bars.update(
        bar,
        total=stage.progress_total,
        completed=stage.progress_done,
        phase=stage.phase or "",
        text=stage.progress_text,
    )
    task.finished_time = None  # a full bar is the end of a phase: the stage's clock goes on


def results(store: Store, cycle_id: int) -> Table:
    """The table of checkpoints: strict successes on each reported suite, with 95 % Wilson intervals."""
    suites: dict[str, None] = {}
    cells: dict[tuple[str, str], str] = {}
    for e in store.evaluations.by_size(cycle_id=cycle_id):
        suites[e.suite] = None
        interval = wilson(e.passed, e.verdicts)
        if interval is None:
            cells[e.checkpoint, e.suite] = f"— (0/{e.attempts})"
            continue
        rate, low, high = (100 * x for x in (e.passed / e.verdicts, interval.low, interval.high))
        cells[e.checkpoint, e.suite] = f"{rate:.1f} % ({e.passed}/{e.verdicts}) [{low:.1f}, {high:.1f}]"
    table = Table(title=f"Cycle {cycle_id}: strict success, k/verdicts [95 % Wilson]")
    table.add_column("checkpoint")
    for suite in suites:
        table.add_column(suite.removeprefix("embedded:"), justify="right")
    table.add_column("actor digest")
    table.add_column("critic digest")
    for row in store.checkpoints.of_cycle(cycle_id):
        if row.retained:
            critic = row.critic_digest[:12] if row.critic_digest else "no critic yet"
            scores = [cells.get((row.name, suite), "—") for suite in suites]
            table.add_row(row.name, *scores, row.actor_digest[:12], critic)
    return table


def _farewell(out: Console, cycle: m.Cycle, url: str) -> int:
    if cycle.state is not m.CycleState.DONE:
        if cycle.state is m.CycleState.FAILED:
            raise RsiError(
                f"cycle {cycle.id} failed: {cycle.error}\nSee `rsi cycle logs {cycle.id}`; continue with `rsi cycle resume {cycle.id}`."
            )
        out.print(f"Cycle {cycle.id} is {cycle.state}.")
        return 1
    out.print(f"Curves, lineage and trajectories: {url}/cycles/{cycle.id}")
    out.print("More tasks: rsi evaluate --help · another seed: rsi demo --seed 1 · stop everything: rsi down")
    return 0
