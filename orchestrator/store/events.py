"""Events: append-only facts whose ids are SSE ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, select, text
from sqlmodel import Session, col

from orchestrator import models as m
from orchestrator.store.base import Repository
from orchestrator.store.notices import tell

CHANNEL = "rsi_event"  # LISTEN name; the payload is the newest id
LOCK = 0x52534902
_PENDING = "rsi_pending_events"


class Events(Repository):
    def append(
        self,
        kind: m.EventKind,
        *,
        cycle_id: int | None = None,
        stage_id: int | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Written when the outermost transaction ends, with its rows or not at all."""
        with self._session() as session:
            row = {"kind": kind.value, "cycle_id": cycle_id, "stage_id": stage_id, "payload": dict(payload or {})}
            session.info.setdefault(_PENDING, []).append(row)

    def after(self, last_id: int, *, cycle_id: int | None = None, limit: int = 500) -> Sequence[m.Event]:
        """Events with an id above `last_id`, oldest first. `cycle_id` keeps one cycle's."""
        query = select(m.Event).where(col(m.Event.id) > last_id).order_by(col(m.Event.id)).limit(limit)
        if cycle_id is not None:
            query = query.where(col(m.Event.cycle_id) == cycle_id)
        with self._session() as session:
            return session.execute(query).scalars().all()

    def latest(self, *, cycle_id: int | None = None, limit: int = 50) -> Sequence[m.Event]:
        """The newest events, newest first."""
        query = select(m.Event).order_by(col(m.Event.id).desc()).limit(limit)
        if cycle_id is not None:
            query = query.where(col(m.Event.cycle_id) == cycle_id)
        with self._session() as session:
            return session.execute(query).scalars().all()

    def last_id(self) -> int:
        """The newest id, 0 when there is none. A new subscriber starts here."""
        with self._session() as session:
            return session.execute(select(func.coalesce(func.max(col(m.Event.id)), 0))).scalar_one()


def write_pending(session: Session) -> None:
    """Write the events of a transaction that is about to commit.

    The lock is held until the commit, which follows at once: ids are given out and become visible in the same order.
    """
    if rows := session.info.pop(_PENDING, None):
        session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        query = insert(m.Event).values(rows).returning(col(m.Event.id))  # one statement: one signal
        ids = sorted(session.execute(query).scalars().all())  # given out in the order of the rows
        tell(session, zip(ids, rows, strict=True))
