"""Which cycles are dead: the pure part of the reconciler, over everything that can be seen."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.models import CycleState
from orchestrator.reconcile import ACTIVE, HEARTBEAT_S, LAUNCH_S, SETTLE_S, Seen, judge
from orchestrator.transitions import ALLOWED
from orchestrator.workers import FlowRun, FlowState

LONG_AGO = 10_000.0


def seen(
    state: CycleState = CycleState.RUNNING,
    flow: FlowState | None = FlowState.RUNNING,
    *,
    changed_age_s: float = LONG_AGO,
    beat_age_s: float | None = 5.0,
    process: bool | None = None,
) -> Seen:
    run = FlowRun(id="f", state=flow) if flow else None
    return Seen(cycle_id=3, state=state, flow=run, changed_age_s=changed_age_s, beat_age_s=beat_age_s, process=process)


sightings = st.builds(
    seen,
    st.sampled_from(ACTIVE),
    st.none() | st.sampled_from(FlowState),
    changed_age_s=st.floats(0, LONG_AGO),
    beat_age_s=st.none() | st.floats(0, LONG_AGO),
    process=st.sampled_from([None, True, False]),
)


@given(sightings)
def test_a_living_process_is_never_touched(sight: Seen) -> None:
    if sight.process or sight.changed_age_s < SETTLE_S:
        assert judge(sight) is None


@given(sightings)
def test_every_repair_is_an_allowed_move_that_says_how_to_go_on(sight: Seen) -> None:
    repair = judge(sight)
    if repair is None:
        return
    assert repair.after in ALLOWED[sight.state]
    assert repair.after in {CycleState.FAILED, CycleState.PAUSED, CycleState.CANCELLED}
    if repair.after is not CycleState.CANCELLED:
        assert "rsi cycle resume 3" in repair.message
    # Prefect is told exactly when it still believes in the run.
    assert repair.crash_flow == (sight.flow is not None and not sight.flow.state.ended)


@pytest.mark.parametrize("flow", [FlowState.CRASHED, FlowState.FAILED, FlowState.CANCELLED, FlowState.COMPLETED])
def test_an_ended_flow_under_an_active_cycle_is_dead_at_once(flow: FlowState) -> None:
    assert judge(seen(flow=flow, beat_age_s=1.0, changed_age_s=SETTLE_S)) is not None


@pytest.mark.parametrize(
    "state, after",
    [
        (CycleState.RUNNING, CycleState.FAILED),
        (CycleState.PAUSING, CycleState.PAUSED),
        (CycleState.CANCELLING, CycleState.CANCELLED),
    ],
)
def test_a_lost_process_fulfils_what_people_wanted(state: CycleState, after: CycleState) -> None:
    repair = judge(seen(state, process=False))
    assert repair is not None
    assert repair.after is after


def test_on_another_machine_only_the_heartbeat_counts() -> None:
    assert judge(seen(beat_age_s=HEARTBEAT_S - 1)) is None
    assert judge(seen(beat_age_s=HEARTBEAT_S + 1)) is not None


def test_a_pending_run_may_take_a_minute_to_start() -> None:
    """Prefect never finds one whose worker stopped meanwhile."""
    starting = {"state": CycleState.QUEUED, "flow": FlowState.PENDING, "beat_age_s": None, "process": False}
    assert judge(seen(**starting, changed_age_s=30)) is None
    assert judge(seen(**starting, changed_age_s=90)) is not None


def test_a_waiting_run_waits_for_ever() -> None:
    for flow, process in itertools.product((FlowState.SCHEDULED, FlowState.STARTING, FlowState.PAUSED), (None, False)):
        assert judge(seen(CycleState.QUEUED, flow, beat_age_s=None, process=process)) is None


def test_a_resumed_cycle_keeps_its_old_flow_run_for_a_moment() -> None:
    old = {"state": CycleState.RESUMING, "flow": FlowState.CRASHED, "process": False}
    assert judge(seen(**old, changed_age_s=LAUNCH_S - 1)) is None
    assert judge(seen(**old, changed_age_s=LAUNCH_S + 1)) is not None


def test_a_cycle_that_was_never_launched() -> None:
    lost = judge(seen(CycleState.QUEUED, None, beat_age_s=None))
    assert lost is not None
    assert "never started" in lost.message
    assert judge(seen(CycleState.QUEUED, None, beat_age_s=None, changed_age_s=LAUNCH_S - 1)) is None
