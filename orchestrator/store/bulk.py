"""Many rows at once: COPY inside the session's transaction."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from psycopg import sql
from sqlalchemy import JSON
from sqlmodel import Session, SQLModel

from orchestrator.store.connection import dumps


def copy_rows(session: Session, table: type[SQLModel], rows: Iterable[dict[str, Any]]) -> int:
    """COPY `rows`, which all have the same keys, into `table`; other columns get their defaults. Returns how many."""
    rows = iter(rows)
    if (first := next(rows, None)) is None:
        return 0
    held = table.__table__.columns  # type: ignore[attr-defined]
    json = {name for name in first if isinstance(held[name].type, JSON)}
    raw = session.connection().connection.driver_connection
    assert raw is not None
    command = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier(table.__table__.name),  # type: ignore[attr-defined]
        sql.SQL(", ").join(map(sql.Identifier, first)),
    )
    count = 0
    with raw.cursor() as cursor, cursor.copy(command) as copy:
        for row in chain([first], rows):
            copy.write_row([dumps(value) if name in json else value for name, value in row.items()])
            count += 1
    return count
