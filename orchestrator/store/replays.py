"""Replays: a_x(τ) of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from orchestrator.store.connection import clean_text
from stages.records import ReplayJudged


class Replays(Repository):
    def judge(self, records: Sequence[ReplayJudged], *, stage_id: int | None = None) -> None:
        """Store judgements; a repeated one replaces itself. Their trajectories must be stored first."""
        rows = [
            {
                "trajectory_id": record.trajectory_id,
                "stage_id": stage_id,
                "runbook_id": record.runbook_id,
                "accepted": record.accepted,
                "reason": clean_text(record.reason),
                "arm": record.arm,
                "created_at": now(),
            }
            for record in records
        ]
        if not rows:
            return
        query = insert(m.Replay)
        replaced = {name: query.excluded[name] for name in ("stage_id", "runbook_id", "accepted", "reason", "arm")}
        with self._session() as session:
            session.execute(query.on_conflict_do_update(index_elements=["trajectory_id"], set_=replaced), rows)

    def of_runbook(self, runbook_id: str) -> Sequence[m.Replay]:
        query = select(m.Replay).where(col(m.Replay.runbook_id) == runbook_id).order_by(col(m.Replay.created_at))
        with self._session() as session:
            return session.execute(query).scalars().all()

    def of_stage(self, stage_id: int) -> Sequence[m.Replay]:
        """In the order in which their trajectories were recorded."""
        query = (
            select(m.Replay)
            .join(m.Trajectory, col(m.Trajectory.id) == col(m.Replay.trajectory_id))
            .where(col(m.Replay.stage_id) == stage_id)
            .order_by(col(m.Trajectory.seq))
        )
        with self._session() as session:
            return session.execute(query).scalars().all()

    def accepted_ids(self, stage_id: int) -> set[str]:
        """Trajectories of Q_clean (spec §2.1): accepted, with their own runbook."""
        query = select(col(m.Replay.trajectory_id)).where(
            col(m.Replay.stage_id) == stage_id, col(m.Replay.accepted), col(m.Replay.arm) == "own"
        )
        with self._session() as session:
            return set(session.execute(query).scalars())

    def success(self, stage_id: int) -> Sequence[Any]:
        """(arm, replays, strict passes, accepted) of a stage: own, no and another task's runbook."""
        query = (
            select(
                col(m.Replay.arm),
                func.count(),
                func.sum(cast(col(m.Trajectory.strict), Integer)),
                func.sum(cast(col(m.Replay.accepted), Integer)),
            )
            .join(m.Trajectory, col(m.Trajectory.id) == col(m.Replay.trajectory_id))
            .where(col(m.Replay.stage_id) == stage_id)
            .group_by(col(m.Replay.arm))
            .order_by(col(m.Replay.arm))
        )
        with self._session() as session:
            return session.execute(query).all()
