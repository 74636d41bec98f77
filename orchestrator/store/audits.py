"""Reward audits and published reference rows."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from stages.errors import StoreError


class Audits(Repository):
    def add(self, audit: m.Audit) -> m.Audit:
        with self._session() as session:
            session.add(audit)
            session.flush()
        return audit

    def get(self, audit_id: int) -> m.Audit:
        with self._session() as session:
            if (found := session.get(m.Audit, audit_id)) is None:
                raise StoreError(f"There is no audit {audit_id}.")
            return found

    def list(self, *, cycle_id: int | None = None, before: int | None = None, limit: int = 50) -> Page[m.Audit]:
        """Newest first."""
        query = select(m.Audit).order_by(col(m.Audit.id).desc()).limit(limit + 1)
        if cycle_id is not None:
            query = query.where(col(m.Audit.cycle_id) == cycle_id)
        if before is not None:
            query = query.where(col(m.Audit.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")


class References(Repository):
    """Numbers of other papers and harnesses; shown, never ranked in."""

    def load(self, rows: Sequence[m.ReferenceRow]) -> None:
        """Store rows; one of the same source, label, suite and metric is replaced."""
        if not rows:
            return
        values = [row.model_dump(exclude={"id"}) for row in rows]
        query = insert(m.ReferenceRow)
        same = ("source", "label", "suite", "metric")
        replaced = {name: query.excluded[name] for name in values[0] if name not in same}
        with self._session() as session:
            session.execute(query.on_conflict_do_update(index_elements=same, set_=replaced), values)

    def list(self, *, suite: str | None = None) -> Sequence[m.ReferenceRow]:
        query = select(m.ReferenceRow).order_by(
            col(m.ReferenceRow.source), col(m.ReferenceRow.suite), col(m.ReferenceRow.id)
        )
        if suite is not None:
            query = query.where(col(m.ReferenceRow.suite) == suite)
        with self._session() as session:
            return session.execute(query).scalars().all()
