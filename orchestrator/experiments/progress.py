"""How far experiments are, from the states of their cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator import models as m
from orchestrator.store import Store
from orchestrator.transitions import HELD_BY_PROCESS

S = m.CycleState


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Runs are arms × seeds."""

    state: str  # planned, running, stopped, failed or done
    done: int
    of: int
    seeds: tuple[int, ...]
    arms: int


def progress_of(store: Store, experiments: Sequence[m.Experiment]) -> list[Progress]:
    """One per experiment, in order."""
    ids = [e.id for e in experiments if e.id is not None]
    runs = store.experiments.runs(ids)
    own = store.experiments.cycle_states([e.name for e in experiments])
    linked = store.experiments.states_of([r.cycle_id for r in runs if r.cycle_id is not None])
    found = []
    for e in experiments:
        mine = [r for r in runs if r.experiment_id == e.id]
        states = [linked[r.cycle_id] for r in mine if r.cycle_id is not None]
        done = sum(s is S.DONE for s in states)
        every = [*states, *own[e.name]]
        if done == len(mine):
            word = "done"
        elif any(s in HELD_BY_PROCESS for s in every):
            word = "running"
        elif any(s is S.FAILED for s in every) or any(r.error for r in mine):
            word = "failed"
        else:
            word = "stopped" if every else "planned"
        found.append(
            Progress(
                state=word,
                done=done,
                of=len(mine),
                seeds=tuple(sorted({r.seed for r in mine})),
                arms=len({r.arm for r in mine}),
            )
        )
    return found
