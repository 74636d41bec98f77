"""What refine remembers between steps: its plan, the EV curve with its alarm, and online scales."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from stages.backends.learner.checkpoint import MANIFEST
from stages.config import RPRConfig
from stages.domain import FamilyScale, Phase
from stages.refine_state import RefineState, resumed, step_folder
from stages.rewards import RewardKind, RewardModel
from tests import factories

CONFIG = RPRConfig(joint_steps=6, ev_alarm_steps=2, ev_alarm="recalibrate")


def test_a_block_of_critic_only_updates_is_put_behind_the_alarm_and_the_count_begins_anew() -> None:
    state = RefineState.begin(CONFIG)
    assert [s for _, s in state.plan] == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    for index, ev in enumerate((-1.0, -1.0, -1.0, -1.0, -0.5, -0.5)):
        assert state.stale(2) is None  # calibration itself is no staleness
        state.add(*state.plan[index], ev)
    found = state.stale(2)
    assert found is not None
    assert (found.phase, found.first_step, found.last_step) == (Phase.JOINT, 1, 2)
    state.recalibrate(5, 4)
    assert state.plan[6:11] == [*((Phase.CALIBRATE, s) for s in (5, 6, 7, 8)), (Phase.JOINT, 3)]
    assert state.starts_block(6)
    assert state.last_step(6) == 8
    assert [i for i in range(len(state.plan)) if state.ends_block(i)] == [3, 9, 13]
    for index in range(6, 11):
        state.add(*state.plan[index], -0.5)
        assert state.stale(2) is None
    state.add(*state.plan[11], -0.5)
    assert state.stale(2) is not None


def test_an_undefined_ev_neither_ends_nor_lengthens_a_run() -> None:
    state = RefineState(plan=[])
    for step, ev in enumerate((-0.1, None, None, -0.1), 1):
        state.add(Phase.JOINT, step, ev)
    assert state.stale(3) is None
    found = state.stale(2)
    assert found is not None
    assert found.steps == 2


def test_what_is_resumed_belongs_to_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert resumed(tmp_path, CONFIG) == (RefineState.begin(CONFIG), 0)
    state = RefineState.begin(CONFIG)
    for index in range(6):
        state.add(*state.plan[index], -1.0)
    state.recalibrate(5, 4)
    state.scales = (FamilyScale(family="f", value=2.5, attempts=3, borrowed_from="all"),)
    for index in range(5, 8):
        folder = step_folder(tmp_path, state.plan[index])
        state.save(folder)
        if index < 7:  # the process was killed before this one's checkpoint was complete
            folder.mkdir()
            (folder / MANIFEST).write_text("{}")
        before = (list(state.plan), list(state.curve))
        state.add(*state.plan[index + 1], 0.25)
    found, done = resumed(tmp_path, CONFIG)
    assert done == 7
    assert found.plan == before[0]
    assert found.curve == before[1][:7]
    assert found.scales == state.scales
    assert found.answered == 6


def test_checkpoints_without_a_state_are_continued_too(tmp_path: Path) -> None:
    for step in ((Phase.CALIBRATE, 4), (Phase.JOINT, 1)):
        step_folder(tmp_path, step).mkdir(parents=True)
        (step_folder(tmp_path, step) / MANIFEST).write_text("{}")
    state, done = resumed(tmp_path, CONFIG)
    assert done == len(state.curve) == 5
    state.add(*state.plan[5], -1.0)
    state.save(step_folder(tmp_path, state.plan[5]))
    step_folder(tmp_path, state.plan[5]).mkdir()
    (step_folder(tmp_path, state.plan[5]) / MANIFEST).write_text("{}")
    assert resumed(tmp_path, CONFIG) == (state, 6)


def test_scales_follow_the_batches_and_their_drift_is_measured_from_the_start() -> None:
    start = RewardModel(kind=RewardKind.FDR, scales=(FamilyScale(family="family-1", value=4.0, attempts=9),))
    config = RPRConfig.model_validate({"reward": {"online": True, "online_alpha": 0.5, "online_min_attempts": 3}})
    batch = [factories.trajectory(10 * n + 1, passed=False) for n in range(3)]
    assert {t.family for t in batch} == {"family-1"}
    state = RefineState.begin(config)
    assert state.reward(start) is start
    level = float(batch[0].progress)
    (first,) = state.follow(config, start, batch)
    assert first.after == pytest.approx(max((4.0 + level) / 2, 1.0))
    assert state.reward(start).scale_of("family-1") == first.after
    (second,) = state.follow(config, start, batch)
    assert (second.before, second.at_start) == (first.after, 4.0)
    assert second.alarm
    assert state.follow(config, start, batch[:2]) == ()  # too few attempts: the scale stays


def test_a_reward_without_scales_cannot_follow_anything() -> None:
    with pytest.raises(ValidationError, match="binary has no family scales"):
        RPRConfig.model_validate({"reward": {"kind": "binary", "online": True}})
    with pytest.raises(ValidationError, match="ev_alarm"):
        RPRConfig.model_validate({"ev_alarm": "shout"})
