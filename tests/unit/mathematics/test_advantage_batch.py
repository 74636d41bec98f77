"""The vectorised TB-GAE equals the one-trajectory form, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.advantage import Carry, turn_boundary_gae
from stages.advantage_batch import find_runs, turn_boundary_gae_batch
from stages.errors import RewardError


def _batch(seed: int, long_runs: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """values [B, T], turn_ids [B, T] and rewards [B]; padded rows, gaps inside turns, turns without a gap between."""
    rng = np.random.default_rng(seed)
    b, t = int(rng.integers(1, 6)), int(rng.integers(1, 40)) * (20 if long_runs else 1)
    turn_ids = np.full((b, t), -1, dtype=np.int32)
    for row in range(b):
        at, turn = int(rng.integers(0, 4)), 0
        while at < t and rng.random() > 0.05:
            length = int(rng.integers(1, 200 if long_runs else 6))
            turn_ids[row, at : at + length] = turn
            at += length + int(rng.integers(0, 4))
            turn += int(rng.integers(0, 3))  # 0: the same turn goes on after a gap
    return rng.normal(size=(b, t)), turn_ids, rng.normal(size=b)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([(1.0, 1.0), (1.0, 0.95), (0.9, 0.8)]), st.booleans())
def test_batch_equals_single(seed: int, long_runs: bool, clocks: tuple[float, float], continued: bool) -> None:
    values, turn_ids, rewards = _batch(seed, long_runs)
    b = len(values)
    rng = np.random.default_rng(seed + 1)
    turn_rewards = rng.normal(size=(b, int(turn_ids.max(initial=0)) + 1))
    nxt = [rng.normal(size=b) for _ in range(3)] if continued else [None] * 3
    got = turn_boundary_gae_batch(
        values,
        turn_ids,
        rewards,
        *clocks,
        turn_rewards=turn_rewards,
        next_values=nxt[0],
        next_advantages=nxt[1],
        next_returns=nxt[2],
    )
    targets, returns = got.value_targets(), got.returns()
    for row in range(b):
        at = turn_ids[row] >= 0
        assert (row in got.rows_without_nodes.tolist()) == (not at.any())
        assert not got.advantages[row][~at].any()
        assert not targets[row][~at].any()
        if not at.any():
            continue
        turns = turn_ids[row][at]
        r = np.zeros(len(turns))
        ends = np.flatnonzero(np.append(turns[1:] != turns[:-1], True))
        r[ends] = turn_rewards[row, turns[ends]]
        r[-1] += rewards[row]
        carry = None
        if continued:
            carry = Carry(value=nxt[0][row], advantage=nxt[1][row], mc_return=nxt[2][row])  # type: ignore[index]
        want = turn_boundary_gae(values[row][at], r, turns, *clocks, carry)
        np.testing.assert_allclose(got.advantages[row][at], want.advantages, rtol=0, atol=1e-12)
        np.testing.assert_allclose(targets[row][at], want.value_targets, rtol=0, atol=1e-12)
        np.testing.assert_allclose(returns[row][at], want.returns, rtol=0, atol=1e-12)


def test_runs_of_a_small_batch() -> None:
    runs = find_runs(np.array([[0, 0, -1, 0, 1], [-1, -1, -1, -1, -1], [1, -1, 2, 2, -1]]))
    assert runs.rows.tolist() == [0, 0, 0, 2, 2]
    assert runs.starts.tolist() == [0, 3, 4, 10, 12]
    assert runs.stops.tolist() == [2, 4, 5, 11, 14]
    assert runs.turn_ids.tolist() == [0, 0, 1, 1, 2]
    assert runs.nodes == 7


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 4)])
def test_batches_without_nodes(shape: tuple[int, int]) -> None:
    got = turn_boundary_gae_batch(np.zeros(shape), np.full(shape, -1), np.full(shape[0], np.nan))
    assert got.rows_without_nodes.tolist() == list(range(shape[0]))
    assert got.advantages.shape == shape


def test_bad_batches_are_named() -> None:
    turns = np.array([[0, 0]])
    with pytest.raises(RewardError, match="reward"):
        turn_boundary_gae_batch(np.zeros((1, 2)), turns, np.array([np.nan]))
    with pytest.raises(RewardError, match="value"):
        turn_boundary_gae_batch(np.array([[np.nan, 0.0]]), turns, np.zeros(1))
    with pytest.raises(RewardError, match="value"):
        turn_boundary_gae_batch(np.zeros((1, 2)), turns, np.zeros(1), next_values=np.array([np.inf]))
    with pytest.raises(ValueError, match="row 0 decrease"):
        find_runs(np.array([[1, 0]]))
    with pytest.raises(ValueError, match="must be"):
        turn_boundary_gae_batch(np.zeros((1, 3)), turns, np.zeros(1))
