"""`rsi export trials`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import terminal

app = typer.Typer(
    name="export", help="Write what is stored for other tools.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.callback()
def group() -> None:
    """Write what is stored for other tools."""


@app.command()
def trials(
    what: Annotated[
        str,
        typer.Argument(
            help="cycle:ID, evaluation:ID, or checkpoint:REF (number, CYCLE/NAME, digits of a digest).",
            show_default=False,
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="New folder to write to.", show_default=False, metavar="DIR")],
) -> None:
    """Write attempts as Harbor job folders: results, check reports (CTRF) and transcripts (ATIF), for other viewers.

    An evaluation becomes one job folder; a cycle or a checkpoint a folder of jobs, one per model, phase and suite. Keys,
    tokens and passwords in turns and logs are removed. The folder appears complete or not at all, and
    `rsi import harbor` reads it back.

    Examples:

        rsi export trials checkpoint:3/RPR-2 ./jobs/rpr-2

        rsi export trials cycle:3 ./jobs/cycle-3
    """
    from orchestrator import export_trials
    from orchestrator.commands.checkpoint import find
    from stages.errors import ConfigError

    kind, _, reference = what.partition(":")
    if kind not in ("cycle", "checkpoint", "evaluation") or not reference:
        raise ConfigError(f"{what!r}: name cycle:ID, evaluation:ID or checkpoint:REF")
    if kind != "checkpoint" and not reference.isdecimal():
        raise ConfigError(f"{what!r}: the {kind} is named by its number")
    out = terminal.console()
    with terminal.opened_store() as store:
        if kind == "evaluation":
            jobs = export_trials.export_evaluation(store, int(reference), folder)
        elif kind == "cycle":
            jobs = export_trials.export_cycle(store, int(reference), folder, watch=out.print)
        else:
            jobs = export_trials.export_checkpoint(store, find(store, reference), folder, watch=out.print)
    out.print(
        f"{sum(j.trials for j in jobs)} trials in {len(jobs)} job folder{'' if len(jobs) == 1 else 's'}: {folder}"
    )
