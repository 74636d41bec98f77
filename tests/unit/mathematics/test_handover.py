"""Metrics with and without the hand-over (spec §3.4)."""

from __future__ import annotations

import numpy as np
import pytest

from stages.advantage import Handover, SegmentNodes, TimeLimit, trajectory_advantages
from stages.handover import ScoredAttempt, handover_metrics


def _attempt(reward: float | None, *lengths: int, seed: int = 0, end: float | None = 0.5) -> ScoredAttempt:
    rng = np.random.default_rng(seed)
    segments, turn = [], 0
    for n in lengths:
        segments.append(SegmentNodes(values=rng.normal(size=n), turn_ids=np.arange(turn, turn + n), end_value=end))
        turn += n
    return ScoredAttempt(segments=tuple(segments), reward=reward)


def test_batches_without_a_boundary_have_no_such_metrics() -> None:
    assert handover_metrics([]) == {}
    assert handover_metrics([_attempt(1.0, 4), _attempt(1.0, 0, 4), _attempt(None, 3, 3)]) == {}
    masked = ScoredAttempt(segments=_attempt(1.0, 2, 2).segments, reward=1.0, truncated=True)
    assert handover_metrics([masked], time_limit=TimeLimit.MASK) == {}


def test_metrics_are_those_of_each_mode() -> None:
    batch = [
        _attempt(1.0, 3, 2, seed=1),
        _attempt(0.0, 2, 0, 3, 1, seed=2),
        _attempt(5.0, 9, seed=3),
        _attempt(None, 1, 1),
    ]
    got = handover_metrics(batch, gamma=0.9, lam=0.8)
    assert got["handover/boundaries"] == 3
    nexts = [batch[0].segments[1], batch[1].segments[2], batch[1].segments[3]]
    gaps = np.array([s.values[0] - 0.5 for s in nexts])
    assert got["handover/value_gap_mean"] == pytest.approx(gaps.mean())
    assert got["handover/value_gap_rms"] == pytest.approx(np.sqrt((gaps**2).mean()))
    for mode in Handover:
        advantages, returns, values = [], [], []
        for attempt in batch[:2]:
            result = trajectory_advantages(attempt.segments, reward=attempt.reward, gamma=0.9, lam=0.8, handover=mode)
            advantages += [s.advantages for s in result.segments]
            returns += [s.returns for s in result.segments]
            values += [s.values for s in attempt.segments]
        a, g, v = (np.concatenate(x) for x in (advantages, returns, values))
        assert got[f"handover/{mode}/advantage_mean"] == pytest.approx(a.mean())
        assert got[f"handover/{mode}/advantage_std"] == pytest.approx(a.std())
        assert got[f"handover/{mode}/vf_explained_var"] == pytest.approx(1 - np.var(g - v) / np.var(g))
    assert len({got[f"handover/{m}/advantage_mean"] for m in Handover}) == 3


def test_gap_is_missing_when_the_old_prefix_was_not_valued() -> None:
    got = handover_metrics([_attempt(1.0, 2, 2, end=None)])
    assert got["handover/value_gap_mean"] is None
    assert got["handover/dropped_rms"] is not None
