"""Cycles and arms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Page, Repository, page
from stages.errors import StoreError

STATE_TIMES = {
    m.CycleState.RUNNING: "started_at",
    m.CycleState.DONE: "finished_at",
    m.CycleState.CANCELLED: "finished_at",
    m.CycleState.FAILED: "finished_at",
}


class Cycles(Repository):
    def create(self, cycle: m.Cycle) -> m.Cycle:
        """Store a new cycle; its id is set."""
        with self._session() as session:
            session.add(cycle)
            session.flush()
            self._store.events.append(m.EventKind.CYCLE_CREATED, cycle_id=cycle.id, payload={"name": cycle.name})
        return cycle

    def get(self, cycle_id: int) -> m.Cycle:
        """Raises StoreError when there is none."""
        with self._session() as session:
            if (cycle := session.get(m.Cycle, cycle_id, populate_existing=True)) is None:
                raise StoreError(f"There is no cycle {cycle_id}. `rsi cycle list` shows those that exist.")
            return cycle

    def lock(self, cycle_id: int) -> m.Cycle:
        """As `get`, and nobody else changes it until the transaction ends."""
        with self._session() as session:
            query = select(m.Cycle).where(col(m.Cycle.id) == cycle_id).with_for_update()
            cycle = session.execute(query.execution_options(populate_existing=True)).scalars().first()
            if cycle is None:
                raise StoreError(f"There is no cycle {cycle_id}. `rsi cycle list` shows those that exist.")
            return cycle

    def list(
        self,
        *,
        states: Sequence[m.CycleState] = (),
        recipe: str = "",
        text: str = "",
        before: int | None = None,
        limit: int = 50,
    ) -> Page[m.Cycle]:
        """Newest first. `text` is part of a name."""
        query = select(m.Cycle).order_by(col(m.Cycle.id).desc()).limit(limit + 1)
        if states:
            query = query.where(col(m.Cycle.state).in_(states))
        if recipe:
            query = query.where(col(m.Cycle.recipe) == recipe)
        if text:
            query = query.where(col(m.Cycle.name).icontains(text, autoescape=True))
        if before is not None:
            query = query.where(col(m.Cycle.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")

    def set_state(
        self,
        cycle_id: int,
        state: m.CycleState,
        *,
        desired: m.DesiredState | None = None,
        error: str | None = None,
    ) -> None:
        """Write a state that `orchestrator.transitions` has allowed. Nobody else calls this."""
        values: dict[str, Any] = {"state": state}
        if desired is not None:
            values["desired_state"] = desired
        if error is not None:
            values["error"] = error
        if field := STATE_TIMES.get(state):
            # The first start counts; the last end counts.
            values[field] = now() if field == "finished_at" else func.coalesce(col(m.Cycle.started_at), now())
        if state in (m.CycleState.RUNNING, m.CycleState.RESUMING):
            values["finished_at"] = None
        with self._session() as session:
            session.execute(update(m.Cycle).where(col(m.Cycle.id) == cycle_id).values(values))
            self._store.events.append(
                m.EventKind.CYCLE_STATE, cycle_id=cycle_id, payload={"state": state, "error": error or ""}
            )

    def desired(self, cycle_id: int) -> m.DesiredState:
        """What people want now; the flow asks at every safe boundary."""
        with self._session() as session:
            wanted = session.execute(select(col(m.Cycle.desired_state)).where(col(m.Cycle.id) == cycle_id)).scalar()
        if wanted is None:
            raise StoreError(f"There is no cycle {cycle_id}.")
        return m.DesiredState(wanted)

    def beat(self, cycle_id: int, flow_run_id: str | None = None) -> None:
        """The flow process is alive."""
        values: dict[str, Any] = {"heartbeat_at": now()}
        if flow_run_id is not None:
            values["flow_run_id"] = flow_run_id
        with self._session() as session:
            session.execute(update(m.Cycle).where(col(m.Cycle.id) == cycle_id).values(values))

    def void_digest_claim(self, cycle_id: int, reason: str) -> None:
        """A wall-clock limit fired: equal digests are no longer promised. The first reason stays."""
        with self._session() as session:
            session.execute(
                update(m.Cycle)
                .where(col(m.Cycle.id) == cycle_id, col(m.Cycle.digest_claim_void) == "")
                .values(digest_claim_void=reason)
            )

    # ----------------------------------------------------------------- arms

    def add_arm(self, arm: m.Arm) -> m.Arm:
        """Store an arm; one of the same name in the cycle is replaced."""
        values = arm.model_dump(exclude={"id", "created_at"})
        with self._session() as session:
            query = insert(m.Arm).values(values)
            keep = ("from_stage", "overrides", "retained")
            query = query.on_conflict_do_update(
                index_elements=["cycle_id", "name"], set_={name: query.excluded[name] for name in keep}
            )
            return session.execute(query.returning(m.Arm)).scalars().one()

    def arms(self, cycle_id: int) -> Sequence[m.Arm]:
        with self._session() as session:
            query = select(m.Arm).where(col(m.Arm.cycle_id) == cycle_id).order_by(col(m.Arm.id))
            return session.execute(query).scalars().all()
