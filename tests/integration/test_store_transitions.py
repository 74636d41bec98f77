"""The cycle's state machine, on real rows."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator import models as m
from orchestrator import transitions
from orchestrator.models import CycleState as S
from orchestrator.store import Store
from orchestrator.transitions import ALLOWED, CANCEL, LOST, PAUSE, RESUME
from stages.errors import ConfigError, StoreError
from tests import factories

REQUESTS = {transitions.pause: PAUSE, transitions.resume: RESUME, transitions.cancel: CANCEL}

WANTED = {
    transitions.pause: m.DesiredState.PAUSE,
    transitions.resume: m.DesiredState.RUN,
    transitions.cancel: m.DesiredState.CANCEL,
}


def _in_state(store: Store, state: S) -> int:
    cycle_id = factories.cycle(store).id or 0
    store.cycles.set_state(cycle_id, state)
    return cycle_id


def test_requests_and_losses_only_make_allowed_moves() -> None:
    for table in (PAUSE, RESUME, CANCEL, LOST):
        for before, after in table.items():
            assert after is before or after in ALLOWED[before], (before, after)
    assert set(ALLOWED) == set(S)


def test_every_state_can_end_and_ends_are_final() -> None:
    for state in S:
        seen, todo = {state}, [state]
        while todo:
            new = ALLOWED[todo.pop()] - seen
            seen |= new
            todo += new
        assert seen & transitions.ENDED
    assert all(not ALLOWED[state] for state in transitions.ENDED)


def test_every_move(store: Store) -> None:
    for before, after in itertools.product(S, S):
        cycle_id = _in_state(store, before)
        if after is before or after in ALLOWED[before]:
            assert transitions.enter(store, cycle_id, after).state is after
        else:
            with pytest.raises(StoreError, match=f"is {before}; it cannot become {after}"):
                transitions.enter(store, cycle_id, after)
            assert store.cycles.get(cycle_id).state is before


def test_every_request(store: Store) -> None:
    for (request, table), state in itertools.product(REQUESTS.items(), S):
        cycle_id = _in_state(store, state)
        if state not in table:
            with pytest.raises(ConfigError, match=f"is {state}; it cannot be asked to {request.__name__}"):
                request(store, cycle_id, "anna")
            assert store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items == []
            continue
        assert request(store, cycle_id, "anna") is table[state]
        assert store.cycles.desired(cycle_id) is WANTED[request]
        if table.get(table[state]) is table[state]:  # asking twice is one act
            said = len(store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items)
            events = store.events.last_id()
            assert request(store, cycle_id, "anna") is table[state]
            assert len(store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items) == said
            assert store.events.last_id() == events


def test_a_life(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    transitions.enter(store, cycle_id, S.RUNNING)
    started = store.cycles.get(cycle_id).started_at
    assert transitions.pause(store, cycle_id, "anna") is S.PAUSING
    transitions.enter(store, cycle_id, S.PAUSED)
    assert transitions.resume(store, cycle_id, "anna") is S.RESUMING
    transitions.enter(store, cycle_id, S.RUNNING)
    transitions.enter(store, cycle_id, S.FAILED, error="disk full")
    failed = store.cycles.get(cycle_id)
    assert (failed.error, failed.started_at) == ("disk full", started)
    assert failed.finished_at is not None
    transitions.resume(store, cycle_id, "anna")
    again = transitions.enter(store, cycle_id, S.RUNNING)
    assert (again.error, again.finished_at) == ("", None)
    done = transitions.enter(store, cycle_id, S.DONE)
    assert done.finished_at is not None
    states = [e.payload["state"] for e in store.events.after(0) if e.kind == m.EventKind.CYCLE_STATE]
    assert states == ["running", "pausing", "paused", "resuming", "running", "failed", "resuming", "running", "done"]
    assert [r.action for r in store.audit_trail.list(object_kind="cycle", object_id=cycle_id).items] == [
        "cycle.resume", "cycle.resume", "cycle.pause"
    ]  # fmt: skip


def test_two_people_at_once(store: Store) -> None:
    """Pause and cancel meet; whatever the order, the cycle ends up cancelling and nothing is lost."""
    cycle_id = _in_state(store, S.RUNNING)

    def ask(verb) -> None:
        try:
            verb(store, cycle_id, "x")
        except ConfigError:
            assert verb is transitions.pause  # it came second

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, [transitions.pause, transitions.cancel]))
    assert store.cycles.get(cycle_id).state is S.CANCELLING


def test_an_unknown_cycle(store: Store) -> None:
    for verb in REQUESTS:
        with pytest.raises(StoreError, match="no cycle 77"):
            verb(store, 77, "anna")
