"""The cycle's state machine: one table, and the only functions that change a cycle's state.

People *request* (`pause`, `resume`, `cancel`); the flow process *enters* states as it really reaches them. In between
stand the honest words pausing, resuming and cancelling. Nobody writes a state that is not in `ALLOWED`.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.models import Cycle, CycleState, DesiredState
from orchestrator.store import Store
from stages.errors import ConfigError, StoreError

S = CycleState

ALLOWED: Mapping[CycleState, frozenset[CycleState]] = {
    S.QUEUED: frozenset({S.RUNNING, S.PAUSED, S.CANCELLED, S.FAILED}),
    S.RUNNING: frozenset({S.PAUSING, S.CANCELLING, S.SUSPENDED, S.FAILED, S.DONE}),
    # pausing -> running: resumed before the boundary; -> done: there was no boundary left
    S.PAUSING: frozenset({S.PAUSED, S.RUNNING, S.CANCELLING, S.FAILED, S.DONE}),
    S.PAUSED: frozenset({S.RESUMING, S.CANCELLED}),
    S.SUSPENDED: frozenset({S.RESUMING, S.PAUSED, S.CANCELLED, S.FAILED}),
    S.RESUMING: frozenset({S.RUNNING, S.PAUSED, S.CANCELLED, S.FAILED}),
    S.CANCELLING: frozenset({S.CANCELLED, S.FAILED, S.DONE}),
    S.FAILED: frozenset({S.RESUMING, S.CANCELLED}),
    S.CANCELLED: frozenset(),
    S.DONE: frozenset(),
}

ENDED = frozenset({S.CANCELLED, S.DONE})
HELD_BY_PROCESS = frozenset({S.RUNNING, S.PAUSING, S.CANCELLING})  # a flow process should be alive

# What a request does from each state. A state that is missing refuses it.
PAUSE: Mapping[CycleState, CycleState] = {
    S.QUEUED: S.PAUSED,  # no process yet: at once
    S.RUNNING: S.PAUSING,
    S.PAUSING: S.PAUSING,
    S.PAUSED: S.PAUSED,
    S.SUSPENDED: S.PAUSED,
    S.RESUMING: S.PAUSED,
}
RESUME: Mapping[CycleState, CycleState] = {
    S.PAUSING: S.RUNNING,
    S.PAUSED: S.RESUMING,
    S.SUSPENDED: S.RESUMING,
    S.FAILED: S.RESUMING,
    S.RESUMING: S.RESUMING,
    S.RUNNING: S.RUNNING,
}
CANCEL: Mapping[CycleState, CycleState] = {
    S.QUEUED: S.CANCELLED,
    S.RUNNING: S.CANCELLING,
    S.PAUSING: S.CANCELLING,
    S.CANCELLING: S.CANCELLING,
    S.PAUSED: S.CANCELLED,
    S.SUSPENDED: S.CANCELLED,
    S.RESUMING: S.CANCELLED,
    S.FAILED: S.CANCELLED,
    S.CANCELLED: S.CANCELLED,
}
# A process that disappeared fulfils what people asked for; from every other state the cycle has failed.
LOST: Mapping[CycleState, CycleState] = {
    S.PAUSING: S.PAUSED,
    S.CANCELLING: S.CANCELLED,
}


def pause(store: Store, cycle_id: int, actor: str) -> CycleState:
    """Ask for a stop at the next safe boundary. Asking twice is no error. Raises ConfigError when it cannot be paused."""
    return _request(store, cycle_id, actor, "pause", DesiredState.PAUSE, PAUSE)


def resume(store: Store, cycle_id: int, actor: str) -> CycleState:
    """Ask for continuation from the last finished record. Raises ConfigError when it cannot be resumed."""
    return _request(store, cycle_id, actor, "resume", DesiredState.RUN, RESUME)


def cancel(store: Store, cycle_id: int, actor: str) -> CycleState:
    """Ask for a stop for good. What was recorded stays. Raises ConfigError when it is done already."""
    return _request(store, cycle_id, actor, "cancel", DesiredState.CANCEL, CANCEL)


def enter(store: Store, cycle_id: int, to: CycleState, *, error: str = "") -> Cycle:
    """The flow (or the reconciler) has really reached `to`. Entering the state one is in changes nothing.

    Raises:
        StoreError: `ALLOWED` has no such move; the cycle was changed by somebody else meanwhile.
    """
    with store.transaction():
        cycle = store.cycles.lock(cycle_id)
        if cycle.state is not to:
            if to not in ALLOWED[cycle.state]:
                raise StoreError(
                    f"Cycle {cycle_id} is {cycle.state}; it cannot become {to}. Another process has changed it: read its "
                    "state again."
                )
            store.cycles.set_state(cycle_id, to, error=error)
        return store.cycles.get(cycle_id)


def _request(
    store: Store,
    cycle_id: int,
    actor: str,
    verb: str,
    desired: DesiredState,
    table: Mapping[CycleState, CycleState],
) -> CycleState:
    with store.transaction():
        cycle = store.cycles.lock(cycle_id)
        if (to := table.get(cycle.state)) is None:
            raise ConfigError(
                f"Cycle {cycle_id} is {cycle.state}; it cannot be asked to {verb}. {_advice(cycle.state)}"
            )
        if to is not cycle.state or cycle.desired_state is not desired:
            payload = {"from": cycle.state, "to": to}
            store.audit_trail.add(actor, f"cycle.{verb}", object_kind="cycle", object_id=cycle_id, payload=payload)
            store.cycles.set_state(cycle_id, to, desired=desired)
        return to


def _advice(state: CycleState) -> str:
    if state is S.CANCELLING:
        return "It is being cancelled, which cannot be undone; clone it to run it again."
    if state in ENDED:
        return "It has ended; clone it to run it again."
    if state is S.FAILED:
        return "It has no process; resume or cancel it."
    return "It waits for a worker; see `rsi status`."
