"""Stages and their phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from stages.domain import Phase
from stages.errors import StoreError

ENDED = (m.StageState.DONE, m.StageState.FAILED, m.StageState.CANCELLED, m.StageState.SKIPPED)


class Stages(Repository):
    def plan(self, cycle_id: int, stages: Sequence[m.Stage]) -> Sequence[m.Stage]:
        """Store the planned stages; one with the same index stays as it is. Returns all of the cycle, in order."""
        fields = ("index", "kind", "round", "arm", "name", "plan", "expected_s")
        rows = [{"cycle_id": cycle_id} | {name: getattr(stage, name) for name in fields} for stage in stages]
        with self._session() as session:
            if rows:
                defaults = {
                    "state": m.StageState.PENDING,
                    "progress_done": 0,
                    "progress_text": "",
                    "attempt": 0,
                    "error": "",
                }
                query = insert(m.Stage).on_conflict_do_nothing(index_elements=["cycle_id", "index"])
                session.execute(query, [defaults | row for row in rows])
            return self.of_cycle(cycle_id)

    def of_cycle(self, cycle_id: int) -> Sequence[m.Stage]:
        with self._session() as session:
            query = select(m.Stage).where(col(m.Stage.cycle_id) == cycle_id).order_by(col(m.Stage.index))
            return session.execute(query.execution_options(populate_existing=True)).scalars().all()

    def of_cycles(self, cycle_ids: Sequence[int]) -> dict[int, list[m.Stage]]:
        """Stages of many cycles in one query, for a list page."""
        found: dict[int, list[m.Stage]] = {cycle_id: [] for cycle_id in cycle_ids}
        with self._session() as session:
            query = select(m.Stage).where(col(m.Stage.cycle_id).in_(cycle_ids)).order_by(col(m.Stage.index))
            for stage in session.execute(query).scalars():
                found[stage.cycle_id].append(stage)
        return found

    def get(self, stage_id: int) -> m.Stage:
        with self._session() as session:
            if (stage := session.get(m.Stage, stage_id, populate_existing=True)) is None:
                raise StoreError(f"There is no stage {stage_id}.")
            return stage

    def named(self, cycle_id: int, name: str, arm: str = "main") -> m.Stage | None:
        """Names compare without case, so that `/stages/rpr-1` finds RPR-1."""
        query = select(m.Stage).where(
            col(m.Stage.cycle_id) == cycle_id, func.lower(col(m.Stage.name)) == name.lower(), col(m.Stage.arm) == arm
        )
        with self._session() as session:
            return session.execute(query).scalars().first()

    def start(
        self,
        stage_id: int,
        *,
        actor_parent_id: int | None = None,
        critic_parent_id: int | None = None,
        flow_run_id: str | None = None,
    ) -> m.Stage:
        """A process begins or continues the stage; counts the attempt and notes the checkpoints that enter.

        A critic parent that is noted already stays: it may be the seed critic that the stage made itself.
        """
        values: dict[str, Any] = {
            "state": m.StageState.RUNNING,
            "attempt": col(m.Stage.attempt) + 1,
            "started_at": func.coalesce(col(m.Stage.started_at), now()),
            "finished_at": None,
            "error": "",
            "actor_parent_id": actor_parent_id,
            "critic_parent_id": func.coalesce(col(m.Stage.critic_parent_id), critic_parent_id),
            "flow_run_id": flow_run_id,
        }
        return self._move(stage_id, values)

    def set_critic_parent(self, stage_id: int, checkpoint_id: int) -> None:
        """The critic that enters was made in the stage itself: the seed critic of a warm-up."""
        with self._session() as session:
            query = update(m.Stage).where(col(m.Stage.id) == stage_id)
            session.execute(query.values(critic_parent_id=checkpoint_id))

    def set_state(self, stage_id: int, state: m.StageState, *, error: str = "") -> m.Stage:
        values: dict[str, Any] = {"state": state, "error": error}
        if state in ENDED:
            values["finished_at"] = now()
        return self._move(stage_id, values)

    def _move(self, stage_id: int, values: Mapping[str, Any]) -> m.Stage:
        with self._session() as session:
            session.execute(update(m.Stage).where(col(m.Stage.id) == stage_id).values(dict(values)))
            stage = self.get(stage_id)
            payload = {"stage": stage.name, "arm": stage.arm, "state": stage.state, "attempt": stage.attempt}
            self._store.events.append(
                m.EventKind.STAGE_STATE, cycle_id=stage.cycle_id, stage_id=stage_id, payload=payload
            )
            return stage

    def set_progress(self, stage_id: int, phase: Phase, done: int, total: int | None, text: str = "") -> None:
        """Move the stage's bar."""
        values = {"phase": phase, "progress_done": done, "progress_total": total, "progress_text": text}
        with self._session() as session:
            session.execute(update(m.Stage).where(col(m.Stage.id) == stage_id).values(values))

    # ----------------------------------------------------------------- phases

    def start_phase(self, stage_id: int, phase: Phase, total: int | None, attempt: int = 1) -> None:
        """A phase begins, or begins again after an interruption; then its first start stays."""
        row = {"stage_id": stage_id, "phase": phase, "state": m.PhaseState.RUNNING, "total": total, "attempt": attempt}
        query = insert(m.StagePhase).values(row | {"facts": {}, "started_at": now()})
        query = query.on_conflict_do_update(
            index_elements=["stage_id", "phase"],
            set_={"state": m.PhaseState.RUNNING, "total": total, "attempt": attempt, "finished_at": None},
        )
        with self._session() as session:
            session.execute(query)
            self.set_progress(stage_id, phase, 0, total)

    def finish_phase(self, stage_id: int, phase: Phase, facts: Mapping[str, Any]) -> None:
        """A phase is done; its facts are what a resumed flow uses instead of running it again. Done already: nothing changes."""
        row = {"stage_id": stage_id, "phase": phase, "attempt": 1, "started_at": now()}
        result = {"state": m.PhaseState.DONE, "facts": dict(facts), "finished_at": now()}
        query = insert(m.StagePhase).values(row | result)
        query = query.on_conflict_do_update(
            index_elements=["stage_id", "phase"], set_=result, where=col(m.StagePhase.state) != m.PhaseState.DONE
        )
        with self._session() as session:
            session.execute(query)

    def phases(self, stage_id: int) -> dict[Phase, m.StagePhase]:
        """All phases that began, in order of their start."""
        query = (
            select(m.StagePhase).where(col(m.StagePhase.stage_id) == stage_id).order_by(col(m.StagePhase.started_at))
        )
        with self._session() as session:
            rows = session.execute(query.execution_options(populate_existing=True)).scalars()
            return {row.phase: row for row in rows}

    def phases_of_cycle(self, cycle_id: int) -> dict[int, list[m.StagePhase]]:
        """Stage id -> its phases in order of their start (the Gantt's rows)."""
        query = (
            select(m.StagePhase)
            .join(m.Stage, col(m.Stage.id) == col(m.StagePhase.stage_id))
            .where(col(m.Stage.cycle_id) == cycle_id)
            .order_by(col(m.StagePhase.started_at))
        )
        found: dict[int, list[m.StagePhase]] = {}
        with self._session() as session:
            for row in session.execute(query).scalars():
                found.setdefault(row.stage_id, []).append(row)
        return found
