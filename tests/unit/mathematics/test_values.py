"""Explained variance from sums (spec §3.5) and the staleness alarm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.domain import Phase
from stages.errors import RewardError
from stages.values import EVBreakdown, EVPoint, EVSums, by_phase, explained_variance, staleness

ROW = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)


@given(st.lists(ROW, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_ev_is_global_however_the_batch_is_split(batch: list[list[tuple[float, float]]], rnd: object) -> None:
    """1 − Var(G − V)/Var(G) over all nodes; merging ranks in any order and shape gives the same."""
    pairs = np.array([p for row in batch for p in row])
    v, g = pairs[:, 0], pairs[:, 1]
    whole = EVSums()
    whole.add(v, g)
    parts = []
    for row in batch:
        sums = EVSums()
        sums.add(np.array(row)[:, 0], np.array(row)[:, 1])
        parts.append(sums.to_row())
    rnd.shuffle(parts)  # type: ignore[attr-defined]
    merged = EVSums.from_rows(parts)
    assert merged.n == whole.n == len(v)
    if g.min() == g.max():
        assert whole.value is None
        assert merged.value is None
    elif np.var(g) > 1e-3:
        want = 1.0 - np.var(g - v) / np.var(g)
        assert whole.value == pytest.approx(want, abs=1e-9 * max(1.0, abs(want)))
        assert merged.value == pytest.approx(want, abs=1e-9 * max(1.0, abs(want)))


def test_ev_of_known_critics() -> None:
    g = np.array([0.0, 1.0, 2.0])
    assert explained_variance([g], [g]) == 1.0
    assert explained_variance([np.full(3, 7.0)], [g]) == pytest.approx(0.0)  # a constant, however wrong
    assert explained_variance([-g], [g]) == pytest.approx(-3.0)  # worse than a constant
    # per trajectory both are undefined or perfect; only the global figure tells
    assert explained_variance([np.array([0.0]), np.array([0.0])], [np.array([0.0]), np.array([1.0])]) == pytest.approx(
        0.0
    )


@pytest.mark.parametrize("level", [0.0, 0.1, 1 / 3, 1e9])
def test_ev_is_missing_when_returns_do_not_vary(level: float) -> None:
    """Not 0, not 1, and not the noise of rounding: .1 summed ten times has a variance in floats."""
    sums = EVSums()
    for _ in range(10):
        sums.add(np.array([0.3, 0.7]), np.full(2, level))
    assert sums.value is None
    assert EVSums().value is None


def test_nan_rewards_are_excluded_and_counted() -> None:
    sums = EVSums()
    sums.add(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    sums.add(np.array([0.0, 1.0]), np.array([np.nan, 1.0]))
    assert (sums.value, sums.excluded, sums.n) == (1.0, 1, 2)
    with pytest.raises(RewardError, match="critic"):
        sums.add(np.array([np.nan]), np.array([1.0]))
    with pytest.raises(ValueError, match="shape"):
        sums.add(np.zeros(2), np.zeros(3))


def test_breakdown_by_family_and_turn() -> None:
    table = EVBreakdown(max_turn=1)
    g = np.array([0.0, 1.0, 5.0, 9.0])
    table.add(family="net", turn_ids=np.array([0, 0, 1, 7]), values=g, returns=g)
    other = EVBreakdown(max_turn=1)
    other.add(family="git", turn_ids=np.array([0]), values=np.array([1.0]), returns=np.array([3.0]))
    other.add(family="git", turn_ids=np.array([0]), values=np.array([1.0]), returns=np.array([np.nan]))
    table.merge(other)
    got = table.metrics()
    assert set(got) == {
        "critic/vf_explained_var",
        "critic/vf_explained_var/family/git",
        "critic/vf_explained_var/family/net",
        "critic/vf_explained_var/turn/00",
        "critic/vf_explained_var/turn/01",
    }
    assert got["critic/vf_explained_var/family/net"] == 1.0
    assert got["critic/vf_explained_var/family/git"] is None
    assert table.by_turn[0].n == 3
    assert table.by_turn[1].n == 2
    assert table.total.excluded == 1


def _curve(*values: float | None, phase: Phase = Phase.JOINT, start: int = 1) -> list[EVPoint]:
    return [EVPoint(phase=phase, step=start + i, value=v) for i, v in enumerate(values)]


def test_staleness_needs_patience_in_a_row() -> None:
    assert staleness(_curve(0.1, -0.1, -0.2), patience=3) is None
    found = staleness(_curve(0.1, -0.1, -0.4, -0.2), patience=3)
    assert found is not None
    assert (found.first_step, found.last_step, found.steps, found.lowest) == (2, 4, 3, -0.4)
    assert staleness(_curve(-0.1, -0.4, -0.2, 0.0), patience=3) is None  # EV = 0 is not below 0
    assert staleness(_curve(-0.1, None, -0.2), patience=2) is not None  # undefined: neither ends nor lengthens
    assert staleness(_curve(-0.1, None), patience=2) is None
    assert staleness([], patience=1) is None
    with pytest.raises(ValueError, match="at least 1"):
        staleness([], patience=0)


def test_staleness_does_not_cross_phases() -> None:
    curve = _curve(-1.0, -1.0, -1.0, phase=Phase.WARMUP) + _curve(-0.1)
    assert staleness(curve, patience=2) is None
    assert staleness(curve, patience=2, phases=(Phase.WARMUP, Phase.JOINT)) is None
    assert staleness(curve[:3], patience=2, phases=(Phase.WARMUP,)) is not None
    assert {p: len(points) for p, points in by_phase(curve).items()} == {Phase.WARMUP: 3, Phase.JOINT: 1}
