"""Experiments, their runs, and the branches that runs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import false, func, or_, select, text, update
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository, page
from stages.domain import Phase
from stages.errors import StoreError

LOCK = 0x525349  # first half of the advisory lock on one branch's cycle; its number is the second


class Spent(NamedTuple):
    """Attempts of one phase of one stage."""

    stage_id: int
    phase: Phase
    attempts: int
    sampled: int  # tokens


class Experiments(Repository):
    def named(self, name: str) -> m.Experiment | None:
        with self._session() as session:
            return session.execute(select(m.Experiment).where(col(m.Experiment.name) == name)).scalars().first()

    def get(self, experiment_id: int) -> m.Experiment:
        """Raises StoreError when there is none."""
        with self._session() as session:
            if (found := session.get(m.Experiment, experiment_id)) is None:
                raise StoreError(
                    f"There is no experiment {experiment_id}. `rsi experiment list` shows those that exist."
                )
            return found

    def create(self, name: str, spec: dict[str, Any], digest: str, *, actor: str) -> m.Experiment:
        """The experiment of this name, stored now if it was not yet."""
        query = pg.insert(m.Experiment).values(name=name, spec=spec, spec_digest=digest, created_by=actor)
        with self._session() as session:
            session.execute(query.on_conflict_do_nothing(index_elements=["name"]))
            found = self.named(name)
        assert found is not None
        return found

    def list(self, *, before: int | None = None, limit: int = 50) -> Page[m.Experiment]:
        """Newest first."""
        query = select(m.Experiment).order_by(col(m.Experiment.id).desc()).limit(limit + 1)
        if before is not None:
            query = query.where(col(m.Experiment.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")

    # ----------------------------------------------------------------- runs

    def plan_runs(self, experiment_id: int, runs: Sequence[tuple[str, int]]) -> None:
        """(arm, seed) of every run, arms in order; those that are stored stay as they are."""
        order = {arm: i for i, arm in enumerate(dict.fromkeys(arm for arm, _ in runs))}
        rows = [
            {"experiment_id": experiment_id, "arm": arm, "seed": seed, "position": order[arm], "error": ""}
            for arm, seed in runs
        ]
        with self._session() as session:
            session.execute(pg.insert(m.ExperimentRun).on_conflict_do_nothing(), rows)

    def runs(self, experiment_ids: Sequence[int]) -> Sequence[m.ExperimentRun]:
        """Of these experiments: by experiment, seed, then arm in the order of the specification."""
        own = m.ExperimentRun
        query = select(own).where(col(own.experiment_id).in_(experiment_ids))
        query = query.order_by(col(own.experiment_id), col(own.seed), col(own.position))
        with self._session() as session:
            return session.execute(query.execution_options(populate_existing=True)).scalars().all()

    def set_run(self, experiment_id: int, arm: str, seed: int, *, cycle_id: int | None, error: str = "") -> None:
        own = m.ExperimentRun
        query = update(own).where(col(own.experiment_id) == experiment_id, col(own.arm) == arm, col(own.seed) == seed)
        with self._session() as session:
            session.execute(query.values(cycle_id=cycle_id, error=error))

    def cycle_states(self, names: Sequence[str]) -> Mapping[str, Sequence[m.CycleState]]:
        """Experiment -> states of the cycles that were made for it, shared prefixes included."""
        found: dict[str, list[m.CycleState]] = {name: [] for name in names}
        label = col(m.Cycle.config)["experiment"].astext
        own = or_(*(label.startswith(f"{name}/", autoescape=True) for name in names))
        query = select(label, col(m.Cycle.state)).where(label.is_not(None), own if names else false())
        with self._session() as session:
            for made_for, state in session.execute(query).tuples():
                for name in names:
                    if made_for.startswith(f"{name}/"):
                        found[name].append(state)
        return found

    def states_of(self, cycle_ids: Sequence[int]) -> dict[int, m.CycleState]:
        """Cycle id -> its state."""
        query = select(col(m.Cycle.id), col(m.Cycle.state)).where(col(m.Cycle.id).in_(cycle_ids))
        with self._session() as session:
            return {cycle_id: state for cycle_id, state in session.execute(query).tuples() if cycle_id is not None}

    # ----------------------------------------------------------------- branches

    def branch(self, key: str) -> int | None:
        """The cycle that runs, or ran, these stages."""
        with self._session() as session:
            return session.execute(select(col(m.Branch.cycle_id)).where(col(m.Branch.key) == key)).scalar()

    def add_branch(self, key: str, cycle_id: int) -> None:
        """Raises StoreError when another process was faster; its cycle is then the branch's."""
        with self._session() as session:
            session.add(m.Branch(key=key, cycle_id=cycle_id))

    @contextmanager
    def holding(self, cycle_id: int) -> Iterator[bool]:
        """Whether this process, and no other, works on a branch. The database lets go when the process dies."""
        lock = {"space": LOCK, "cycle": cycle_id}
        with self._store.engine.connect() as connection:
            got = bool(connection.execute(text("SELECT pg_try_advisory_lock(:space, :cycle)"), lock).scalar())
            connection.commit()  # the lock belongs to the session, not to a transaction
            try:
                yield got
            finally:
                if got:
                    connection.execute(text("SELECT pg_advisory_unlock(:space, :cycle)"), lock)
                    connection.commit()

    def others(self) -> int:
        """Connections to this database that are not this process's. Closes ours."""
        engine = self._store.engine
        engine.dispose()
        try:
            with engine.connect() as connection:
                return int(
                    connection.execute(
                        text(
                            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
                        )
                    ).scalar_one()
                )
        finally:
            engine.dispose()

    # ----------------------------------------------------------------- what was spent

    def attempts_of(self, cycle_ids: Sequence[int]) -> Sequence[Spent]:
        """Attempts and sampled tokens per stage and phase. Candidates' validation attempts are not kept, so not here."""
        own = m.Trajectory
        query = (
            select(col(own.stage_id), col(own.phase), func.count(), func.coalesce(func.sum(col(own.n_sampled)), 0))
            .where(col(own.cycle_id).in_(cycle_ids))
            .group_by(col(own.stage_id), col(own.phase))
        )
        with self._session() as session:
            return [Spent(*row) for row in session.execute(query).tuples()]

    def updates_of(self, cycle_ids: Sequence[int]) -> Sequence[tuple[int, Phase, int]]:
        """(stage id, phase, optimiser steps) as logged; a joint step is one update of the critic and one of the actor."""
        own = m.StepMetric
        steps = select(col(own.stage_id), col(own.phase), col(own.step)).distinct()
        steps = steps.join(m.Stage, col(m.Stage.id) == col(own.stage_id)).where(col(m.Stage.cycle_id).in_(cycle_ids))
        each = steps.subquery()
        query = select(each.c.stage_id, each.c.phase, func.count()).group_by(each.c.stage_id, each.c.phase)
        with self._session() as session:
            return [(row[0], Phase(row[1]), row[2]) for row in session.execute(query).tuples()]
