"""Cycles that say they run while nothing works on them: found at start and every minute, and made resumable.

Prefect alone does not find them (measured, Prefect 3.9): a flow killed together with its worker stays Running, a run
whose worker stopped while it was Pending stays Pending, and the run of a worker stopped by SIGTERM stays Running. So our
table, Prefect's state, the heartbeat of the flow and the processes of this machine are compared here.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from orchestrator import models as m
from orchestrator import transitions, workers
from orchestrator.embedded import prefect_server, processes
from orchestrator.settings import Settings
from orchestrator.workers import FlowRun, FlowState

if TYPE_CHECKING:
    from orchestrator.store import Store

HEARTBEAT_S = 120.0  # a flow beats every few seconds; a longer silence is death, wherever it ran
CANCEL_S = 120.0  # a cancelled flow that reached no boundary for so long is ended by force: what it recorded stays
START_S = 60.0  # from "a worker took it" to the first beat: the import of torch on a busy machine
LAUNCH_S = 60.0  # from the row to its flow run, which the launcher writes right after it
SETTLE_S = 10.0  # a cycle that moved so recently is left alone: its launcher or flow is about to write the rest
ACTIVE = (
    m.CycleState.QUEUED,
    m.CycleState.RUNNING,
    m.CycleState.PAUSING,
    m.CycleState.RESUMING,
    m.CycleState.CANCELLING,
)
WAITING = (m.CycleState.QUEUED, m.CycleState.RESUMING)
WAIT_S = 30.0  # a free worker takes a flow run within seconds
MOVES = (m.EventKind.CYCLE_CREATED, m.EventKind.CYCLE_STATE)
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known about one active cycle at one moment. Ages in seconds; None: never."""

    cycle_id: int
    state: m.CycleState
    flow: FlowRun | None  # None: no flow run was ever asked for
    changed_age_s: float  # since its row or flow run changed last
    beat_age_s: float | None
    process: bool | None  # a process of it lives here; None: it may run on another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    cycle_id: int
    before: m.CycleState
    after: m.CycleState
    message: str
    flow_run_id: str | None = None
    crash_flow: bool = False  # Prefect must be told, too


def judge(seen: Seen) -> Repair | None:
    """Decide about one cycle; None: leave it. Pure."""
    why = _cause_of_death(seen)
    return None if why is None else _repair(seen, why)


def _repair(seen: Seen, why: str) -> Repair:
    after = transitions.LOST.get(seen.state, m.CycleState.FAILED)
    if after is m.CycleState.CANCELLED:
        message = f"Cancelled; {why}."
    elif after is m.CycleState.PAUSED:
        message = f"Paused at the last finished record; {why}. Continue with `rsi cycle resume {seen.cycle_id}`."
    else:
        message = f"Interrupted: {why}. Nothing finished is lost; continue with `rsi cycle resume {seen.cycle_id}`."
    return Repair(
        cycle_id=seen.cycle_id,
        before=seen.state,
        after=after,
        message=message,
        flow_run_id=seen.flow.id if seen.flow else None,
        crash_flow=seen.flow is not None and not seen.flow.state.ended,
    )


def _cause_of_death(seen: Seen) -> str | None:
    if seen.process or seen.changed_age_s < SETTLE_S:
        return None
    launching = seen.state in {m.CycleState.QUEUED, m.CycleState.RESUMING} and seen.changed_age_s < LAUNCH_S
    beats = seen.beat_age_s is not None and seen.beat_age_s < HEARTBEAT_S
    if seen.flow is None:
        if beats or launching:
            return None
        return "its flow run was never started"
    state = seen.flow.state
    if state.ended:
        # The flow writes the cycle's last state before its own, so an ended flow under an active cycle was cut short.
        detail = f" ({seen.flow.message})" if seen.flow.message else ""
        if launching or (state is FlowState.MISSING and beats):
            return None  # what it has is still its last flow run
        return f"its flow run ended as {state}{detail}"
    if state in {FlowState.SCHEDULED, FlowState.STARTING, FlowState.PAUSED}:
        return None  # waits for a worker, for a cluster, or for people
    if seen.process is False:
        if state is FlowState.PENDING and seen.changed_age_s < START_S:
            return None
        return f"its process is gone, though Prefect says {state}"
    if beats or (seen.beat_age_s is None and seen.changed_age_s < HEARTBEAT_S + START_S):
        return None
    return f"no sign of life for {seen.beat_age_s or seen.changed_age_s:.0f} s"


def reconcile(settings: Settings, database_url: str, *, now: float | None = None) -> Sequence[Repair]:
    """Look once at every active cycle and repair what is dead; returns the repairs made. `now`: Unix time, s.

    Raises:
        ServiceError, StoreError: Prefect or the database does not answer; nothing was changed.
    """
    with _opened(settings, database_url) as store:
        return reconcile_store(store, settings, now=now)


def reconcile_store(store: "Store", settings: Settings, *, now: float | None = None) -> Sequence[Repair]:
    """As `reconcile`, through a store that is open already."""
    looked = look(store, settings, time.time() if now is None else now)
    repairs = [r for r in map(judge, looked) if r and _apply(store, r)]
    _tell_prefect(repairs, settings)
    _tell_waiting(store, settings, looked, time.time() if now is None else now)
    for seen in looked:
        if seen.state is m.CycleState.CANCELLING and seen.changed_age_s > CANCEL_S and seen.flow:
            workers.cancel_flow_run(seen.flow.id, settings=settings)  # nothing happens to one that has ended
    return repairs


def _tell_waiting(store: "Store", settings: Settings, looked: Sequence[Seen], now: float) -> None:
    """A cycle that no worker has taken says in its log what it waits for; once, and again when that changes."""
    from orchestrator.store.logs import WAITS, NewLine

    for seen in looked:
        scheduled = seen.flow is not None and seen.flow.state is FlowState.SCHEDULED
        if not scheduled or seen.changed_age_s < WAIT_S or seen.state not in WAITING:
            continue
        text = workers.why_waiting(store.cycles.get(seen.cycle_id).config, settings=settings, now=now)
        if store.logs.newest(seen.cycle_id, WAITS) != text:
            store.logs.append(seen.cycle_id, [NewLine(level=logging.WARNING, logger=WAITS, text=text)])


def interrupt(settings: Settings, database_url: str, why: str) -> Sequence[Repair]:
    """Mark every cycle that has a process as stopped, because its process is about to be ended on purpose.

    Done first, so that the flow, which then fails with a bare signal, finds the better message already written.
    """
    with _opened(settings, database_url) as store:
        seen = (s for s in look(store, settings, time.time()) if s.state in transitions.HELD_BY_PROCESS)
        repairs = [r for r in (_repair(s, why) for s in seen) if _apply(store, r)]
    _tell_prefect(repairs, settings)
    return repairs


def _tell_prefect(repairs: Sequence[Repair], settings: Settings) -> None:
    for repair in repairs:
        if repair.crash_flow and repair.flow_run_id:
            workers.mark_crashed(repair.flow_run_id, repair.message, settings=settings)


def look(store: "Store", settings: Settings, now: float) -> Sequence[Seen]:
    """Everything that is known about every active cycle at the Unix time `now`."""
    cycles = store.cycles.list(states=ACTIVE, limit=1000).items
    if not cycles:
        return ()
    ids = [c.flow_run_id for c in cycles if c.flow_run_id]
    flows = workers.flow_runs(ids, settings=settings) if ids else {}
    # Prefect's answer is older than the look at the processes: a run that starts in between is seen alive.
    alive = running_flows(settings) if everything_is_local(settings) else None
    return [_seen(store, cycle, flows, alive, now) for cycle in cycles]


@contextmanager
def _opened(settings: Settings, database_url: str) -> "Iterator[Store]":
    from orchestrator.store import Store

    store = Store.open(database_url, settings.artifacts, pool_size=1)
    try:
        yield store
    finally:
        store.close()


def everything_is_local(settings: Settings) -> bool:
    """An embedded Postgres has only a unix socket, so no flow can run on another machine."""
    return settings.embedded_database and not prefect_server.external()


def running_flows(settings: Settings) -> frozenset[str]:
    """Ids of flow runs whose process lives on this machine."""
    found = set()
    for process in processes.marked(settings.home, include_caller=True):
        try:
            if processes.is_flow(process):
                found.add(process.environ().get(FLOW_RUN_VARIABLE, ""))
        except (psutil.Error, OSError):
            continue  # it ended meanwhile
    return frozenset(found - {""})


def _seen(store: "Store", cycle: m.Cycle, flows: dict[str, FlowRun], alive: frozenset[str] | None, now: float) -> Seen:
    assert cycle.id is not None
    flow = flows[cycle.flow_run_id] if cycle.flow_run_id else None
    beat = cycle.heartbeat_at.timestamp() if cycle.heartbeat_at else None
    moves = [e.created_at.timestamp() for e in store.events.latest(cycle_id=cycle.id) if e.kind in MOVES]
    changed = max([cycle.created_at.timestamp(), flow.since if flow else 0.0, *moves])
    return Seen(
        cycle_id=cycle.id,
        state=cycle.state,
        flow=flow,
        changed_age_s=now - changed,
        beat_age_s=None if beat is None else now - beat,
        process=None if alive is None or flow is None else flow.id in alive,
    )


def _apply(store: "Store", repair: Repair) -> bool:
    """Write the repair unless the cycle moved on since it was seen."""
    from orchestrator.store.logs import NewLine

    with store.transaction():
        now = store.cycles.lock(repair.cycle_id)
        if (now.state, now.flow_run_id or None) != (repair.before, repair.flow_run_id):
            return False
        error = "" if repair.after is m.CycleState.CANCELLED else repair.message
        transitions.enter(store, repair.cycle_id, repair.after, error=error)
        for stage in store.stages.of_cycle(repair.cycle_id):
            if stage.state is m.StageState.RUNNING and stage.id is not None:
                cancelled = repair.after is m.CycleState.CANCELLED
                store.stages.set_state(stage.id, m.StageState.CANCELLED if cancelled else m.StageState.PAUSED)
        store.logs.append(
            repair.cycle_id, [NewLine(level=logging.WARNING, logger="rsi.reconcile", text=repair.message)]
        )
        store.audit_trail.add(
            "reconciler",
            "cycle.repair",
            object_kind="cycle",
            object_id=repair.cycle_id,
            payload={"why": repair.message},
        )
    return True
