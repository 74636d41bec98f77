"""`rsi import harbor | reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator import exports
from orchestrator.commands import terminal

SHOWN = 20  # problems printed; the number of the others is said

app = typer.Typer(
    name="import",
    help="Bring in other people's trials and published figures.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def harbor(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Harbor job folders, or a folder of them.", show_default=False, metavar="DIR..."),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Name of the imported checkpoint.", show_default="the job's, or the model's", metavar="NAME"),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Name of the suite.", show_default="the dataset's, DATASET@VERSION")
    ] = None,
) -> None:
    """Import trials that Harbor ran: checkpoints, evaluations with verdicts per task, trajectories with checks.

    Importing the same folders again changes nothing. A damaged trial is named and left out, the rest lands; links are not
    followed and archives are not opened. Transcripts are read where they are ATIF (1.0-1.8) or chat messages.

    Examples:

        rsi import harbor jobs/2026-01-31__12-00-00

        rsi import harbor jobs/before jobs/after --suite terminal-bench@2.0
    """
    from orchestrator.import_trials import import_harbor

    out = terminal.console()
    with terminal.opened_store() as store:
        report = import_harbor(store, folders, checkpoint=checkpoint, suite=suite, watch=out.print)
    table = terminal.table(
        "Checkpoint", "Id", "Suite", "Tasks", "Passed / verdicts", "Passed / attempts",
        right=("Id", "Tasks", "Passed / verdicts", "Passed / attempts"),
    )  # fmt: skip
    for e in report.evaluations:
        table.add_row(
            e.checkpoint,
            str(e.checkpoint_id),
            e.suite,
            str(e.tasks),
            exports.rate(e.passed, e.verdicts),
            exports.rate(e.passed, e.attempts),
        )
    out.print(table)
    out.print(
        f"{report.trials} trials stored, {report.with_checks} with checks, {report.with_turns} with a transcript, "
        f"{len(report.skipped)} left out. Passed / attempts counts a missing verdict as unsolved, as leaderboards do."
    )
    for title, lines in (("Left out", report.skipped), ("Noted", report.notes)):
        for line in lines[:SHOWN]:
            out.print(f"{title}: {line}")
        if len(lines) > SHOWN:
            out.print(f"{title}: {len(lines) - SHOWN} more")


@app.command()
def reference() -> None:
    """Load the source reports' published figures, shown beside own results as reference only.

    Loading them again replaces them.

    Example:

        rsi import reference
    """
    from orchestrator.analysis import load_reference

    with terminal.opened_store() as store:
        count = load_reference(store)
    terminal.console().print(f"{count} published figures loaded.")
