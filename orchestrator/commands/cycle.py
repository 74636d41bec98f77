"""`rsi cycle launch | list | show | pause | resume | cancel | logs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal
from orchestrator.commands.cycle_view import certificate_table, cycle_table, print_log, score_table, stage_table

if TYPE_CHECKING:
    from orchestrator import models as m

app = typer.Typer(
    name="cycle",
    help="Launch, watch, pause, resume and cancel cycles.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
CycleId = Annotated[int, typer.Argument(help="Number of the cycle (`rsi cycle list`).", show_default=False)]


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
        typer.Option(
            help="Folder of training tasks in Harbor layout; needs a validation_suite like it.",
            show_default="the recipe's",
            metavar="DIR",
        ),
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

        rsi cycle launch my-recipe.toml --model ~/models/qwen3-0.6b --pool ./train --set validation_suite=./validation
    """
    from orchestrator.launch import launch_cycle
    from orchestrator.recipes import parse_overrides

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
        print_log(cycle_id, follow=True)


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
        terminal.console().print(cycle_table(store, found.items))


@app.command()
def show(cycle_id: CycleId) -> None:
    """Show one cycle: its stages, its checkpoints and their scores, and the consistency certificate of every local step.

    Example:

        rsi cycle show 3
    """
    from orchestrator.store.logs import WAITS

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
        if cycle.state in {"queued", "resuming"} and (waits := store.logs.newest(cycle_id, WAITS)):
            out.print(waits)
        if cycle.digest_claim_void:
            out.print(f"digest claim void: {cycle.digest_claim_void}")
        out.print()
        stages = store.stages.of_cycle(cycle_id)
        out.print(stage_table(stages))
        out.print()
        out.print(score_table(store, cycle_id))
        if (certificates := certificate_table(store, stages)) is not None:
            out.print("\nTrained on what was sampled (spec §6)")
            out.print(certificates)


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
        before = store.cycles.get(cycle_id).state
        state = resume_cycle(store, cycle_id, actor="cli", settings=terminal.settings())
        alive = store.cycles.get(cycle_id).heartbeat_at
    if state == "running" and before == "running":
        sign = f"last sign of life {terminal.age(alive)} ago" if alive else "no sign of life yet"
        said = (
            f"a process holds it ({sign}), so nothing was started. Was it killed just now? Then try again in a minute."
        )
    elif state == "running":
        said = "the request to pause is withdrawn; its process works on."
    else:
        said = "it continues from its last finished record."
    terminal.console().print(f"Cycle {cycle_id} is {state}: {said}")
    if follow:
        print_log(cycle_id, follow=True)


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

    with terminal.opened_store() as store:
        store.cycles.get(cycle_id)  # says that there is none before it asks
        if not yes:
            typer.confirm(f"Stop cycle {cycle_id} for good?", abort=True)
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
    print_log(cycle_id, follow=follow, stage=stage, level=level, lines=lines, everything=everything)


# --------------------------------------------------------------------------- input


def _state(word: str) -> m.CycleState:
    from orchestrator.models import CycleState
    from stages.errors import ConfigError

    try:
        return CycleState(word)
    except ValueError:
        raise ConfigError(f"There is no state {word!r}. Choose one of {', '.join(CycleState)}.") from None
