"""Facts of spec §4.1-§4.3."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.domain import FamilyScale, Stratum, Trajectory, Verdict
from stages.errors import RewardError
from stages.outcomes import Outcomes
from stages.rewards import (
    Progress,
    RewardKind,
    RewardModel,
    fdr_reward,
    fit_scales,
    floored_families,
    spr_reward,
)
from tests.unit.mathematics.trajectories import trajectory

COUNT = st.integers(0, 10_000)
SCALE = st.floats(1.0, 1000.0)


@given(COUNT, SCALE)
def test_spr_separates_failures_from_successes(p: int, d: float) -> None:
    """Every failure < 1 ≤ every success < 2; at equal P a success is worth exactly 1 more."""
    fail, win = spr_reward(np.array([p, p]), np.array([0, 1]), np.array([d, d]))
    assert 0.0 <= fail < 1.0 <= win < 2.0
    assert win == pytest.approx(fail + 1.0, abs=1e-15)
    assert fail == pytest.approx(float(Fraction(p) / (Fraction(p) + Fraction(d))), abs=1e-15)


@given(st.integers(0, 300), SCALE)
def test_spr_increases_and_is_concave_in_progress(p: int, d: float) -> None:
    a, b, c = spr_reward(np.arange(p, p + 3), np.zeros(3), np.full(3, d))
    assert a < b < c
    assert c - b < b - a


@given(st.lists(st.tuples(COUNT, st.booleans(), SCALE), min_size=1, max_size=30))
def test_spr_variance_is_at_most_one(rows: list[tuple[int, bool, float]]) -> None:
    p, s, d = (np.array(c, dtype=float) for c in zip(*rows, strict=True))
    assert np.var(spr_reward(p, s, d)) <= 1.0


def test_fdr_is_not_bounded_by_one_and_never_negative() -> None:
    got = fdr_reward(np.array([0, 3, 6, 9, -2]), np.full(5, 6.0))
    assert got.tolist() == [0.0, 0.5, 1.0, 1.5, 0.0]


def _model(kind: RewardKind, progress: Progress = Progress.RAW) -> RewardModel:
    return RewardModel(kind=kind, scales=(FamilyScale(family="net", value=4.0, attempts=9),), progress=progress)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (RewardKind.COUNT, (3 / 20, 3 / 20, 1.0, 0.0)),  # gates count for T1; no report: the outcome
        (RewardKind.BINARY, (1.0, 0.0, 1.0, 0.0)),
        (RewardKind.FDR, (2 / 4, 3 / 4, 1.0, 0.0)),
        (RewardKind.SPR, (1 + 2 / 6, 3 / 7, 1.5, 0.0)),  # f/binary: D = 1, so SPR is 0 or 1.5
    ],
)
def test_each_formula_on_hand_made_attempts(kind: RewardKind, want: tuple[float, ...]) -> None:
    attempts = [
        trajectory("win", "pp", gate="p", verdict=Verdict.PASSED),
        trajectory("gate", "pppn", gate="f"),
        trajectory("unreported-win", "", verdict=Verdict.PASSED),
        trajectory("unreported-loss", "", gate="f"),
    ]
    model = _model(kind)
    assert [model.score(t) for t in attempts] == pytest.approx(want, abs=1e-15)
    np.testing.assert_array_equal(
        model.score_outcomes(Outcomes.from_trajectories(attempts)), [model.score(t) for t in attempts]
    )


def test_net_of_nop_subtracts_what_doing_nothing_passes() -> None:
    attempts = [
        trajectory("a", "pppf", nop=1),
        trajectory("b", "pfff", nop=2),  # worse than nothing: P < 0
        trajectory("c", "pppp", verdict=Verdict.PASSED, nop=4),
    ]
    fdr, spr = _model(RewardKind.FDR, Progress.NET_OF_NOP), _model(RewardKind.SPR, Progress.NET_OF_NOP)
    assert [fdr.score(t) for t in attempts] == [0.5, 0.0, 0.0]
    assert [spr.score(t) for t in attempts] == pytest.approx([2 / 6, 0.0, 1.0])
    columns = Outcomes.from_trajectories(attempts)
    for model in (fdr, spr):
        np.testing.assert_array_equal(model.score_outcomes(columns), [model.score(t) for t in attempts])
    assert _model(RewardKind.COUNT, Progress.NET_OF_NOP).score(attempts[0]) == 3 / 20  # the T1 count stays raw


@st.composite
def attempts(draw: st.DrawFn) -> Trajectory:
    passed = draw(st.booleans())
    letters = st.text(alphabet="p" if passed else "pfn", max_size=6)
    return trajectory(
        draw(st.uuids()).hex,
        draw(letters),
        gate=draw(st.text(alphabet="p" if passed else "pfn", max_size=1)),
        family=draw(st.sampled_from(["net", "git"])),
        verdict=Verdict.PASSED if passed else Verdict.FAILED,
        nop=draw(st.integers(0, 3)),
    )


@given(st.lists(attempts(), max_size=8), st.sampled_from(RewardKind), st.sampled_from(Progress), SCALE, SCALE)
def test_columns_equal_one_by_one(
    batch: list[Trajectory], kind: RewardKind, progress: Progress, net: float, git: float
) -> None:
    scales = tuple(FamilyScale(family=f, value=d, attempts=20) for f, d in (("net", net), ("git", git)))
    model = RewardModel(kind=kind, scales=scales, progress=progress)
    columns = Outcomes.from_trajectories(batch)
    np.testing.assert_array_equal(model.score_outcomes(columns), [model.score(t) for t in batch])


@pytest.mark.parametrize("verdict", [v for v in Verdict if not v.counts])
def test_an_attempt_without_verdict_is_never_scored(verdict: Verdict) -> None:
    masked = trajectory("m", "pp", verdict=verdict)
    for kind in RewardKind:
        with pytest.raises(RewardError, match="mask it"):
            _model(kind).score(masked)
        assert _model(kind).score_or_none(masked) is None
    columns = Outcomes.from_trajectories([masked, trajectory("a", "p")])
    assert (len(columns), columns.masked) == (1, 1)


def test_scales_that_cannot_be_used_are_refused_at_once() -> None:
    zero = FamilyScale(family="net", value=0.0, attempts=3)
    with pytest.raises(RewardError, match="family net"):
        RewardModel(kind=RewardKind.FDR, scales=(zero,))
    good = FamilyScale(family="net", value=2.0, attempts=3)
    with pytest.raises(RewardError, match="two scales"):
        RewardModel(kind=RewardKind.FDR, scales=(good, good))
    with pytest.raises(RewardError, match=r"family git has no scale \(known: net\)"):
        RewardModel(kind=RewardKind.FDR, scales=(good,)).score(trajectory("a", "p", family="git"))
    with pytest.raises(RewardError, match="count_scale"):
        RewardModel(kind=RewardKind.COUNT, count_scale=0.0)


# ---------------------------------------------------------------------------------------------------- family scales


def _profile(**families: list[int]) -> Outcomes:
    rows = [(f, n) for f, counts in families.items() for n in counts]
    return Outcomes.of(family=[f for f, _ in rows], progress=[n for _, n in rows], strict=[0] * len(rows))


@given(st.lists(st.integers(0, 40), min_size=10, max_size=60), st.floats(0.05, 0.95))
def test_scale_is_the_linear_quantile_floored_at_one_check(counts: list[int], q: float) -> None:
    (scale,) = fit_scales(_profile(net=counts), quantile=q)
    at = q * (len(counts) - 1)
    low, high = sorted(counts)[int(at)], sorted(counts)[min(int(at) + 1, len(counts) - 1)]
    want = low + (at - int(at)) * (high - low)
    assert scale.value == pytest.approx(max(want, 1.0), abs=1e-9)
    assert scale.attempts == len(counts)
    assert scale.borrowed_from is None
    assert scale.floored == (scale.value == 1.0 and want < 1.0)


def test_floored_families_are_listed_and_zero_scales_name_the_family() -> None:
    scales = fit_scales(_profile(net=[0] * 20, git=[5] * 20))
    assert {s.family: s.value for s in scales} == {"git": 5.0, "net": 1.0}
    assert floored_families(scales) == ("net",)
    with pytest.raises(RewardError, match="family net"):
        fit_scales(_profile(net=[0] * 20, git=[5] * 20), d_min=0.0)


def test_few_attempts_borrow_their_stratum() -> None:
    rows = [("rich", 4, "easy")] * 12 + [("poor", 40, "easy")] * 2 + [("hard", 9, "hard")] * 3
    profile = Outcomes.of(
        family=[r[0] for r in rows],
        progress=[r[1] for r in rows],
        strict=[0] * len(rows),
        strata=[r[2] for r in rows],
    )
    got = {s.family: s for s in fit_scales(profile, families={"unseen": Stratum.EASY, "new": Stratum.EXTREME})}
    assert got["rich"].borrowed_from is None
    easy = float(np.quantile([4] * 12 + [40] * 2, 0.9))
    assert (got["poor"].value, got["poor"].borrowed_from, got["poor"].attempts) == (easy, "stratum easy", 2)
    assert (got["unseen"].value, got["unseen"].borrowed_from, got["unseen"].attempts) == (easy, "stratum easy", 0)
    everything = float(np.quantile([r[1] for r in rows], 0.9))
    for family in ("hard", "new"):  # their strata are too small as well
        assert (got[family].value, got[family].borrowed_from) == (everything, "all")


def test_tasks_without_a_report_form_a_sub_family_with_scale_one() -> None:
    profile = [trajectory(f"r{i}", "ppp" + "f" * (i % 2)) for i in range(12)]
    profile += [trajectory(f"b{i}", "", verdict=Verdict.PASSED) for i in range(12)]
    profile += [trajectory(f"m{i}", "", verdict=Verdict.INFRA_ERROR) for i in range(12)]
    scales = {s.family: s for s in fit_scales(profile)}
    assert {f: (s.value, s.attempts) for f, s in scales.items()} == {"net": (3.0, 12), "net/binary": (1.0, 12)}


def test_profiles_that_cannot_be_used() -> None:
    with pytest.raises(RewardError, match="1 were masked"):
        fit_scales([trajectory("m", verdict=Verdict.INFRA_ERROR)])
    with pytest.raises(RewardError, match="quantile"):
        fit_scales(_profile(net=[1]), quantile=1.5)


def test_a_pool_without_check_reports_has_binary_families_only() -> None:
    """Spec §4.2: such a task belongs to `f/binary` with D = 1; `f` itself needs no scale."""
    scales = fit_scales([trajectory("b", "", verdict=Verdict.PASSED)], families={"net": Stratum.EASY})
    assert [(s.family.endswith("/binary"), s.value) for s in scales] == [(True, 1.0)]


def test_bad_columns_are_named() -> None:
    def of(**change: object) -> Outcomes:
        columns: dict = {"family": ["a", "a"], "progress": [1, 2], "strict": [0, 1], **change}
        return Outcomes.of(**columns)

    with pytest.raises(RewardError, match="progress of attempt 1 is nan"):
        of(progress=[1.0, np.nan])
    with pytest.raises(RewardError, match=r"progress of attempt 0 is 1\.5"):
        of(progress=[1.5, 1.0])
    with pytest.raises(RewardError, match="progress of attempt 0 is negative"):
        of(progress=[-1, 1])
    with pytest.raises(RewardError, match="strict of attempt 1 is nan"):
        of(strict=[0.0, np.nan])
    with pytest.raises(RewardError, match="strict has 1 entries for 2"):
        of(strict=[1])
    with pytest.raises(RewardError, match="1 attempts occur more than once, first x"):
        of(ids=["x", "x"])
