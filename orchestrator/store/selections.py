"""Selections: which candidate was kept, and on what."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Repository
from stages.domain import Phase


class Selections(Repository):
    def save(self, selection: m.Selection) -> None:
        """Store it; one of the same stage and phase is replaced."""
        values = selection.model_dump(exclude={"id", "created_at"})
        query = insert(m.Selection).values(values)
        replaced = {name: query.excluded[name] for name in values if name not in ("stage_id", "phase")}
        with self._session() as session:
            session.execute(query.on_conflict_do_update(index_elements=["stage_id", "phase"], set_=replaced))

    def get(self, stage_id: int, phase: Phase) -> m.Selection | None:
        query = select(m.Selection).where(col(m.Selection.stage_id) == stage_id, col(m.Selection.phase) == phase)
        with self._session() as session:
            return session.execute(query.execution_options(populate_existing=True)).scalars().first()

    def of_cycle(self, cycle_id: int) -> Sequence[m.Selection]:
        query = (
            select(m.Selection)
            .join(m.Stage, col(m.Stage.id) == col(m.Selection.stage_id))
            .where(col(m.Stage.cycle_id) == cycle_id)
            .order_by(col(m.Selection.id))
        )
        with self._session() as session:
            return session.execute(query).scalars().all()
