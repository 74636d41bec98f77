"""Checkpoints: rows only. What their parents prove is in `orchestrator.lineage`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from stages.errors import StoreError

REPLACED = (
    "stage_id",
    "step",
    "path",
    "actor_digest",
    "critic_digest",
    "actor_parent_id",
    "critic_parent_id",
    "retained",
    "parent_kept",
    "metrics",
    "manifest_digest",
)

# Both parents of every row found so far, until none is new. UNION, not UNION ALL: a row is visited once.
ANCESTORS = text(
    """
    WITH RECURSIVE line AS (
      SELECT id, actor_parent_id, critic_parent_id FROM checkpoint WHERE id = ANY(:ids)
      UNION
      SELECT c.id, c.actor_parent_id, c.critic_parent_id
      FROM checkpoint c JOIN line l ON c.id IN (l.actor_parent_id, l.critic_parent_id)
    )
    SELECT id FROM line
    """
)


class Checkpoints(Repository):
    def save(self, checkpoint: m.Checkpoint) -> m.Checkpoint:
        """Store a checkpoint; one of the same cycle, arm and name is replaced and keeps its id."""
        values = checkpoint.model_dump(exclude={"id", "created_at"})
        query = insert(m.Checkpoint).values(values)
        query = query.on_conflict_do_update(
            index_elements=["cycle_id", "arm", "name"], set_={name: query.excluded[name] for name in REPLACED}
        )
        with self._session() as session:
            return (
                session.execute(query.returning(m.Checkpoint), execution_options={"populate_existing": True})
                .scalars()
                .one()
            )

    def get(self, checkpoint_id: int) -> m.Checkpoint:
        """Raises StoreError when there is none."""
        with self._session() as session:
            if (found := session.get(m.Checkpoint, checkpoint_id)) is None:
                raise StoreError(
                    f"There is no checkpoint {checkpoint_id}. `rsi checkpoint list` shows those that exist."
                )
            return found

    def many(self, ids: Sequence[int]) -> dict[int, m.Checkpoint]:
        with self._session() as session:
            rows = session.execute(select(m.Checkpoint).where(col(m.Checkpoint.id).in_(ids))).scalars()
            return {row.id: row for row in rows if row.id is not None}

    def named(self, cycle_id: int | None, name: str, arm: str = "main") -> m.Checkpoint | None:
        query = select(m.Checkpoint).where(
            col(m.Checkpoint.cycle_id) == cycle_id, col(m.Checkpoint.arm) == arm, col(m.Checkpoint.name) == name
        )
        with self._session() as session:
            return session.execute(query).scalars().first()

    def of_cycle(self, cycle_id: int, *, candidates: bool = False) -> Sequence[m.Checkpoint]:
        """Checkpoints of a cycle in order; `candidates` adds those of single steps."""
        query = select(m.Checkpoint).where(col(m.Checkpoint.cycle_id) == cycle_id).order_by(col(m.Checkpoint.id))
        if not candidates:
            query = query.where(or_(col(m.Checkpoint.step).is_(None), col(m.Checkpoint.retained)))
        with self._session() as session:
            return session.execute(query).scalars().all()

    def list(
        self,
        *,
        cycle_id: int | None = None,
        retained: bool | None = None,
        text: str = "",
        before: int | None = None,
        limit: int = 50,
    ) -> Page[m.Checkpoint]:
        """Newest first."""
        query = select(m.Checkpoint).order_by(col(m.Checkpoint.id).desc()).limit(limit + 1)
        if cycle_id is not None:
            query = query.where(col(m.Checkpoint.cycle_id) == cycle_id)
        if retained is not None:
            query = query.where(col(m.Checkpoint.retained).is_(retained))
        if text:
            query = query.where(col(m.Checkpoint.name).icontains(text, autoescape=True))
        if before is not None:
            query = query.where(col(m.Checkpoint.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")

    def with_digest(self, digest: str) -> Sequence[m.Checkpoint]:
        """Checkpoints whose actor or critic has these bytes; a prefix of at least 8 digits will do."""
        if len(digest) < 8 or not digest.isalnum():
            raise StoreError(f"{digest!r} is no digest; give at least 8 of its digits.")
        near = or_(
            col(m.Checkpoint.actor_digest).startswith(digest), col(m.Checkpoint.critic_digest).startswith(digest)
        )
        with self._session() as session:
            return session.execute(select(m.Checkpoint).where(near).order_by(col(m.Checkpoint.id))).scalars().all()

    def retain(self, checkpoint_id: int) -> None:
        """This one is kept; its rivals of the same stage are not."""
        row = self.get(checkpoint_id)
        with self._session() as session:
            rivals = update(m.Checkpoint).where(
                col(m.Checkpoint.stage_id) == row.stage_id, col(m.Checkpoint.arm) == row.arm
            )
            session.execute(rivals.values(retained=col(m.Checkpoint.id) == checkpoint_id))

    def forget_folder(self, stage_id: int, folder: Path) -> None:
        """Checkpoints of a stage whose folders lay below `folder` have none any more: their path becomes empty."""
        with self._session() as session:
            inside = col(m.Checkpoint.path).startswith(f"{folder}/", autoescape=True)
            gone = update(m.Checkpoint).where(col(m.Checkpoint.stage_id) == stage_id, inside)
            session.execute(gone.values(path=""))

    def add_metrics(self, checkpoint_id: int, metrics: dict[str, float | int | str | None]) -> None:
        """Merge into the checkpoint's metrics."""
        with self._session() as session:
            change = update(m.Checkpoint).where(col(m.Checkpoint.id) == checkpoint_id)
            session.execute(change.values(metrics=col(m.Checkpoint.metrics).op("||")(metrics)))

    def line(self, ids: Sequence[int]) -> dict[int, m.Checkpoint]:
        """The given checkpoints and every ancestor through either parent."""
        with self._session() as session:
            found = session.execute(ANCESTORS, {"ids": list(ids)}).scalars().all()
        return self.many(found)

    def children(self, checkpoint_id: int) -> Sequence[m.Checkpoint]:
        parents = or_(
            col(m.Checkpoint.actor_parent_id) == checkpoint_id, col(m.Checkpoint.critic_parent_id) == checkpoint_id
        )
        with self._session() as session:
            return session.execute(select(m.Checkpoint).where(parents).order_by(col(m.Checkpoint.id))).scalars().all()
