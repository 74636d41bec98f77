"""`rsi tasks audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import terminal


def audit(
    folder: Annotated[Path, typer.Argument(help="A task folder.", show_default=False, metavar="DIR")],
    backend: Annotated[str, typer.Option(help="bubblewrap or docker.")] = "bubblewrap",
    rootfs: Annotated[
        str | None,
        typer.Option(
            help="Root filesystem for a task that names none.", show_default="$RSI_ROOTFS", metavar="NAME|DIR"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Judge whether a task may be trained on: eight dimensions, and what rejects it whatever its score.

    Runs the verifier on an untouched workspace and, twice, after the reference solution; reads the folder for leaks, shortcuts
    and requirements that the instruction does not name. Exit code 1 when something rejects it.

    Example:

        rsi tasks audit ./fix-git
    """
    from dataclasses import asdict

    from orchestrator import task_runs
    from orchestrator.task_audit import audited

    with task_runs.loaded_task(folder) as loaded:
        task = task_runs.runnable(loaded, backend)
        found = audited(task, task_runs.sandbox_backend(backend, terminal.settings(), rootfs))
    if json:
        import json as codec

        print(codec.dumps({**asdict(found), "score": found.score}))
    else:
        out = terminal.console()
        table = terminal.table("group", "dimension", "value", "against it", right=("value",))
        for d in found.dimensions:
            table.add_row(d.group, d.name, f"{d.value:.2f}", terminal.plain(d.why))
        out.print(table)
        for reject in found.rejects:
            out.print(f"rejected: {terminal.plain(reject)}")
        out.print(f"{task.id}: {found.score:.0f} of 100, {'rejected' if found.rejects else 'may be used'}.")
    raise typer.Exit(1 if found.rejects else 0)
