"""What a refine stage does beyond its plan, in real tiny runs: a cut surplus, a stale critic, scales that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator.analysis import ev_curves, oversampling
from orchestrator.launch import create_cycle, pause_cycle
from orchestrator.recipes import load_recipe
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.trajectories import TrajectoryFilter
from orchestrator.transitions import resume
from stages.domain import EndReason, Phase
from stages.errors import UpdateError
from stages.records import StepDone

TINY = {
    "rounds": 1,
    "direct_ppo": True,
    "pool_size": 60,
    "validation_size": 2,
    "reported_size": 2,
    "reported_suites": ["embedded:heldout-names"],
    "rollout.wave_size": 15,
    "rpr.0.keep_steps": [2],
    "rpr.0.global_batch_size": 8,
    "rpr.0.over_sampling_batch_size": 15,
    "rpr.0.profile.draw.n_tasks": 20,
}
STALE = {
    "rpr.0.ev_alarm_steps": 1,
    "rpr.0.warmup.lr": 0.3,  # a critic that cannot be right
    "rpr.0.critic_lr": 0.3,
    "rpr.0.reward.online": True,
    "rpr.0.reward.online_min_attempts": 1,
    "rpr.0.reward.online_alpha": 1.0,
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def new_cycle(store: Store, **overrides: object) -> int:
    cycle = create_cycle(store, load_recipe("smoke", overrides=TINY | overrides), actor="test")
    assert cycle.id is not None
    return cycle.id


def digests(store: Store, cycle_id: int) -> tuple[str, str | None]:
    row = store.checkpoints.named(cycle_id, "RPR-1")
    assert row is not None
    return row.actor_digest, row.critic_digest


def of_phase(store: Store, stage_id: int, phase: Phase) -> list[m.Trajectory]:
    return list(store.trajectories.list(TrajectoryFilter(stage_id=stage_id, phase=phase), limit=1000).items)


def check_surplus(store: Store, cycle_id: int, every: int) -> set[tuple[object, ...]]:
    """Spec §7: the rest is cancelled, every `every`-th step it is completed, and never is it a sample. The kept attempts."""
    stage = store.stages.named(cycle_id, "RPR-1")
    assert stage.id is not None
    kept = {(t.step, t.task_id, t.attempt, t.n_sampled) for t in of_phase(store, stage.id, Phase.JOINT)}
    dropped = of_phase(store, stage.id, Phase.JOINT_SURPLUS)
    assert all(t.reward is None and t.trained_on is None for t in dropped)
    assert len(kept) == 16
    assert len(dropped) == 14
    cut = [t for t in dropped if t.end_reason is EndReason.CANCELLED]
    assert {t.step for t in cut} == (set() if every == 1 else {1})
    assert of_phase(store, stage.id, Phase.CALIBRATE_SURPLUS)
    report = oversampling(store, stage.id, batch=8)
    assert (report.steps, report.completed, report.kept) == (2, 2 // every, 16)
    assert set(report.dropped) == {t.id for t in dropped}
    assert report.shifts[0].shift <= 0  # the first to finish are short
    joint = [r for r in store.trajectories.success(cycle_id) if r.phase is Phase.JOINT]
    assert all(r.attempts == r.verdicts == 8 for r in joint)
    return kept


@pytest.mark.full
def test_cutting_the_surplus_changes_nothing_that_is_trained(store: Store, settings: Settings) -> None:
    found = []
    for every in (1, 2):
        cycle_id = new_cycle(store, **{"rpr.0.complete_surplus_every": every})
        assert run_cycle(store, settings, cycle_id) is m.CycleState.DONE
        found.append((digests(store, cycle_id), check_surplus(store, cycle_id, every)))
    assert found[0] == found[1]


def recalibrated(store: Store, settings: Settings, paused_at: int | None) -> tuple[object, ...]:
    """A run whose critic is stale after joint step 1; a pause after a critic-only update is resumed."""
    cycle_id = new_cycle(store, **STALE, **{"rpr.0.ev_alarm": "recalibrate", "rpr.0.complete_surplus_every": 2})

    def pause(row: m.Stage, record: object) -> None:
        if isinstance(record, StepDone) and record.phase is Phase.CALIBRATE and record.step == paused_at:
            pause_cycle(store, cycle_id, actor="test")

    state = run_cycle(store, settings, cycle_id, on_record=pause)
    if paused_at:
        assert state is m.CycleState.PAUSED
        resume(store, cycle_id, "test")
        state = run_cycle(store, settings, cycle_id)
    assert state is m.CycleState.DONE
    stage = store.stages.named(cycle_id, "RPR-1")
    assert stage.id is not None
    calibration = store.metrics.steps(stage.id, Phase.CALIBRATE)
    assert sorted(calibration) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [s for s, row in calibration.items() if row.get("critic/recalibration")] == [5, 6, 7, 8]
    assert all("train/pg_loss" not in row for row in calibration.values())
    joint = store.metrics.steps(stage.id, Phase.JOINT)
    assert joint[1]["critic/stale_steps"] == 1
    assert any(name.startswith("reward/scale/") for name in joint[1])
    facts = store.stages.phases(stage.id)[Phase.CALIBRATE].facts
    assert (facts["steps"], facts["recalibration_updates"]) == (8, 4)
    (curve,) = ev_curves(store, stage_ids=[stage.id])
    order = [(p.phase, p.step) for p in curve.points if p.phase is not Phase.WARMUP]
    assert order[4:10] == [(Phase.JOINT, 1), *((Phase.CALIBRATE, s) for s in (5, 6, 7, 8)), (Phase.JOINT, 2)]
    assert curve.alarm is not None  # joint step 2 alone, by the recipe's own patience
    assert curve.alarm.steps == 1
    kept = check_surplus(store, cycle_id, 2)
    return digests(store, cycle_id), joint[2]["reward/scales_drifted"], joint[2]["rollout/reward_mean"], kept


def test_a_stale_critic_gets_a_further_block_of_updates(store: Store, settings: Settings) -> None:
    """EV < 0: four more critic-only updates with fresh batches, counted and marked (spec §3.5)."""
    recalibrated(store, settings, paused_at=6)


@pytest.mark.full
def test_a_pause_during_recalibration_changes_nothing(store: Store, settings: Settings) -> None:
    assert recalibrated(store, settings, None) == recalibrated(store, settings, 6)


@pytest.mark.full
def test_a_stale_critic_stops_the_stage_and_a_person_may_go_on(store: Store, settings: Settings) -> None:
    cycle_id = new_cycle(store, **STALE, **{"rpr.0.ev_alarm": "stop"})
    with pytest.raises(UpdateError, match="EV was below 0 in 1 steps"):
        run_cycle(store, settings, cycle_id)
    stage = store.stages.named(cycle_id, "RPR-1")
    assert stage.id is not None
    assert stage.state is m.StageState.FAILED
    assert sorted(store.metrics.steps(stage.id, Phase.JOINT)) == [1]
    store.cycles.set_state(cycle_id, m.CycleState.FAILED, error="stopped")
    resume(store, cycle_id, "test")
    with pytest.raises(UpdateError, match="joint step 2"):  # the count begins anew
        run_cycle(store, settings, cycle_id)
    assert sorted(store.metrics.steps(stage.id, Phase.JOINT)) == [1, 2]
