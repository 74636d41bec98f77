"""Alembic environment. `orchestrator.store.schema` runs it with a connection; nothing else does."""

from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from sqlalchemy.dialects.postgresql import JSONB
from sqlmodel.sql.sqltypes import AutoString

from orchestrator.models import metadata


def render(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Write plain types into a new version, so that an old version never depends on what the code says today."""
    if kind == "type" and isinstance(item, AutoString):
        return "sa.String()"
    if kind == "type" and isinstance(item, sa.Enum):
        return f"sa.String({item.length})"
    if kind == "type" and isinstance(item, JSONB):
        return "postgresql.JSONB()"
    return False


def run() -> None:
    connection = context.config.attributes["connection"]
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        render_item=render,
        compare_server_default=False,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
