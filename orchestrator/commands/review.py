"""`rsi review list | show | approve | reject`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from stages.domain import Decision

app = typer.Typer(
    name="review",
    help='Decide on runbooks that wait at the human gate (recipes with `review.policy = "human"`).',
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
RunbookId = Annotated[str, typer.Argument(help="Id, or the first digits of it.", show_default=False)]
Login = Annotated[str, typer.Option("--as", help="Who decides.", envvar="USER", show_default="$USER")]


@app.command("list")
def list_(cycle_id: Annotated[int | None, typer.Option("--cycle", help="Only this cycle.")] = None) -> None:
    """List runbooks that wait for people.

    Example:

        rsi review list --cycle 3
    """
    from orchestrator.models import RunbookState

    table = terminal.table("runbook", "cycle", "task", "lines", "findings", right=("lines", "findings"))
    with terminal.opened_store() as store:
        found = store.runbooks.list(states=[RunbookState.WAITING], cycle_id=cycle_id, limit=200).items
        for row in found:
            findings = store.reviews.findings(row.id, row.revision)
            table.add_row(row.id, str(row.cycle_id), row.task_id, str(len(row.lines)), str(len(findings)))
    terminal.console().print(table if found else "No runbook waits for a verdict.")


@app.command()
def show(runbook_id: RunbookId) -> None:
    """Show a runbook, its findings with their evidence, and the verdicts on it.

    Example:

        rsi review show 5f2a
    """
    out = terminal.console()
    with terminal.opened_store() as store:
        row = store.runbooks.get(_whole(store, runbook_id))
        out.print(f"Runbook {row.id}, revision {row.revision}, {row.state}; task {row.task_id}, planner {row.planner}")
        for number, line in enumerate(row.lines):
            cites = ", ".join(f"turn {c}" for c in line.get("cites", ()))
            out.print(f"  {number}  {line['text']}" + (f"    [{cites}]" if cites else ""))
        for finding in store.reviews.findings(row.id, row.revision):
            place = f"line {finding.line}" if finding.line is not None else "whole"
            out.print(f"  {finding.severity} {finding.rule} ({place}): {finding.message} — {finding.evidence_source}")
        for who, review in store.reviews.standing(row.id, row.revision).items():
            out.print(f"  {who}: {review.decision} {review.reason}")


@app.command()
def approve(
    runbook_id: RunbookId,
    login: Login,
    reason: Annotated[str, typer.Option(help="Needed where there are findings.")] = "",
) -> None:
    """Approve a runbook. The cycle goes on by itself once the quota of verdicts is met.

    Example:

        rsi review approve 5f2a --as ada --reason "the name stands in the instruction"
    """
    from stages.domain import Decision

    _decide(runbook_id, login, Decision.APPROVE, reason)


@app.command()
def reject(
    runbook_id: RunbookId, login: Login, reason: Annotated[str, typer.Option(help="Why.", show_default=False)]
) -> None:
    """Reject a runbook.

    Example:

        rsi review reject 5f2a --as ada --reason "copies the answer"
    """
    from stages.domain import Decision

    _decide(runbook_id, login, Decision.REJECT, reason)


def _decide(runbook_id: str, login: str, decision: Decision, reason: str) -> None:
    from orchestrator.gate import decide

    with terminal.opened_store() as store:
        whole = _whole(store, runbook_id)
        progress = decide(store, whole, login, decision, reason=reason, settings=terminal.settings())
    then = f"{progress.waiting} still wait" if progress.open else "the quota is met, the cycle goes on"
    terminal.console().print(f"Runbook {whole}: {progress.state.status} ({progress.state.reason}); {then}.")


def _whole(store: object, start: str) -> str:
    from orchestrator.models import RunbookState
    from orchestrator.store import Store
    from stages.errors import ConfigError

    assert isinstance(store, Store)
    if len(start) == 24:
        return start
    rows = store.runbooks.list(states=[RunbookState.WAITING], limit=2000).items
    found = {row.id for row in rows if row.id.startswith(start)}
    if len(found) != 1:
        raise ConfigError(f"{len(found)} waiting runbooks begin with {start!r}; `rsi review list` shows their ids")
    return found.pop()
