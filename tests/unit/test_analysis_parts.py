"""Small parts of the analyst's pages: smoothing, the memory of costly results, drift of frozen scales."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memo import Memo
from stages.domain import FamilyScale
from stages.recalibration import scale_drift
from webui.charts.analysis import smoothed

VALUES = st.lists(st.none() | st.floats(-10, 10), max_size=40)


@settings(deadline=None)
@given(values=VALUES, width=st.integers(1, 15))
def test_smoothing_keeps_gaps_and_stays_within_the_values(values: list[float | None], width: int) -> None:
    out = smoothed(values, width)
    assert [v is None for v in out] == [v is None for v in values]
    known = [v for v in values if v is not None]
    assert all(min(known) - 1e-9 <= v <= max(known) + 1e-9 for v in out if v is not None)


def test_smoothing_is_a_centred_mean_of_what_is_there() -> None:
    assert smoothed([0.0, 3.0, None, 9.0], 3) == [1.5, 1.5, None, 9.0]


def test_the_memo_forgets_what_was_used_longest_ago() -> None:
    memo: Memo[int] = Memo(2)
    memo.put("a", 1)
    memo.put("b", 2)
    assert memo.get("a") == 1
    memo.put("c", 3)
    assert (memo.get("a"), memo.get("b"), memo.get("c")) == (1, None, 3)


def test_drift_compares_levels_without_their_multiplier() -> None:
    frozen = [
        FamilyScale(family="f", value=8.0, attempts=10, multiplier=2.0),
        FamilyScale(family="g", value=4.0, attempts=9),
    ]
    now = [FamilyScale(family="f", value=4.4, attempts=30), FamilyScale(family="g", value=6.0, attempts=30)]
    f, g = scale_drift(frozen, now)
    assert (f.before, f.after, f.alarm) == (4.0, 4.4, False)
    assert (g.before, g.after, g.alarm) == (4.0, 6.0, True)
    assert (g.after - g.before) / g.before == pytest.approx(0.5)
