"""Intervals, tests and power. Simulations use fixed seeds and wide margins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from stages import statistics as s


@given(st.integers(1, 500), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_equals_scipy(of: int, data: st.DataObject, level: float) -> None:
    passed = data.draw(st.integers(0, of))
    got = s.wilson(passed, of, level)
    want = scipy_stats.binomtest(passed, of).proportion_ci(level, method="wilson")
    assert got is not None
    assert (got.low, got.high) == pytest.approx((want.low, want.high), abs=1e-12)
    assert 0.0 <= got.low <= passed / of <= got.high <= 1.0


def test_nothing_to_divide_by_is_missing() -> None:
    assert s.wilson(0, 0) is None
    assert s.clustered_wilson(np.zeros(3), np.zeros(3)) is None
    assert s.bootstrap_rate(np.array([1]), np.array([3])) is None
    assert s.bootstrap_mean(np.empty(0)) is None
    assert s.sign_flip_p(np.empty(0)) is None
    with pytest.raises(ValueError, match="not a rate"):
        s.wilson(3, 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_clustered_wilson_is_never_narrower_than_the_independent_one(passed: list[int]) -> None:
    x, m = np.array(passed), np.full(len(passed), 3)
    clustered, plain = s.clustered_wilson(x, m), s.wilson(int(x.sum()), int(m.sum()))
    assert clustered is not None
    assert plain is not None
    assert clustered.high - clustered.low >= plain.high - plain.low - 1e-12
    assert clustered.low <= x.sum() / m.sum() <= clustered.high


@pytest.mark.parametrize("passed", [0, 3])
def test_without_variance_a_task_counts_as_one_attempt(passed: int) -> None:
    """20 tasks × 3 equal attempts say no more than 20 attempts, and the bootstrap says nothing."""
    x, m = np.full(20, passed), np.full(20, 3)
    got, want = s.clustered_wilson(x, m), s.wilson(20 * (passed // 3), 20)
    assert got is not None
    assert want is not None
    assert (got.low, got.high) == pytest.approx((want.low, want.high))
    assert s.bootstrap_rate(x, m) is None


def test_one_attempt_per_task_has_no_design_effect() -> None:
    x = np.array([0, 1] * 20)
    assert s.design_effect(x, np.ones(40)) == pytest.approx(40 / 39)
    # tasks that are always or never solved: three attempts are worth one
    assert s.design_effect(3 * x, np.full(40, 3)) == pytest.approx(3 * 40 / 39)


def test_intervals_cover_the_truth_when_tasks_differ() -> None:
    """89 tasks × 5 attempts with very different difficulty: attempts are not independent, and it shows."""
    rng = np.random.default_rng(7)
    truth, runs = 0.3 / 1.1, 150
    hits = {"clustered": 0, "plain": 0, "bootstrap": 0}
    for _ in range(runs):
        x, m = rng.binomial(5, rng.beta(0.3, 0.8, size=89)), np.full(89, 5)
        found = {
            "clustered": s.clustered_wilson(x, m),
            "plain": s.wilson(int(x.sum()), 445),
            "bootstrap": s.bootstrap_rate(x, m, resamples=299),
        }
        for name, interval in found.items():
            assert interval is not None
            hits[name] += interval.low <= truth <= interval.high
    assert hits["clustered"] / runs > 0.88
    assert hits["bootstrap"] / runs > 0.86
    assert hits["plain"] / runs < 0.85


def test_bootstrap_is_seeded_and_pools_unequal_denominators() -> None:
    x, m = np.array([3, 0, 1, 2, 0]), np.array([3, 1, 3, 2, 0])
    one, two = (s.bootstrap_rate(x, m, seed=3, resamples=999) for _ in range(2))
    assert one == two
    many = (np.arange(40) % 4, np.full(40, 3))
    assert s.bootstrap_rate(*many, seed=3, resamples=999) != s.bootstrap_rate(*many, seed=4, resamples=999)
    assert one == s.bootstrap_rate(x[:4], m[:4], seed=3, resamples=999)  # a task without a verdict adds nothing
    assert one is not None
    assert 0.0 <= one.low < 6 / 9 < one.high <= 1.0


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 3.0]), min_size=1, max_size=8))
def test_sign_flip_is_exact_for_few_tasks(differences: list[float]) -> None:
    d = np.array(differences)
    flipped = [abs(np.dot(d, signs)) for signs in itertools.product((1, -1), repeat=len(d))]
    want = np.mean([f >= abs(d.sum()) - 1e-9 for f in flipped])
    assert s.sign_flip_p(d) == pytest.approx(want)


def test_sign_flip_with_many_tasks_is_random_but_seeded() -> None:
    d = np.random.default_rng(0).normal(0.1, 0.5, 60)
    assert s.sign_flip_p(d, seed=1) == s.sign_flip_p(d, seed=1)
    got = s.sign_flip_p(d, seed=1)
    assert got is not None
    assert got == pytest.approx(scipy_stats.ttest_1samp(d, 0).pvalue, abs=0.05)
    shifted = s.sign_flip_p(d + 1.0)
    assert shifted is not None
    assert 0.0 < shifted <= 2 / 10_000  # never 0: the data are one of the flips


def test_sign_test_is_mcnemar() -> None:
    assert s.sign_test_p(8, 2) == pytest.approx(2 * sum(math.comb(10, k) for k in range(3)) / 2**10)
    assert s.sign_test_p(5, 5) == 1.0
    assert s.sign_test_p(0, 0) is None


@given(st.integers(0, 200), st.integers(0, 200))
def test_sign_test_equals_scipy(improved: int, worsened: int) -> None:
    got = s.sign_test_p(improved, worsened)
    if improved + worsened == 0:
        assert got is None
    else:
        assert got == pytest.approx(scipy_stats.binomtest(improved, improved + worsened).pvalue, rel=1e-9)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.04, 0.2, 1.0]), min_size=1, max_size=8))
def test_holm_is_the_closed_test_of_bonferroni(p: list[float]) -> None:
    """Holm is the closure of Bonferroni: p_i is the largest Bonferroni p over all subsets that hold i."""
    subsets = [c for n in range(1, len(p) + 1) for c in itertools.combinations(range(len(p)), n)]
    for i, got in enumerate(s.holm(p)):
        want = max(min(1.0, len(c) * min(p[j] for j in c)) for c in subsets if i in c)
        assert got == pytest.approx(want)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_seeds_equal_scipys_t(values: list[float], level: float) -> None:
    got = s.over_seeds(values, level=level)
    if got.interval is None:
        assert max(values) - min(values) < 1e-150  # their squares are no numbers any more
        return
    if np.std(values) < 1e-9:
        return  # scipy itself warns of lost digits
    want = scipy_stats.ttest_1samp(values, 0.0)
    found = want.confidence_interval(level)
    assert (got.interval.low, got.interval.high) == pytest.approx((found.low, found.high), abs=1e-9)
    assert got.p_value == pytest.approx(want.pvalue, abs=1e-9)


def test_holm_by_hand() -> None:
    assert s.holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert s.holm([0.5, 0.6]) == [1.0, 1.0]
    assert s.holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_monotone_and_never_below_p(p: list[float]) -> None:
    got = s.holm(p)
    for raw, adjusted in zip(p, got, strict=True):
        assert adjusted is not None
        assert raw <= adjusted <= 1.0
    order = np.argsort(p, kind="stable")
    assert (np.diff([got[i] for i in order]) >= 0).all()  # type: ignore[misc]


def test_power_matches_a_simulation() -> None:
    n = s.tasks_needed(0.5, 0.15)
    assert n is not None
    assert s.detectable_difference(0.5, n) == pytest.approx(0.15, rel=0.02)
    rng = np.random.default_rng(5)
    d = rng.normal(0.15, 0.5, size=(2000, n))
    seen = np.abs(d.mean(axis=1) / (d.std(axis=1, ddof=1) / math.sqrt(n))) > 1.96
    assert seen.mean() == pytest.approx(0.8, abs=0.04)
    assert s.tasks_needed(0.5, 0.0) is None
    assert s.tasks_needed(0.0, 0.1) is None
    assert s.detectable_difference(0.5, 1) is None


def test_seeds() -> None:
    got = s.over_seeds([0.5, 0.6, 0.7])
    want = scipy_stats.ttest_1samp([0.5, 0.6, 0.7], 0.0)
    interval = want.confidence_interval(0.95)
    assert got.interval is not None
    assert (got.interval.low, got.interval.high) == pytest.approx((interval.low, interval.high))
    assert got.p_value == pytest.approx(want.pvalue)
    alone = s.over_seeds([0.4])
    assert (alone.seeds, alone.mean, alone.deviation, alone.interval, alone.p_value) == (1, 0.4, None, None, None)
    same = s.over_seeds([0.1] * 10)
    assert (same.deviation, same.interval) == (0.0, None)
    for bad in ([], [0.1, math.nan]):
        with pytest.raises(ValueError, match="seeds need"):
            s.over_seeds(bad)


def test_optimism_of_equal_candidates_is_the_luck_of_the_best() -> None:
    rng = np.random.default_rng(2)
    estimates, truths = [], []
    for seed in range(40):
        p = rng.beta(1, 1, size=120)
        rates = rng.binomial(3, np.broadcast_to(p, (5, 120))) / 3
        got = s.selection_optimism(rates, splits=60, seed=seed)
        assert got is not None
        estimates.append(got.optimism)
        truths.append(got.apparent - p.mean())
        assert got.corrected == got.apparent - got.optimism
    assert np.mean(truths) > 0.01
    assert np.mean(estimates) == pytest.approx(np.mean(truths), rel=0.35)


def test_optimism_of_a_clear_winner_is_small() -> None:
    rates = np.array([np.full(40, 0.2), np.full(40, 0.9)])
    got = s.selection_optimism(rates)
    assert got is not None
    assert (got.best, got.apparent, got.optimism) == (1, pytest.approx(0.9), pytest.approx(0.0))
    assert s.selection_optimism(rates[:1]) is None
    assert s.selection_optimism(rates[:, :3]) is None
    with pytest.raises(ValueError, match="candidates, tasks"):
        s.selection_optimism(np.array([[0.1, np.nan]]))


def test_bootstrap_by_counts_has_the_distribution_of_resampled_tasks() -> None:
    """Drawing how often each distinct task occurs equals drawing tasks: the ends agree with scipy's to its noise."""
    from scipy.stats import bootstrap

    x, m = np.arange(60) % 4, np.where(np.arange(60) % 5, 3, 4)
    got = s.bootstrap_rate(x, m, seed=1)
    want = bootstrap(
        (x, m),
        lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert got is not None
    assert abs(got.low - want.low) < 0.006
    assert abs(got.high - want.high) < 0.006
