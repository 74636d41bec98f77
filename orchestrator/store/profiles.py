"""Family scales, frozen for a phase."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Repository
from stages import domain
from stages.domain import Phase


class Profiles(Repository):
    def save(self, stage_id: int, phase: Phase, scales: Sequence[domain.FamilyScale]) -> int:
        """Store the scales of a phase; the same phase again replaces them. Returns the profile's id."""
        query = pg.insert(m.Profile).values(stage_id=stage_id, phase=phase, attempts=sum(s.attempts for s in scales))
        query = query.on_conflict_do_update(
            index_elements=["stage_id", "phase"], set_={"attempts": query.excluded.attempts}
        )
        with self._session() as session:
            profile_id = session.execute(query.returning(col(m.Profile.id))).scalar_one()
            assert profile_id is not None
            session.execute(delete(m.FamilyScale).where(col(m.FamilyScale.profile_id) == profile_id))
            rows = [
                {
                    "profile_id": profile_id,
                    "family": s.family,
                    "value": s.value,
                    "attempts": s.attempts,
                    "multiplier": s.multiplier,
                    "floored": s.floored,
                }
                for s in scales
            ]
            if rows:
                session.execute(insert(m.FamilyScale), rows)
            return profile_id

    def load(self, stage_id: int, phase: Phase | None = None) -> tuple[domain.FamilyScale, ...]:
        """The scales of a phase (default: the stage's newest profile) in order of family; empty when there are none."""
        newest = (
            select(col(m.Profile.id))
            .where(col(m.Profile.stage_id) == stage_id)
            .order_by(col(m.Profile.id).desc())
            .limit(1)
        )
        if phase is not None:
            newest = newest.where(col(m.Profile.phase) == phase)
        query = select(m.FamilyScale).where(col(m.FamilyScale.profile_id) == newest.scalar_subquery())
        with self._session() as session:
            return tuple(
                domain.FamilyScale(
                    family=row.family,
                    value=row.value,
                    attempts=row.attempts,
                    multiplier=row.multiplier,
                    floored=row.floored,
                )
                for row in session.execute(query.order_by(col(m.FamilyScale.family))).scalars()
            )

    def of_stage(self, stage_id: int) -> Sequence[m.Profile]:
        query = select(m.Profile).where(col(m.Profile.stage_id) == stage_id).order_by(col(m.Profile.id))
        with self._session() as session:
            return session.execute(query).scalars().all()
