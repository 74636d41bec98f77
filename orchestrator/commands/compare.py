"""`rsi compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator import exports
from orchestrator.commands import terminal


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Work")(compare)


def compare(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Two or more: number, CYCLE/NAME, digest, or an imported one's name.",
            show_default=False,
            metavar="CHECKPOINT...",
        ),
    ],
    suite: Annotated[str | None, typer.Option(help="Only this suite.", show_default="all")] = None,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Every pair, not only each against the first.")
    ] = False,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="Test on k / attempts: a missing verdict counts as unsolved.")
    ] = False,
    format_: Annotated[exports.Format, typer.Option("--format", help="Kind of output.")] = exports.Format.MARKDOWN,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
) -> None:
    """Compare checkpoints on stored evaluations: paired differences with intervals, tests, flips and power.

    Everything that makes a number doubtful is said: missing verdicts, unequal denominators, other settings, a suite that
    changed. Markdown and JSON add strata, cost, how the checkpoints were selected, and what choosing the best of them on
    this very suite would owe to luck. CSV gives the comparisons.

    Examples:

        rsi compare 1/Base 1/RPR-2

        rsi compare Qwen3.5-9B tmax-9b --suite terminal-bench@2.0 --format csv -o comparison.csv
    """
    from orchestrator import compare_tables as tables
    from orchestrator import comparison_rows as rows
    from orchestrator.comparisons import compare_checkpoints
    from stages.comparison import Convention

    convention = Convention.ATTEMPTS if attempts else Convention.VERDICTS
    with terminal.opened_store() as store:
        report = compare_checkpoints(store, checkpoints, suite=suite, all_pairs=all_pairs, convention=convention)
        match format_:
            case exports.Format.MARKDOWN:
                text = f"{rows.to_markdown(report)}\n{rows.details(store, report)}"
            case exports.Format.CSV:
                text = exports.to_csv([row for s in report.suites for row in rows.comparison_rows(s)])
            case exports.Format.JSON:
                document = {
                    "scores": [row for s in report.suites for row in rows.score_rows(s)],
                    "comparisons": [row for s in report.suites for row in rows.comparison_rows(s)],
                    "four_suite_means": report.four_suite_means,
                    "strata": {s.suite: tables.group_rows("stratum", s, tables.strata(s)) for s in report.suites},
                    "costs": {s.suite: tables.cost_rows(store, s) for s in report.suites},
                    "selections": {s.suite: tables.selection_rows(store, s) for s in report.suites},
                    "optimism": {s.suite: tables.optimism_row(s) for s in report.suites},
                }
                text = exports.to_json(document)
    exports.deliver(text, output)
