"""`rsi doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands import terminal


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Start here")(doctor)


def doctor(
    sandbox: Annotated[
        bool, typer.Option("--sandbox/--no-sandbox", help="Try the sandbox, too (some seconds).")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check this machine: Python, disk, memory, ports, Postgres, torch, sandbox, services. Each row is tried, not assumed.

    Exit code 0 when nothing failed; warnings mean that it works with less.

    Examples:

        rsi doctor

        rsi doctor --no-sandbox
    """
    from dataclasses import asdict

    from rich.text import Text

    from orchestrator.doctor import Level, examine

    out = terminal.console()
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    rows = []
    for row in examine(terminal.settings(), sandbox=sandbox):
        rows.append(row)
        if json:
            continue
        out.print(Text.assemble((f"{row.level:<5}", colours[row.level]), f"{row.name:<42} {row.found}"))
        if row.advice:
            out.print(f"     {'':<42} → {row.advice}")
    failed = sum(row.level is Level.FAIL for row in rows)
    warned = sum(row.level is Level.WARN for row in rows)
    if json:
        import json as codec

        out.print_json(codec.dumps([asdict(row) for row in rows]))
    else:
        out.print(f"\n{len(rows)} checks: {len(rows) - failed - warned} ok, {warned} warning(s), {failed} failure(s).")
    raise typer.Exit(1 if failed else 0)
