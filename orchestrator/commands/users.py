"""`rsi users add | list | roles | disable | enable | link`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal

if TYPE_CHECKING:
    from orchestrator.models import Role, User
    from orchestrator.store import Store

app = typer.Typer(
    name="users", help="People who may sign in to the console.", no_args_is_help=True, rich_markup_mode="markdown"
)
Login = Annotated[str, typer.Argument(show_default=False, help="Who, as in `rsi users list`.")]
Roles = Annotated[
    list[str] | None, typer.Option("--role", help="lead, reviewer, analyst or admin; may be given several times.")
]


@app.command()
def add(
    login: Annotated[str, typer.Argument(help="Letters, digits, '.', '-' and '_'.", show_default=False)],
    role: Roles = None,
    name: Annotated[str, typer.Option(help="Full name.")] = "",
    email: Annotated[str, typer.Option(help="E-mail address.")] = "",
    link: Annotated[bool, typer.Option("--link", help="No password: print a link that signs in once.")] = False,
) -> None:
    """Add a person. The password is asked for, or read from standard input when that is no terminal.

    Examples:

        rsi users add ada --role lead --role reviewer

        rsi users add ada --role lead --link

        echo "$PASSWORD" | rsi users add ci --role analyst
    """
    from orchestrator.accounts import link_for
    from orchestrator.passwords import hash_password
    from orchestrator.store.accounts import LINK_MINUTES

    roles = _roles(role or ["analyst"])
    hashed = None if link else hash_password(_password())
    with terminal.opened_store() as store:
        with store.transaction():
            user = store.users.add(login, roles, name=name, email=email, password_hash=hashed)
            _note(store, "user.add", login, roles=user.roles)
        terminal.console().print(f"Added {user.login} ({', '.join(user.roles)}).")
        if link:
            address = link_for(store, login, settings=terminal.settings(), actor="cli")
            terminal.console().print(f"Sign in (once, within {LINK_MINUTES} minutes): {address}")


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


@app.command()
def roles(login: Login, role: Roles = None) -> None:
    """Give a person exactly these roles; they hold from the next request on.

    Example:

        rsi users roles ada --role lead --role admin
    """
    wanted = _roles(role or [])
    with terminal.opened_store() as store, store.transaction():
        user = _person(store, login)
        store.users.set_roles(user.id or 0, wanted)
        _note(store, "user.roles", login, roles=sorted(wanted), before=user.roles)
    terminal.console().print(f"{login}: {', '.join(sorted(wanted)) or 'no role'}.")


@app.command()
def disable(login: Login) -> None:
    """Shut a person out, at once: sign-ins, links and API tokens stop working. Nothing they did is deleted.

    Example:

        rsi users disable ada
    """
    with terminal.opened_store() as store, store.transaction():
        user = _person(store, login)
        store.users.set_disabled(user.id or 0, True)
        ended = store.sign_ins.end_all(user.id or 0)
        _note(store, "user.disable", login)
    terminal.console().print(f"{login} is disabled; {ended} sign-in(s) ended.")


@app.command()
def enable(login: Login) -> None:
    """Let a disabled person in again; they sign in anew.

    Example:

        rsi users enable ada
    """
    with terminal.opened_store() as store, store.transaction():
        store.users.set_disabled(_person(store, login).id or 0, False)
        _note(store, "user.enable", login)
    terminal.console().print(f"{login} may sign in again.")


@app.command()
def link(
    login: Annotated[str, typer.Argument(show_default=False, help="Who; without it the account `local`.")] = "",
) -> None:
    """Print a link that signs a person in once, within 15 minutes: for a first sign-in, or a forgotten password.

    Examples:

        rsi users link

        rsi users link ada
    """
    from orchestrator.accounts import link_for, local_link
    from stages.errors import ConfigError

    here = terminal.settings()
    with terminal.opened_store() as store:
        address = link_for(store, login, settings=here, actor="cli") if login else local_link(store, here)
    if not address:
        raise ConfigError("There is no account `local` to sign in to here. Name a person: `rsi users link LOGIN`.")
    terminal.console().print(address)


def _roles(words: list[str]) -> list[Role]:
    from orchestrator.models import Role
    from stages.errors import ConfigError

    try:
        return [Role(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"{error}. Choose among {', '.join(Role)}.") from None


def _person(store: Store, login: str) -> User:
    from stages.errors import ConfigError

    if (user := store.users.named(login)) is None:
        raise ConfigError(f"There is no person {login}. `rsi users list --disabled` shows everybody.")
    return user


def _note(store: Store, action: str, login: str, **payload: object) -> None:
    store.audit_trail.add("cli", action, object_kind="user", object_id=login, payload=payload)


def _password() -> str:
    import sys

    from stages.errors import ConfigError

    if sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True))
    if not (given := sys.stdin.readline().rstrip("\n")):
        raise ConfigError("No password on standard input. Run it on a terminal, or pipe the password in.")
    return given
