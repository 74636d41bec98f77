"""Brings a database to the current schema with Alembic, from Python.

People write a new version with `python -m orchestrator.store.schema "what changed"` on a database that is up to date.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from orchestrator.models import metadata
from orchestrator.store.connection import connect
from stages.errors import StoreError

LOCK = 0x52534901  # advisory lock: two starters do not migrate at once


def upgrade(url: str, revision: str = "head") -> None:
    """Apply every missing migration. Safe to call at each start and from several processes.

    Raises:
        StoreError: the database cannot be reached, or was written by a newer version of this program.
    """
    _with_connection(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str = "base") -> None:
    """Undo migrations down to `revision`. Loses data."""
    _with_connection(url, lambda config: command.downgrade(config, revision))


def current(url: str) -> str | None:
    """The revision of a database, None if it is empty."""
    engine = connect(url)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def head() -> str | None:
    """The newest revision in this program."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def differences(engine: Engine) -> list[Any]:
    """What Alembic would still change to reach the models; empty when migrations and models agree."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))


def _config(connection: Connection | None = None) -> Config:
    spec = find_spec("migrations")
    if spec is None or spec.origin is None:
        raise StoreError("The package `migrations` is missing from this installation. Install terminal-rsi again.")
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _with_connection(url: str, action: Any) -> None:
    engine = connect(url)
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            action(_config(connection))
    except OperationalError as error:
        raise StoreError(f"The database cannot be reached: {error.orig}. Is it running? `rsi status` shows.") from error
    except CommandError as error:
        raise StoreError(
            f"The database cannot be migrated: {error}. It was probably written by a newer version; install that one."
        ) from error
    finally:
        engine.dispose()


def _revise(url: str, message: str, revision_id: str | None = None) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        command.revision(_config(connection), message, autogenerate=True, rev_id=revision_id)
    engine.dispose()


if __name__ == "__main__":
    from orchestrator.settings import get_settings

    database = get_settings().database_url
    if database is None or len(sys.argv) != 2:
        raise SystemExit('Usage: DATABASE_URL=postgresql://… python -m orchestrator.store.schema "what changed"')
    _revise(database, sys.argv[1])
