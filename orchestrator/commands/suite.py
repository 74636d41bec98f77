"""`rsi suite generate | list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import terminal

app = typer.Typer(
    name="suite", help="Generate and list task pools and suites.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.command()
def generate(
    kind: Annotated[
        str, typer.Argument(help="train, validation, heldout-names or heldout-combinations.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="New folder to write to.", show_default=False, metavar="DIR")],
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, help="How many tasks.")] = 40,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed.", show_default="the shipped one of this kind")] = None,
) -> None:
    """Write a pool of tasks in Harbor layout, a pure function of kind, size and seed.

    The four kinds are disjoint by construction. `validation` is protected: it chooses steps, and is never reported.

    Examples:

        rsi suite generate heldout-names ./suite -n 120

        rsi suite generate train ./pool -n 1000 --seed 7
    """
    from stages.tasks.embedded import SEEDS
    from stages.tasks.generate import PoolKind, generate_pool
    from stages.tasks.write import write_pool

    specs = generate_pool(kind, tasks, SEEDS[PoolKind(kind)] if seed is None and kind in set(PoolKind) else seed or 0)
    used = SEEDS[PoolKind(kind)] if seed is None else seed
    manifest = write_pool(specs, folder, name=f"embedded:{kind}", kind=kind, seed=used)
    terminal.console().print(f"{manifest.tasks} tasks in {manifest.path}, digest {terminal.short(manifest.digest)}.")


@app.command("list")
def list_() -> None:
    """List the suites and pools that cycles have used, with their digests.

    Example:

        rsi suite list
    """
    with terminal.opened_store() as store:
        found = store.suites.list()
    if not found:
        terminal.console().print("No suite yet: a cycle registers those that it uses.")
        return
    rows = terminal.table("Id", "Suite", "Version", "Split", "Tasks", "Digest", "Folder", right=("Id", "Tasks"))
    for suite in found:
        rows.add_row(
            str(suite.id),
            suite.name,
            suite.version,
            suite.split,
            str(suite.n_tasks),
            terminal.short(suite.digest),
            suite.path,
        )
    terminal.console().print(rows)
