"""`rsi users add | list`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands import terminal

app = typer.Typer(
    name="users", help="People who may sign in to the console.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.command()
def add(
    login: Annotated[str, typer.Argument(help="Letters, digits, '.', '-' and '_'.", show_default=False)],
    role: Annotated[
        list[str] | None, typer.Option("--role", help="lead, reviewer, analyst or admin; may be given several times.")
    ] = None,
    name: Annotated[str, typer.Option(help="Full name.")] = "",
    email: Annotated[str, typer.Option(help="E-mail address.")] = "",
) -> None:
    """Add a person. The password is asked for, or read from standard input when that is no terminal.

    Examples:

        rsi users add ada --role lead --role reviewer

        echo "$PASSWORD" | rsi users add ci --role analyst
    """
    from orchestrator.models import Role
    from orchestrator.passwords import hash_password
    from stages.errors import ConfigError

    try:
        roles = [Role(word) for word in role or [Role.ANALYST.value]]
    except ValueError as error:
        raise ConfigError(f"{error}. Choose among {', '.join(Role)}.") from None
    with terminal.opened_store() as store:
        user = store.users.add(login, roles, name=name, email=email, password_hash=hash_password(_password()))
        store.audit_trail.add("cli", "user.add", object_kind="user", object_id=login)
    terminal.console().print(f"Added {user.login} ({', '.join(user.roles)}).")


@app.command("list")
def list_(disabled: Annotated[bool, typer.Option("--disabled", help="Also disabled ones.")] = False) -> None:
    """List people and their roles.

    Example:

        rsi users list
    """
    with terminal.opened_store() as store:
        found = store.users.list(disabled=disabled)
    rows = terminal.table("Login", "Name", "Roles", "E-mail", "Disabled")
    for user in found:
        rows.add_row(user.login, user.name, ", ".join(user.roles), user.email, "yes" if user.disabled_at else "")
    terminal.console().print(rows if found else "Nobody yet. `rsi users add` adds the first person.")


def _password() -> str:
    import sys

    from stages.errors import ConfigError

    if sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True))
    if not (given := sys.stdin.readline().rstrip("\n")):
        raise ConfigError("No password on standard input. Run it on a terminal, or pipe the password in.")
    return given
