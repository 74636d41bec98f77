"""`rsi demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands import terminal


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Start here")(demo)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
) -> None:
    """Run the whole loop on a tiny model: five checkpoints in a few minutes on two cores, nothing else needed.

    Starts the services if they are not running, launches the recipe `demo`, shows its progress, prints the table of the
    five checkpoints, and leaves everything running: look at it in the console, then `rsi down`.

    Example:

        rsi demo
    """
    from orchestrator.demo import run_demo

    raise typer.Exit(run_demo(seed=seed, settings=terminal.settings()) or 0)
