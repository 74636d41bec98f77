"""`rsi inbox`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands import terminal


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Work")(inbox)


def inbox(
    login: Annotated[
        str, typer.Option("--as", help="Whose inbox.", envvar="USER", show_default="$USER, or local")
    ] = "",
    all_: Annotated[bool, typer.Option("--all", help="Also what was read.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Mark what is shown as read.")] = False,
) -> None:
    """Show what somebody was told: gates that opened, cycles that are done or failed, alarms. Newest first.

    Example:

        rsi inbox --as ada --read
    """
    rows = terminal.table("", "age", "cycle", "notice")
    with terminal.opened_store() as store:
        user_id = terminal.acting(store, login).id or 0
        found = store.notices.inbox(user_id, unread=not all_).items
        for entry in found:
            mark = "read" if entry.read_at else "new"
            rows.add_row(
                mark,
                terminal.age(entry.notice.created_at),
                str(entry.notice.cycle_id or terminal.MISSING),
                terminal.plain(entry.notice.text),
            )
        if read:
            store.notices.mark_read(user_id, [entry.id for entry in found])
    terminal.console().print(rows if found else "Nothing new." if not all_ else "Nothing yet.")
