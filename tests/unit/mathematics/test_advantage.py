"""Facts that spec §3.1-§3.4 say tests must hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.advantage import (
    Carry,
    Estimator,
    Handover,
    SegmentNodes,
    TimeLimit,
    continuation_weights,
    estimators_coincide,
    monte_carlo_returns,
    node_positions,
    segment_nodes,
    token_gae,
    trajectory_advantages,
    turn_boundary_gae,
    whiten,
)
from stages.domain import Segment
from stages.errors import RewardError
from tests.unit.mathematics import reference

NUMBER = st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 6))
CLOCK = st.floats(0.05, 1.0).map(lambda x: round(x, 6))


@st.composite
def nodes(
    draw: st.DrawFn, inner_rewards: bool = False, max_turns: int = 6
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values, rewards, turn ids) of one trajectory; rewards at turn ends unless `inner_rewards`."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_turns))
    n = sum(lengths)
    turns = np.repeat(np.arange(len(lengths)), lengths)
    values = np.array(draw(st.lists(NUMBER, min_size=n, max_size=n)))
    rewards = np.array(draw(st.lists(NUMBER, min_size=n, max_size=n)))
    if not inner_rewards:
        rewards[np.append(turns[1:] == turns[:-1], False)] = 0.0
    return values, rewards, turns


def _check_case(case: dict[str, Any]) -> None:
    turns = np.repeat(np.arange(len(case["tokens_per_turn"])), case["tokens_per_turn"])
    v, r = np.array(case["values"], dtype=float), np.array(case["rewards"], dtype=float)
    clocks = case["gamma_turn"], case["lambda_turn"]
    full = turn_boundary_gae(v, r, turns, *clocks)
    np.testing.assert_allclose(full.advantages, case["advantages"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(full.value_targets, case["returns"], rtol=0, atol=1e-12)
    cut = case["cut"]
    if cut is None:
        return
    b = cut["after_node"] + 1
    after = turn_boundary_gae(v[b:], r[b:], turns[b:], *clocks)
    assert after.carry is not None
    assert after.carry.value == cut["carry_value"]
    assert after.carry.advantage == pytest.approx(cut["carry_advantage"], abs=1e-12)
    exact = turn_boundary_gae(v[:b], r[:b], turns[:b], *clocks, after.carry)
    np.testing.assert_allclose(exact.advantages, case["advantages"][:b], rtol=0, atol=1e-12)
    alone = Carry(value=after.carry.value, turn_id=after.carry.turn_id)
    without = turn_boundary_gae(v[:b], r[:b], turns[:b], *clocks, alone)
    np.testing.assert_allclose(without.advantages, cut["advantages_without_advantage_carry"], rtol=0, atol=1e-12)


def test_shared_reference_cases() -> None:
    cases = reference.shared_case("tb_gae.json")["cases"]
    assert len(cases) == 40
    for case in cases:
        _check_case(case)


@pytest.mark.parametrize("case", json.loads((reference.OWN / "tb_gae.json").read_text())["cases"])
def test_own_cases_worked_by_hand(case: dict[str, Any]) -> None:
    _check_case(case)


@given(nodes(inner_rewards=True), CLOCK, CLOCK)
def test_equals_the_definition_in_exact_arithmetic(data: Any, gamma: float, lam: float) -> None:
    v, r, turns = data
    got = turn_boundary_gae(v, r, turns, gamma, lam)
    advantages, returns = reference.tb_gae(v.tolist(), r.tolist(), turns.tolist(), gamma, lam)
    np.testing.assert_allclose(got.advantages, [float(a) for a in advantages], rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.returns, [float(g) for g in returns], rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.value_targets, got.advantages + v, rtol=0, atol=1e-12)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 50), min_size=8, max_size=8),
    CLOCK,
    CLOCK,
)
def test_decay_is_per_boundary_whatever_the_lengths(
    lengths: list[int], gaps: list[int], gamma: float, lam: float
) -> None:
    """A terminal reward decays by (γ_turn λ_turn)^B exactly, B the boundaries crossed; observations do not count."""
    turn_ids: list[int] = []
    for turn, length in enumerate(lengths):
        turn_ids += [turn] * length + [-1] * gaps[turn]
    turns_T = np.array(turn_ids)
    turns = turns_T[turns_T >= 0]
    zero, reward = np.zeros(len(turns)), np.zeros(len(turns))
    reward[-1] = 1.0
    got = turn_boundary_gae(zero, reward, turns, gamma, lam).advantages
    boundaries = (len(lengths) - 1) - turns
    np.testing.assert_allclose(got, (gamma * lam) ** boundaries, rtol=1e-12)


@given(nodes(), CLOCK, CLOCK, st.integers(0, 40), st.randoms(use_true_random=False))
def test_inserted_observations_change_nothing(data: Any, gamma: float, lam: float, extra: int, rnd: Any) -> None:
    v, r, turns = data
    before = turn_boundary_gae(v, r, turns, gamma, lam).advantages
    mask = [True] * len(v)
    for _ in range(extra):
        mask.insert(rnd.randrange(len(mask) + 1), False)
    mask_T = np.array(mask)
    turns_T = np.full(len(mask_T), -1)
    turns_T[mask_T] = turns
    values_T = np.full(len(mask_T), 99.0)  # what the critic says about observations must not matter
    values_T[mask_T] = v
    segment = Segment(
        tokens=np.zeros(len(mask_T), dtype=np.int32),
        loss_mask=mask_T,
        rollout_log_probs=np.zeros(len(mask_T), dtype=np.float32),
        turn_ids=turns_T,
    )
    picked = segment_nodes(segment, values_T)
    after = turn_boundary_gae(picked.values, r, picked.turn_ids, gamma, lam).advantages
    np.testing.assert_array_equal(after, before)
    spread = picked.to_tokens(after)
    np.testing.assert_array_equal(spread[mask_T], before.astype(np.float32))
    assert not spread[~mask_T].any()


@given(nodes(), CLOCK, CLOCK)
def test_inside_a_turn_a_shared_return_is_not_a_shared_advantage(data: Any, gamma: float, lam: float) -> None:
    v, r, turns = data
    got = turn_boundary_gae(v, r, turns, gamma, lam)
    for turn in np.unique(turns):
        at = np.flatnonzero(turns == turn)
        end, following = at[-1], at[-1] + 1
        u = r[end]
        if following < len(v):
            u += gamma * v[following] + gamma * lam * got.advantages[following]
        np.testing.assert_allclose(got.advantages[at], u - v[at], rtol=0, atol=1e-12)


@given(nodes(inner_rewards=True))
def test_unit_clocks_are_token_gae_over_policy_tokens(data: Any) -> None:
    v, r, turns = data
    a, b = turn_boundary_gae(v, r, turns, 1.0, 1.0), token_gae(v, r, 1.0, 1.0)
    np.testing.assert_allclose(a.advantages, b.advantages, rtol=0, atol=1e-12)
    np.testing.assert_allclose(a.returns, b.returns, rtol=0, atol=1e-12)


@given(nodes(inner_rewards=True), CLOCK, CLOCK)
def test_token_gae_is_the_sum_of_discounted_deltas(data: Any, gamma: float, lam: float) -> None:
    v, r, _ = data
    delta = r + gamma * np.append(v[1:], 0.0) - v
    want = [sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(v))) for i in range(len(v))]
    np.testing.assert_allclose(token_gae(v, r, gamma, lam).advantages, want, rtol=0, atol=1e-12)


@given(nodes(inner_rewards=True), CLOCK, CLOCK, st.data())
def test_cuts_anywhere_are_exact_with_a_carry_and_off_by_w_times_a_without(
    data: Any, gamma: float, lam: float, draw: st.DataObject
) -> None:
    v, r, turns = data
    if len(v) < 2:
        return
    b = draw.draw(st.integers(1, len(v) - 1))  # also in the middle of a turn
    full = turn_boundary_gae(v, r, turns, gamma, lam)
    after = turn_boundary_gae(v[b:], r[b:], turns[b:], gamma, lam).carry
    assert after is not None
    exact = turn_boundary_gae(v[:b], r[:b], turns[:b], gamma, lam, after)
    np.testing.assert_allclose(exact.advantages, full.advantages[:b], rtol=0, atol=1e-12)
    np.testing.assert_allclose(exact.returns, full.returns[:b], rtol=0, atol=1e-12)
    cut = turn_boundary_gae(v[:b], r[:b], turns[:b], gamma, lam, Carry(value=after.value, turn_id=after.turn_id))
    w = continuation_weights(turns[:b], gamma, lam, after.turn_id)
    np.testing.assert_allclose(full.advantages[:b] - cut.advantages, w * full.advantages[b], rtol=0, atol=1e-12)
    whole = token_gae(v, r, gamma, lam)
    tail = token_gae(v[b:], r[b:], gamma, lam)
    head = token_gae(v[:b], r[:b], gamma, lam, tail.carry)
    np.testing.assert_allclose(head.advantages, whole.advantages[:b], rtol=0, atol=1e-12)


@given(nodes(inner_rewards=True), CLOCK, CLOCK)
def test_returns_are_free_of_lambda_and_of_the_critic(data: Any, gamma: float, lam: float) -> None:
    v, r, turns = data
    want = monte_carlo_returns(r, turns, gamma)
    np.testing.assert_allclose(turn_boundary_gae(v, r, turns, gamma, lam).returns, want, rtol=0, atol=1e-12)
    np.testing.assert_allclose(turn_boundary_gae(v, r, turns, gamma, 1.0).value_targets, want, rtol=0, atol=1e-9)


def test_observations_are_nodes_only_for_token_all() -> None:
    mask = np.array([False, True, True, False, False, True, False])
    assert node_positions(mask).tolist() == [1, 2, 5]
    assert node_positions(mask, Estimator.TOKEN_POLICY).tolist() == [1, 2, 5]
    assert node_positions(mask, Estimator.TOKEN_ALL).tolist() == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ segments, endings


def _split(v: np.ndarray, turns: np.ndarray, turn: int, end_value: float | None = None) -> list[SegmentNodes]:
    at = turns < turn
    return [
        SegmentNodes(values=v[at], turn_ids=turns[at], end_value=end_value),
        SegmentNodes(values=np.empty(0), turn_ids=np.empty(0, dtype=int)),  # a summary with m = 0
        SegmentNodes(values=v[~at], turn_ids=turns[~at]),
    ]


@given(nodes(max_turns=6), CLOCK, CLOCK, NUMBER, st.integers(1, 5))
def test_full_handover_is_the_unsegmented_recursion(
    data: Any, gamma: float, lam: float, reward: float, turn: int
) -> None:
    v, _, turns = data
    r = np.zeros(len(v))
    r[-1] = reward
    want = turn_boundary_gae(v, r, turns, gamma, lam)
    got = trajectory_advantages(_split(v, turns, turn), reward=reward, gamma=gamma, lam=lam)
    for name in ("advantages", "returns", "value_targets"):
        joined = np.concatenate([getattr(s, name) for s in got.segments])
        np.testing.assert_allclose(joined, getattr(want, name), rtol=0, atol=1e-12)


@given(nodes(max_turns=6), CLOCK, CLOCK, NUMBER, st.integers(1, 5), NUMBER)
def test_value_only_is_off_by_the_reported_error(
    data: Any, gamma: float, lam: float, reward: float, turn: int, old: float
) -> None:
    v, _, turns = data
    segments = _split(v, turns, turn, end_value=old)
    full = trajectory_advantages(segments, reward=reward, gamma=gamma, lam=lam)
    part = trajectory_advantages(segments, reward=reward, gamma=gamma, lam=lam, handover=Handover.VALUE_ONLY)
    if not len(segments[0].values) or not len(segments[2].values):
        assert full.handovers == ()
        return
    for report in (full.handovers[0], part.handovers[0]):
        assert report.next_value == segments[2].values[0]
        assert report.value_gap == pytest.approx(segments[2].values[0] - old)
        error = full.segments[0].advantages - part.segments[0].advantages
        assert error[-1] == pytest.approx(report.dropped_last, abs=1e-12)
        assert np.sqrt(np.mean(error**2)) == pytest.approx(report.dropped_rms, abs=1e-12)
    np.testing.assert_allclose(part.segments[0].returns, full.segments[0].returns, rtol=0, atol=1e-12)


@given(nodes(max_turns=6), CLOCK, CLOCK, NUMBER, st.integers(1, 5))
def test_no_handover_makes_each_segment_a_terminal_episode(
    data: Any, gamma: float, lam: float, reward: float, turn: int
) -> None:
    v, _, turns = data
    segments = _split(v, turns, turn)
    got = trajectory_advantages(segments, reward=reward, gamma=gamma, lam=lam, handover=Handover.NONE)
    for seg, result in zip(segments, got.segments, strict=True):
        alone = trajectory_advantages([seg], reward=reward, gamma=gamma, lam=lam)
        np.testing.assert_allclose(result.advantages, alone.segments[0].advantages, rtol=0, atol=1e-12)
        np.testing.assert_allclose(result.returns, alone.segments[0].returns, rtol=0, atol=1e-12)


def test_three_segments_carry_through_the_middle_one() -> None:
    v, turns = np.array([0.5, -0.25, 1.0]), np.array([0, 1, 2])
    segments = [SegmentNodes(values=v[i : i + 1], turn_ids=turns[i : i + 1]) for i in range(3)]
    want = turn_boundary_gae(v, np.array([0.0, 0.0, 1.0]), turns, 0.5, 0.5).advantages
    got = trajectory_advantages(segments, reward=1.0, gamma=0.5, lam=0.5)
    assert [s.advantages[0] for s in got.segments] == want.tolist()
    # the error that value_only reports at the first boundary is about the true A of segment 1, not the cut one
    part = trajectory_advantages(segments, reward=1.0, gamma=0.5, lam=0.5, handover=Handover.VALUE_ONLY)
    assert [h.dropped_last for h in part.handovers] == [0.25 * want[1], 0.25 * want[2]]


def test_a_segment_boundary_is_a_turn_boundary_even_inside_one_turn_id() -> None:
    one = SegmentNodes(values=np.zeros(1), turn_ids=np.array([3]))
    got = trajectory_advantages([one, one], reward=1.0, gamma=0.5, lam=1.0)
    assert got.segments[0].advantages.tolist() == [0.5]


def test_turn_rewards_land_on_the_last_node_of_their_turn() -> None:
    seg = SegmentNodes(values=np.zeros(4), turn_ids=np.array([0, 0, 1, 1]))
    got = trajectory_advantages([seg], reward=1.0, turn_rewards={0: 0.5, 1: 0.25}, gamma=0.5, lam=1.0)
    assert got.segments[0].advantages.tolist() == [1.125, 1.125, 1.25, 1.25]


def test_time_limit_options() -> None:
    seg = SegmentNodes(values=np.array([0.5, 0.5]), turn_ids=np.array([0, 1]), end_value=2.0)

    def run(**kw: Any) -> Any:
        return trajectory_advantages([seg], reward=1.0, gamma=0.5, lam=1.0, **kw)

    assert run(truncated=True).segments[0].advantages.tolist() == [0.0, 0.5]  # terminal by default
    boot = run(truncated=True, time_limit=TimeLimit.BOOTSTRAP)
    assert boot.segments[0].advantages.tolist() == [0.5, 1.5]
    assert boot.segments[0].returns.tolist() == [1.0, 2.0]
    assert run(time_limit=TimeLimit.BOOTSTRAP).segments[0].advantages.tolist() == [0.0, 0.5]  # it was not truncated
    masked = run(truncated=True, time_limit=TimeLimit.MASK)
    assert masked.excluded == "time_limit"
    assert not masked.segments[0].advantages.any()
    bare = SegmentNodes(values=seg.values, turn_ids=seg.turn_ids)
    with pytest.raises(ValueError, match="end_value"):
        trajectory_advantages([bare], reward=1.0, truncated=True, time_limit=TimeLimit.BOOTSTRAP)


def test_attempts_without_a_verdict_or_a_node_are_no_samples() -> None:
    seg = SegmentNodes(values=np.ones(2), turn_ids=np.array([0, 0]), end_value=5.0)
    none = trajectory_advantages([seg], reward=None, truncated=True, time_limit=TimeLimit.BOOTSTRAP)
    assert none.excluded == "no_verdict"
    assert not none.segments[0].advantages.any()
    empty = SegmentNodes(values=np.empty(0), turn_ids=np.empty(0, dtype=int))
    assert trajectory_advantages([empty], reward=1.0).excluded == "no_nodes"
    assert trajectory_advantages([], reward=1.0).excluded == "no_nodes"


@given(nodes(max_turns=6), CLOCK, CLOCK, NUMBER, st.integers(1, 5))
def test_token_estimators_cross_segments_like_one_more_token(
    data: Any, gamma: float, lam: float, reward: float, turn: int
) -> None:
    v, _, turns = data
    r = np.zeros(len(v))
    r[-1] = reward
    want = token_gae(v, r, gamma, lam)
    segments = _split(v, turns, turn)
    got = trajectory_advantages(segments, reward=reward, gamma=gamma, lam=lam, estimator=Estimator.TOKEN_POLICY)
    np.testing.assert_allclose(
        np.concatenate([s.advantages for s in got.segments]), want.advantages, rtol=0, atol=1e-12
    )
    part = trajectory_advantages(
        segments, reward=reward, gamma=gamma, lam=lam, estimator=Estimator.TOKEN_POLICY, handover=Handover.VALUE_ONLY
    )
    if got.handovers:
        error = got.segments[0].advantages - part.segments[0].advantages
        assert np.sqrt(np.mean(error**2)) == pytest.approx(part.handovers[0].dropped_rms, abs=1e-12)


def test_estimators_that_are_the_same_function() -> None:
    assert estimators_coincide((Estimator.TB_GAE, 1.0, 1.0), (Estimator.TOKEN_ALL, 1.0, 1.0))
    assert not estimators_coincide((Estimator.TB_GAE, 1.0, 0.95), (Estimator.TOKEN_ALL, 1.0, 0.95))
    assert not estimators_coincide((Estimator.TB_GAE, 1.0, 1.0), (Estimator.TB_GAE, 1.0, 0.95))


def test_bad_input_is_named() -> None:
    turns = np.array([0, 0])
    with pytest.raises(RewardError, match="reward of node 1"):
        turn_boundary_gae(np.zeros(2), np.array([0.0, np.nan]), turns)
    with pytest.raises(RewardError, match="value of node 0"):
        token_gae(np.array([np.inf, 0.0]), np.zeros(2))
    with pytest.raises(ValueError, match="never decrease"):
        turn_boundary_gae(np.zeros(2), np.zeros(2), np.array([1, 0]))
    with pytest.raises(ValueError, match=r"\[N\]"):
        turn_boundary_gae(np.zeros(2), np.zeros(3), turns)
    with pytest.raises(RewardError):
        trajectory_advantages([SegmentNodes(values=np.zeros(2), turn_ids=turns)], reward=float("nan"))


@given(st.lists(st.lists(NUMBER, max_size=5), max_size=5))
def test_whitening_is_over_the_whole_batch(batch: list[list[float]]) -> None:
    got = whiten([np.array(a) for a in batch])
    flat = np.concatenate([np.empty(0), *got])
    before = np.concatenate([np.empty(0), *[np.array(a) for a in batch]])
    if before.size > 1 and before.std() > 1e-5:
        assert flat.mean() == pytest.approx(0, abs=1e-6)
        assert flat.std() == pytest.approx(1)
    elif before.size and before.min() == before.max():
        assert not flat.any()
