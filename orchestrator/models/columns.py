"""Column types that every table shares."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import SQLModel

SQLModel.metadata.naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

JSONB = pg.JSONB(none_as_null=True)
Timestamp = sa.DateTime(timezone=True)


def words(enum: type[StrEnum]) -> sa.Enum:
    """A text column of 32 characters that reads and writes `enum`. Not a Postgres type: adding a word is no migration."""
    return sa.Enum(
        enum, native_enum=False, create_constraint=False, length=32, values_callable=lambda e: [m.value for m in e]
    )


def now() -> datetime:
    return datetime.now(UTC)


def created() -> dict[str, Any]:
    """`sa_column_kwargs` of a creation time, so that rows written by COPY have one too."""
    return {"server_default": sa.func.clock_timestamp()}
