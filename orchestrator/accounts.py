"""People of this installation: the account that a laptop gets by itself, and links that sign somebody in once."""

from __future__ import annotations

from orchestrator import models as m
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.accounts import LINK_MINUTES
from stages.errors import ConfigError

LOCAL = "local"


def link_for(store: Store, login: str, *, settings: Settings, actor: str) -> str:
    """The address that signs `login` in once, within 15 minutes. The link is written to nobody's log.

    Raises ConfigError for an unknown or disabled person.
    """
    user = store.users.named(login)
    if user is None or user.disabled_at is not None:
        what = "is no person here" if user is None else "is disabled"
        raise ConfigError(f"{login} {what}. `rsi users list --disabled` shows everybody; `rsi users add` adds one.")
    with store.transaction():
        secret = store.sign_in_links.make(user.id or 0)
        store.audit_trail.add(actor, "user.link", object_kind="user", object_id=login)
    return f"{settings.console_public}/sign-in/link?key={secret}"


def local_link(store: Store, settings: Settings) -> str:
    """A link for the account `local`, which the embedded default makes on first use, with all roles.

    Empty where people have accounts of their own: with another database, or when `local` is disabled.
    """
    if not settings.embedded_database:
        return ""
    user = store.users.named(LOCAL)
    if user is None:
        with store.transaction():
            user = store.users.add(LOCAL, list(m.Role), name="This machine")
            store.audit_trail.add("cli", "user.add", object_kind="user", object_id=LOCAL, payload={"roles": user.roles})
    return "" if user.disabled_at else link_for(store, LOCAL, settings=settings, actor="cli")


def sign_in_hint(store: Store, settings: Settings) -> str:
    """The line about signing in that follows the console's address."""
    if link := local_link(store, settings):
        return f"Sign in (once, within {LINK_MINUTES} minutes): {link}"
    return f"Sign in: {settings.console_public}/sign-in (`rsi users link LOGIN` prints a link for somebody)"
