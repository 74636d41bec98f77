"""`rsi evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands import terminal


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Work")(evaluate)


def evaluate(
    cycle_id: Annotated[int, typer.Argument(help="Cycle whose retained checkpoints are measured.", show_default=False)],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="heldout-names, heldout-combinations, or a suite folder; several times for several.",
            show_default="both",
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of a generated suite.")] = 120,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts per task (k of Mean@k).")] = 3,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Only these checkpoints, e.g. Base, RPR-2.", show_default="all retained")
    ] = None,
) -> None:
    """Measure a cycle's checkpoints on more tasks than the cycle itself did.

    Results are stored beside the cycle's own evaluations and show on its page.

    Examples:

        rsi evaluate 1

        rsi evaluate 1 --suite heldout-names --tasks 400 --checkpoint Base --checkpoint RPR-2
    """
    from orchestrator.measure import measure, suite_named
    from stages.errors import ConfigError
    from stages.statistics import wilson

    here, out = terminal.settings(), terminal.console()
    with terminal.opened_store() as store:
        rows = [
            c for c in store.checkpoints.of_cycle(cycle_id) if c.retained and (not checkpoint or c.name in checkpoint)
        ]
        if not rows:
            raise ConfigError(
                f"cycle {cycle_id} has no such retained checkpoint; `rsi cycle show {cycle_id}` lists them"
            )
        suites = [suite_named(name, tasks, here) for name in suite or ("heldout-names", "heldout-combinations")]
        results = measure(store, here, rows, suites, attempts_per_task=attempts, watch=out.print)
    table = terminal.table("checkpoint", "suite", "strict success", right=("strict success",))
    for r in results:
        interval = wilson(r.passed, r.verdicts)
        text = terminal.MISSING
        if interval:
            text = f"{100 * r.passed / r.verdicts:.1f} % ({r.passed}/{r.verdicts}) [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
        table.add_row(r.checkpoint, r.suite, text)
    out.print(table)
