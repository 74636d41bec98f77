"""What commands share: the settings and the store they work on, and how numbers look."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.models import Role, User
    from orchestrator.settings import Settings
    from orchestrator.store.facade import Store

MISSING = "—"  # never 0


def console() -> Console:
    """Standard output; plain text when it is no terminal. Markup is off: names may hold brackets."""
    made = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 240  # a table in a pipe or a file is not folded
    return made


def plain(text: str) -> str:
    """What a sandbox or a file name says, without what a terminal would obey or UTF-8 cannot hold."""
    kept = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text.replace("\r\n", "\n"))
    return kept.encode("utf-8", "backslashreplace").decode()


def settings() -> "Settings":
    """This process's settings, with the ports of what is running. Raises ConfigError for a bad variable."""
    from pydantic import ValidationError

    from orchestrator.embedded.control import running_settings
    from orchestrator.settings import Settings
    from stages.errors import ConfigError

    try:
        return running_settings(Settings())
    except ValidationError as error:
        first = error.errors()[0]
        name = "RSI_" + "_".join(str(part) for part in first["loc"]).upper().removeprefix("RSI_")
        raise ConfigError(f"The variable {name} cannot be used: {first['msg']} (it is {first['input']!r}).") from error


@contextmanager
def opened_store() -> "Iterator[Store]":
    """The store of a running installation. Raises ServiceError when nothing runs."""
    from orchestrator.embedded import database
    from orchestrator.store.facade import Store

    here = settings()
    store = Store.open(database.url(here), here.artifacts, pool_size=2)
    try:
        yield store
    finally:
        store.close()


def unnamed(login: str) -> bool:
    """True when `--as` says no more than who is at this machine."""
    return login in ("", os.environ.get("USER"))


def account(store: "Store", login: str) -> "User | None":
    """The account of `--as`; for who is at this machine and has none, the account `local` of the embedded default."""
    from orchestrator.accounts import LOCAL

    return store.users.named(login) or (store.users.named(LOCAL) if unnamed(login) else None)


def acting(store: "Store", login: str, role: "Role | None" = None) -> "User":
    """The person of `--as`. Raises ConfigError for nobody, somebody disabled, or somebody without the role."""
    from orchestrator.accounts import LOCAL
    from stages.errors import ConfigError

    if (user := account(store, login)) is None:
        raise ConfigError(f"{login or LOCAL} is no person here. `rsi users list` shows everybody; `--as` names one.")
    if user.disabled_at:
        raise ConfigError(f"{user.login} is disabled. `rsi users enable {user.login}` lets them in again.")
    if role is not None and role not in user.roles:
        raise ConfigError(f"{user.login} is no {role}. `rsi users list` shows who is; `--as` names one.")
    return user


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table; columns named in `right` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def duration(seconds: float | None) -> str:
    """`2 h 14 m`, `3 m 05 s`, `4 s`."""
    if seconds is None:
        return MISSING
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    if whole >= 60:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole} s"


def age(moment: datetime | float | None) -> str:
    """Time since a moment (a datetime, or Unix time in s)."""
    if not moment:
        return MISSING
    if isinstance(moment, datetime):
        return duration((datetime.now(UTC) - moment).total_seconds())
    return duration(time.time() - moment)


def megabytes(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f} MB"


def short(digest: str | None) -> str:
    """The first 12 characters of a digest."""
    return digest[:12] if digest else MISSING
