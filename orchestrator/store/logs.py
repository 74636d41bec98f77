"""Log lines of flows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from orchestrator.store.connection import clean_text

WAITS = "rsi.waiting"  # logger of the lines that say what a cycle without a process waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    level: int
    text: str
    logger: str = ""
    stage_id: int | None = None
    created_at: datetime | None = None


class Logs(Repository):
    def append(self, cycle_id: int, lines: Sequence[NewLine]) -> None:
        """Add lines and one event for all of them."""
        if not lines:
            return
        rows = [
            {
                "cycle_id": cycle_id,
                "stage_id": line.stage_id,
                "level": line.level,
                "logger": line.logger,
                "text": clean_text(line.text),
                "created_at": line.created_at or now(),
            }
            for line in lines
        ]
        with self._session() as session:
            session.execute(insert(m.LogLine), rows)
            self._store.events.append(m.EventKind.LOG, cycle_id=cycle_id, payload={"lines": len(rows)})

    def read(
        self,
        cycle_id: int,
        *,
        stage_id: int | None = None,
        min_level: int = 0,
        text: str = "",
        after: int = 0,
        before: int | None = None,
        limit: int = 200,
    ) -> Sequence[m.LogLine]:
        """Lines in order of time: those after the id `after`; with `before`, or neither, the last ones. `text` is part of a line."""
        query = select(m.LogLine).where(col(m.LogLine.cycle_id) == cycle_id)
        if stage_id is not None:
            query = query.where(col(m.LogLine.stage_id) == stage_id)
        if min_level:
            query = query.where(col(m.LogLine.level) >= min_level)
        if text:
            query = query.where(col(m.LogLine.text).icontains(text, autoescape=True))
        if before is not None:
            query = query.where(col(m.LogLine.id) < before)
        with self._session() as session:
            if after:
                query = query.where(col(m.LogLine.id) > after).order_by(col(m.LogLine.id)).limit(limit)
                return session.execute(query).scalars().all()
            query = query.order_by(col(m.LogLine.id).desc()).limit(limit)
            return session.execute(query).scalars().all()[::-1]

    def newest(self, cycle_id: int, logger: str, *, since: datetime | None = None) -> str:
        """Text of the last line of one logger; empty: none."""
        query = select(m.LogLine).where(col(m.LogLine.cycle_id) == cycle_id, col(m.LogLine.logger) == logger)
        if since is not None:
            query = query.where(col(m.LogLine.created_at) >= since)
        with self._session() as session:
            found = session.execute(query.order_by(col(m.LogLine.id).desc()).limit(1)).scalars().first()
            return found.text if found else ""

    def first_error(self, cycle_id: int) -> m.LogLine | None:
        query = select(m.LogLine).where(col(m.LogLine.cycle_id) == cycle_id, col(m.LogLine.level) >= 40)
        with self._session() as session:
            return session.execute(query.order_by(col(m.LogLine.id)).limit(1)).scalars().first()

    def everything(self, cycle_id: int, *, batch: int = 2000) -> Iterator[m.LogLine]:
        """The whole log, for a download; one short transaction per batch."""
        after = 0
        while True:
            query = select(m.LogLine).where(col(m.LogLine.cycle_id) == cycle_id, col(m.LogLine.id) > after)
            with self._session() as session:
                rows = session.execute(query.order_by(col(m.LogLine.id)).limit(batch)).scalars().all()
            yield from rows
            if len(rows) < batch:
                return
            after = rows[-1].id or 0
