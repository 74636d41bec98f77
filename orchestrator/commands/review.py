"""`rsi review list | show | approve | reject | undo | claim | release | revise | statistics`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator.reviewing import Outcome
    from orchestrator.store import Store
    from stages.domain import Decision

app = typer.Typer(
    name="review",
    help='Decide on runbooks that wait at the human gate (recipes with `review.policy = "human"`).',
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
RunbookId = Annotated[str, typer.Argument(help="Id, or the first digits of it.", show_default=False)]
Login = Annotated[
    str, typer.Option("--as", help="Who acts: a reviewer.", envvar="USER", show_default="$USER, or local")
]
ID_DIGITS = 24


@app.command("list")
def list_(
    login: Login = "",
    cycle_id: Annotated[int | None, typer.Option("--cycle", help="Only this cycle.")] = None,
    mine: Annotated[bool, typer.Option(help="Only what waits for the person.")] = False,
) -> None:
    """List runbooks that wait for people.

    Example:

        rsi review list --cycle 3
    """
    from orchestrator.review_look import needs
    from orchestrator.store.review_queue import QueueFilter

    table = terminal.table("runbook", "cycle", "task", "lines", "findings", "yours", right=("lines", "findings"))
    with terminal.opened_store() as store:
        where = QueueFilter(mine=mine, cycle_id=cycle_id)
        found = store.review_queue.rows(where, _viewer(store, login), decider=True, needs=needs(store), limit=200)
        counts = store.review_queue.finding_counts([(row.id, row.revision) for row in found])
        for row in found:
            findings = sum(n for _, _, n in counts.get(row.id, ()))
            yours = row.my_verdict or ("claimed" if row.claimed else "")
            table.add_row(row.id, str(row.cycle_id), row.task_id, str(row.n_lines), str(findings), yours)
    terminal.console().print(table if found else "No runbook waits for a verdict.")


@app.command()
def show(runbook_id: RunbookId, login: Login = "") -> None:
    """Show a runbook and its findings with their evidence, which count as seen from now on.

    What others decided is shown after the own verdict.

    Example:

        rsi review show 5f2a --as ada
    """
    from orchestrator.review_look import look

    def say(text: str) -> None:
        terminal.console().print(terminal.plain(text))  # what models and tasks wrote may hold escape codes

    with terminal.opened_store() as store:
        login = _viewer(store, login)
        seen = look(store, _whole(store, runbook_id, login), login, decider=True)
        row = seen.runbook
        say(f"Runbook {row.id}, revision {row.revision}, {row.state}; task {row.task_id}, planner {row.planner}")
        for number, line in enumerate(row.lines, start=1):
            cites = ", ".join(f"turn {c}" for c in line.get("cites", ()))
            say(f"  {number}  {line['text']}" + (f"    [{cites}]" if cites else ""))
        for finding in seen.findings:
            place = f"line {finding.line + 1}" if finding.line is not None else "whole"
            words = f"{finding.message} — {finding.evidence} {finding.evidence_source}"
            say(f"  {finding.severity} {finding.rule} ({place}): {words}")
        if login:
            store.review_queue.see([f.id for f in seen.findings if f.id is not None], login)
        for review in [seen.mine, *seen.others]:
            if review is not None:
                say(f"  {review.reviewer}: {review.decision} {review.reason}")
        if seen.hidden:
            say(f"  {seen.hidden} other verdicts are hidden until yours.")
        if seen.planted:
            say(f"  A known leak: {seen.planted.truth}")


@app.command()
def approve(
    runbook_id: RunbookId,
    login: Login = "",
    reason: Annotated[str, typer.Option(help="Needed where there are findings.")] = "",
) -> None:
    """Approve a runbook whose findings you have seen (`show`). The cycle goes on by itself once the quota is met.

    Example:

        rsi review approve 5f2a --as ada --reason "the name stands in the instruction"
    """
    from stages.domain import Decision

    _decide(runbook_id, login, Decision.APPROVE, reason)


@app.command()
def reject(
    runbook_id: RunbookId,
    login: Login = "",
    reason: Annotated[str, typer.Option(help="Why, in words.")] = "",
    number: Annotated[int | None, typer.Option(help="Reason 1 to 9, as on the page.", min=1, max=9)] = None,
) -> None:
    """Reject a runbook.

    Example:

        rsi review reject 5f2a --as ada --reason "copies the answer"
    """
    from stages.domain import Decision

    _decide(runbook_id, login, Decision.REJECT, reason, number)


@app.command()
def undo(runbook_id: RunbookId, login: Login = "") -> None:
    """Take your verdict back, until the replay phase begins.

    Example:

        rsi review undo 5f2a --as ada
    """
    from orchestrator import reviewing

    with terminal.opened_store() as store:
        login = _reviewer(store, login)
        whole = _whole(store, runbook_id, login)
        _tell(whole, reviewing.undo(store, whole, login))


@app.command()
def claim(runbook_id: RunbookId, login: Login = "") -> None:
    """Keep others out for 30 minutes.

    Example:

        rsi review claim 5f2a --as ada
    """
    from orchestrator import reviewing

    with terminal.opened_store() as store:
        login = _reviewer(store, login)
        whole = _whole(store, runbook_id, login)
        until = reviewing.claim(store, whole, login)
    terminal.console().print(f"Runbook {whole} is yours until {until:%H:%M} UTC.")


@app.command()
def release(runbook_id: RunbookId, login: Login = "") -> None:
    """End your claim.

    Example:

        rsi review release 5f2a --as ada
    """
    from orchestrator import reviewing

    with terminal.opened_store() as store:
        login = _reviewer(store, login)
        whole = _whole(store, runbook_id, login)
        reviewing.release(store, whole, login)
    terminal.console().print(f"Runbook {whole} is free.")


@app.command()
def revise(
    runbook_id: RunbookId,
    login: Login = "",
    file: Annotated[
        Path | None,
        typer.Option(help="The new lines, `[turn 2, 3]` behind each; without it they are printed to be edited."),
    ] = None,
) -> None:
    """Store an edited runbook as a new revision, which the rules check at once and somebody else decides on.

    Example:

        rsi review revise 5f2a --as ada > lines.txt

        rsi review revise 5f2a --as ada --file lines.txt
    """
    from orchestrator import revising
    from stages.errors import ConfigError

    out = terminal.console()
    with terminal.opened_store() as store:
        login = _reviewer(store, login)
        whole = _whole(store, runbook_id, login)
        row = store.runbooks.get(whole)
        if file is None:
            typer.echo(revising.as_text(row.lines))
            return
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        rules = revising.revise(
            store, whole, login, revising.from_text(text), revision=row.revision, settings=terminal.settings()
        )
    out.print(
        f"Runbook {whole}, revision {row.revision + 1}: the rules {rules.decision} it. {rules.reason}", markup=False
    )


@app.command()
def statistics() -> None:
    """Agreement, turnaround, verdicts and known-leak hits of each reviewer.

    Example:

        rsi review statistics
    """
    from orchestrator.review_statistics import review_statistics

    numbers = ("approved", "rejected", "taken back", "agrees", "known leaks found", "median wait")
    table = terminal.table("person", *numbers, right=numbers)
    with terminal.opened_store() as store:
        found = review_statistics(store)
    for p in found.reviewers:
        wait = "—" if p.turnaround_s is None else f"{p.turnaround_s / 60:.1f} min"
        table.add_row(
            p.login,
            str(p.approved),
            str(p.rejected),
            str(p.withdrawn),
            f"{p.agreed}/{p.pairs}" if p.pairs else "—",
            f"{p.leaks_found}/{p.leaks}" if p.leaks else "—",
            wait,
        )
    terminal.console().print(table if found.reviewers else "Nobody has decided on a runbook yet.")


def _decide(runbook_id: str, login: str, decision: Decision, reason: str, number: int | None = None) -> None:
    from orchestrator import reviewing

    with terminal.opened_store() as store:
        login = _reviewer(store, login)
        whole = _whole(store, runbook_id, login)
        outcome = reviewing.decide(
            store, whole, login, decision, reason=reason, number=number, settings=terminal.settings()
        )
    _tell(whole, outcome)


def _tell(runbook_id: str, outcome: Outcome) -> None:
    out = terminal.console()
    if outcome.planted is not None:
        out.print(f"Runbook {runbook_id} was a known leak: {outcome.planted.truth}. No gate counts it.", markup=False)
    elif outcome.state is not None:
        then = f"{outcome.waiting} still wait" if outcome.open else "the quota is met, the cycle goes on"
        out.print(f"Runbook {runbook_id}: {outcome.state.status} ({outcome.state.reason}); {then}.", markup=False)


def _reviewer(store: Store, login: str) -> str:
    from orchestrator.models import Role

    return terminal.acting(store, login, Role.REVIEWER).login


def _viewer(store: Store, login: str) -> str:
    """Who looks; nobody ("") where no name was given and $USER has no account."""
    if terminal.unnamed(login) and terminal.account(store, login) is None:
        return ""
    return terminal.acting(store, login).login


def _whole(store: Store, start: str, login: str) -> str:
    """The id that begins so, among all that is or was in the queue."""
    from orchestrator.store.review_queue import QueueFilter
    from stages.errors import ConfigError

    if len(start) == ID_DIGITS:
        return start
    rows = store.review_queue.rows(QueueFilter(state="all"), login, decider=True, needs={}, limit=5000)
    found = {row.id for row in rows if row.id.startswith(start)}
    if len(found) != 1:
        raise ConfigError(f"{len(found)} runbooks begin with {start!r}; `rsi review list` shows their ids")
    return found.pop()
