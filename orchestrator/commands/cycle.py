"""`rsi cycle launch | list | show | pause | resume | cancel | logs`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator import models as m
    from orchestrator.store.facade import Store

app = typer.Typer(
    name="cycle",
    help="Launch, watch, pause, resume and cancel cycles.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
CycleId = Annotated[int, typer.Argument(help="Number of the cycle (`rsi cycle list`).", show_default=False)]
FOLLOW_S = 1.0


@app.command()
def launch(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or the path of a .toml file.")] = "demo",
    name: Annotated[str | None, typer.Option(help="Name on the screen.", show_default="the recipe's")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of everything random.", show_default="the recipe's")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a Hugging Face causal LM to start from.", show_default="the recipe's", metavar="DIR"
        ),
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option(help="Folder of training tasks in Harbor layout.", show_default="the recipe's", metavar="DIR"),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override one key of the recipe; may be given several times.", metavar="KEY=VALUE"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print its log until it ends.")] = False,
) -> None:
    """Launch a cycle: Base, then one self-rewrite and one policy-refine stage per round.

    The recipe is checked before anything starts; unknown keys and impossible sizes are errors. `--set` takes a dotted
    path and a TOML value. The cycle runs in the background: closing the terminal does not stop it.

    Examples:

        rsi cycle launch demo --seed 1

        rsi cycle launch demo --set rounds=1 --set evaluate.attempts_per_task=1 --follow

        rsi cycle launch my-recipe.toml --model ~/models/qwen3-0.6b --pool ~/tasks/train
    """
    from orchestrator.launch import launch_cycle

    overrides = parse_overrides(override or [])
    for key, value in (
        ("seed", seed),
        ("model", model and str(model.resolve())),
        ("pool", pool and str(pool.resolve())),
    ):
        if value is not None:
            overrides[key] = value
    cycle_id = launch_cycle(recipe, name=name, overrides=overrides, settings=terminal.settings())
    out = terminal.console()
    out.print(
        f"Cycle {cycle_id} is launched. `rsi cycle show {cycle_id}` and `rsi cycle logs {cycle_id} -f` follow it."
    )
    if follow:
        _print_log(cycle_id, follow=True)


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help="Only cycles in this state (running, done, failed, …).")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20,
) -> None:
    """List cycles, newest first.

    Examples:

        rsi cycle list

        rsi cycle list --state failed
    """
    with terminal.opened_store() as store:
        found = store.cycles.list(states=[_state(state)] if state else (), limit=limit)
        if not found.items:
            terminal.console().print("No cycle yet. `rsi cycle launch` starts one.")
            return
        terminal.console().print(_table(store, found.items))


@app.command()
def show(cycle_id: CycleId) -> None:
    """Show one cycle: its stages, its checkpoints and their scores.

    Example:

        rsi cycle show 3
    """
    with terminal.opened_store() as store:
        cycle = store.cycles.get(cycle_id)
        out = terminal.console()
        out.print(f"Cycle {cycle.id} {cycle.name} — {cycle.state}", style="bold")
        out.print(f"recipe {cycle.recipe}, seed {cycle.seed}, base {cycle.base_checkpoint or 'shipped model'}")
        out.print(
            f"config {terminal.short(cycle.config_digest)}, launched {terminal.age(cycle.created_at)} ago by {cycle.created_by or terminal.MISSING}"
        )
        if cycle.error:
            out.print(f"error: {cycle.error}", style="red")
        if cycle.digest_claim_void:
            out.print(f"digest claim void: {cycle.digest_claim_void}")
        out.print()
        out.print(_stages(store.stages.of_cycle(cycle_id)))
        out.print()
        out.print(_scores(store, cycle_id))


@app.command()
def pause(cycle_id: CycleId) -> None:
    """Pause a cycle at its next safe boundary (between records, never inside an update). Its process then ends.

    Example:

        rsi cycle pause 3
    """
    from orchestrator.launch import pause_cycle

    with terminal.opened_store() as store:
        pause_cycle(store, cycle_id, actor="cli")
        terminal.console().print(
            f"Cycle {cycle_id}: {store.cycles.get(cycle_id).state}. Continue with `rsi cycle resume {cycle_id}`."
        )


@app.command()
def resume(
    cycle_id: CycleId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print its log until it ends.")] = False,
) -> None:
    """Continue a paused, interrupted or failed cycle from its last finished record.

    No finished record is lost and no optimiser step is repeated.

    Example:

        rsi cycle resume 3 --follow
    """
    from orchestrator.launch import resume_cycle

    with terminal.opened_store() as store:
        resume_cycle(store, cycle_id, actor="cli", settings=terminal.settings())
    terminal.console().print(f"Cycle {cycle_id} continues.")
    if follow:
        _print_log(cycle_id, follow=True)


@app.command()
def cancel(
    cycle_id: CycleId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Stop a cycle for good. What it recorded stays.

    Example:

        rsi cycle cancel 3
    """
    from orchestrator.launch import cancel_cycle

    if not yes:
        typer.confirm(f"Stop cycle {cycle_id} for good?", abort=True)
    with terminal.opened_store() as store:
        cancel_cycle(store, cycle_id, actor="cli")
        terminal.console().print(f"Cycle {cycle_id}: {store.cycles.get(cycle_id).state}.")


@app.command()
def logs(
    cycle_id: CycleId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines until the cycle ends.")] = False,
    stage: Annotated[str | None, typer.Option(help="Only this stage, e.g. RPR-1.")] = None,
    level: Annotated[str, typer.Option(help="At least: debug, info, warning, error.")] = "info",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="The whole log.")] = False,
) -> None:
    """Print the log of a cycle.

    Examples:

        rsi cycle logs 3 -f

        rsi cycle logs 3 --stage RPR-1 --level warning

        rsi cycle logs 3 --all > cycle-3.log
    """
    _print_log(cycle_id, follow=follow, stage=stage, level=level, lines=lines, everything=everything)


# --------------------------------------------------------------------------- input


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["rounds=1", "name=x"]` as {"rounds": 1, "name": "x"}: TOML values, and plain words as text.

    Raises:
        ConfigError: no `=`, or no key.
    """
    import tomllib

    from stages.errors import ConfigError

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {pair!r} is no KEY=VALUE. Example: --set rounds=1")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value.strip()
    return found


def _state(word: str) -> m.CycleState:
    from orchestrator.models import CycleState
    from stages.errors import ConfigError

    try:
        return CycleState(word)
    except ValueError:
        raise ConfigError(f"There is no state {word!r}. Choose one of {', '.join(CycleState)}.") from None


# --------------------------------------------------------------------------- output


def active_table(store: Store) -> Table | None:
    """The cycles that are at work or wait for something; None when there are none."""
    from orchestrator.models import CycleState

    ended = {CycleState.DONE, CycleState.CANCELLED, CycleState.FAILED}
    found = store.cycles.list(states=[s for s in CycleState if s not in ended], limit=50).items
    return _table(store, found) if found else None


def _table(store: Store, cycles: Any) -> Table:
    stages = store.stages.of_cycles([c.id for c in cycles])
    rows = terminal.table(
        "Cycle", "Name", "Recipe", "Seed", "State", "At", "Progress", "Launched", right=("Cycle", "Seed")
    )
    for cycle in cycles:
        current = _current(stages[cycle.id])
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


def _stages(stages: Any) -> Table:
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


def _scores(store: Store, cycle_id: int) -> Table | str:
    checkpoints = store.checkpoints.of_cycle(cycle_id)
    if not checkpoints:
        return "No checkpoint yet."
    found = store.evaluations.list(checkpoint_ids=[c.id for c in checkpoints if c.id is not None], limit=1000).items
    suites = sorted({e.suite for e in found})
    scores = {(e.checkpoint_id, e.suite): e for e in reversed(found)}
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


def _score(evaluation: m.Evaluation | None) -> str:
    if evaluation is None or not evaluation.attempts:
        return terminal.MISSING
    share = 100 * evaluation.passed / evaluation.attempts
    return f"{share:.1f} % ({evaluation.passed}/{evaluation.attempts})"


def _print_log(
    cycle_id: int,
    *,
    follow: bool,
    stage: str | None = None,
    level: str = "info",
    lines: int = 50,
    everything: bool = False,
) -> None:
    import logging

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
    import logging

    moment = line.created_at.astimezone().strftime("%H:%M:%S")
    print(f"{moment} {logging.getLevelName(line.level):<7} {line.text}", flush=True)
