"""Reward audit (spec §4.4) and family recalibration (spec §4.5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.domain import FamilyScale, Verdict
from stages.errors import RewardError
from stages.outcomes import Outcomes
from stages.recalibration import OnlineScales, family_calibrations, recalibrate
from stages.rescore import rescore
from stages.rewards import RewardKind, RewardModel, fit_scales
from tests.unit.mathematics import reference
from tests.unit.mathematics.trajectories import trajectory


def test_shared_reference_case() -> None:
    case = reference.shared_case("reward_audit.json")
    profile = [(f, n) for f, counts in case["profile"].items() for n in counts]
    scales = fit_scales(
        Outcomes.of(family=[f for f, _ in profile], progress=[n for _, n in profile], strict=[0] * len(profile)),
        quantile=case["quantile"],
    )
    assert {s.family: s.value for s in scales} == case["scales"]
    rows = case["trajectories"]
    fixed = Outcomes.of(
        family=[r["family"] for r in rows], progress=[r["passed"] for r in rows], strict=[r["success"] for r in rows]
    )
    audit = rescore(
        fixed,
        {
            "fdr": RewardModel(kind=RewardKind.FDR, scales=scales),
            "spr": RewardModel(kind=RewardKind.SPR, scales=scales),
            "count_over_20": RewardModel(kind=RewardKind.COUNT),
        },
    )
    for formula in audit.formulas:
        for name, want in case[formula.label].items():
            assert getattr(formula.overall, name) == pytest.approx(want, abs=1e-12), (formula.label, name)


ATTEMPT = st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans(), st.booleans())


@given(st.lists(ATTEMPT, min_size=1, max_size=40), st.sampled_from(RewardKind))
def test_report_equals_a_plain_loop(rows: list[tuple[str, int, bool, bool]], kind: RewardKind) -> None:
    scales = tuple(FamilyScale(family=f, value=float(i + 2), attempts=20) for i, f in enumerate("abc"))
    model = RewardModel(kind=kind, scales=scales)
    fixed = Outcomes.of(
        family=[r[0] for r in rows],
        progress=[r[1] for r in rows],
        strict=[r[2] for r in rows],
        only_gate_failed=[r[3] for r in rows],
    )
    got = rescore(fixed, {"x": model})["x"]
    assert list(got.by_family) == sorted({r[0] for r in rows})
    for family, summary in [(None, got.overall), *got.by_family.items()]:
        wins, losses, high, gate = [], [], 0, 0
        for (f, _, s, g), reward in zip(rows, got.rewards.tolist(), strict=True):
            if family not in (None, f):
                continue
            (wins if s else losses).append(reward)
            high += not s and reward >= 1.0
            gate += g and not s
        total = sum(wins) + sum(losses)
        assert summary.failures_at_or_above_one == high
        assert summary.gate_only_failures == gate
        assert (summary.successes, summary.failures) == (len(wins), len(losses))
        want = {
            "failure_share": sum(losses) / total if total else None,
            "mean_success": sum(wins) / len(wins) if wins else None,
            "mean_failure": sum(losses) / len(losses) if losses else None,
            "largest_failure": max(losses, default=None),
        }
        for name, value in want.items():
            found = getattr(summary, name)
            assert found is None if value is None else found == pytest.approx(value, abs=1e-9)
    assert len(got.failures_at_or_above_one) == got.overall.failures_at_or_above_one
    listed = got.rewards[got.failures_at_or_above_one]
    assert (np.diff(listed) <= 0).all()
    if kind is RewardKind.SPR:
        assert got.overall.failures_at_or_above_one == 0


def test_gate_only_failures_are_listed() -> None:
    fixed = Outcomes.from_trajectories(
        [
            trajectory("gate", "ppn", gate="f"),  # every executed check passed, one did not run
            trajectory("half", "pfp", gate="f"),
            trajectory("win", "ppp", gate="p", verdict=Verdict.PASSED),
            trajectory("none-ran", "nnn", gate="f"),
            trajectory("lost", "ppp", verdict=Verdict.NONE),
        ]
    )
    audit = rescore(fixed, {"count": RewardModel(kind=RewardKind.COUNT)})
    assert [fixed.id_of(int(r)) for r in audit["count"].gate_only_failures] == ["gate"]
    assert fixed.masked == 1
    rows = list(audit.rows())
    assert [(r["family"], r["attempts"]) for r in rows] == [("", 4), ("net", 4)]


def test_all_pass_and_all_fail_leave_what_cannot_be_divided_missing() -> None:
    model = {"b": RewardModel(kind=RewardKind.BINARY)}
    lost = rescore(Outcomes.of(family=["a"] * 3, progress=[0] * 3, strict=[0] * 3), model)["b"].overall
    assert (lost.failure_share, lost.mean_success, lost.mean_failure) == (None, None, 0.0)
    won = rescore(Outcomes.of(family=["a"] * 3, progress=[1] * 3, strict=[1] * 3), model)["b"].overall
    assert (won.failure_share, won.mean_success, won.mean_failure, won.largest_failure) == (0.0, 1.0, None, None)
    with pytest.raises(RewardError, match="no attempt with a verdict"):
        rescore(Outcomes.of(family=[], progress=[], strict=[], masked=3), model)
    with pytest.raises(RewardError, match="no formula"):
        rescore(Outcomes.of(family=["a"], progress=[0], strict=[0]), {})


# ---------------------------------------------------------------------------------------------------- recalibration


def _families(rows: dict[str, tuple[list[int], list[int], int]]) -> Outcomes:
    """family → (progress of failures, progress of successes, turns)"""
    flat = [(f, p, s, t) for f, (lost, won, t) in rows.items() for s, ps in ((0, lost), (1, won)) for p in ps]
    return Outcomes.of(
        family=[r[0] for r in flat],
        progress=[r[1] for r in flat],
        strict=[r[2] for r in flat],
        turns=[r[3] for r in flat],
    )


def _scales(*families: str, value: float = 4.0) -> tuple[FamilyScale, ...]:
    return tuple(FamilyScale(family=f, value=value, attempts=30) for f in families)


def test_recalibration_multipliers() -> None:
    fixed = _families(
        {
            "high": ([4] * 2 + [1] * 98, [4], 5),  # 2 % of failures reach R = 1
            "edge": ([4] + [2] * 99, [4], 5),  # exactly 1 %
            "under": ([4] + [2] * 100, [4], 5),  # just below 1 %
            "long": ([0] * 30, [1], 50),  # long and low-reward
            "both": ([4] + [0] * 20, [0], 60),  # long and low as well, but suppression wins
        }
    )
    scales = _scales("high", "edge", "under", "long", "both")
    found = family_calibrations(scales, fixed)
    assert {c.family: c.multiplier for c in found} == {"high": 2.0, "edge": 2.0, "under": 1.0, "long": 0.5, "both": 2.0}
    both = next(c for c in found if c.family == "both")
    assert both.suppress
    assert both.long_and_low
    after = {s.family: (s.value, s.multiplier) for s in recalibrate(scales, found)}
    assert after == {
        "high": (8.0, 2.0),
        "edge": (8.0, 2.0),
        "under": (4.0, 1.0),
        "long": (2.0, 0.5),
        "both": (8.0, 2.0),
    }
    with pytest.raises(RewardError, match="recalibrated already"):
        recalibrate(recalibrate(scales, found), found)


def test_families_that_are_all_alike_are_neither_long_nor_low() -> None:
    fixed = _families({f: ([1] * 5, [2], 7) for f in "abcd"})
    assert {c.multiplier for c in family_calibrations(_scales(*"abcd"), fixed)} == {1.0}
    assert {c.multiplier for c in family_calibrations(_scales("a"), _families({"a": ([0], [], 9)}))} == {1.0}


def test_recalibration_is_floored_and_leaves_binary_families_alone() -> None:
    fixed = _families({"a": ([0] * 9, [], 90), "b": ([1] * 9, [], 2), "c": ([1] * 9, [], 2), "d": ([1] * 9, [], 2)})
    scales = (*_scales(*"abcd", value=1.5), FamilyScale(family="x/binary", value=1.0, attempts=3))
    found = family_calibrations(scales, fixed)
    after = {s.family: s for s in recalibrate(scales, found)}
    assert (after["a"].value, after["a"].multiplier, after["a"].floored) == (1.0, 0.5, True)
    assert after["x/binary"].value == 1.0


def test_no_failures_means_no_suppression() -> None:
    (found,) = family_calibrations(_scales("a"), _families({"a": ([], [9, 9], 3)}))
    assert (found.failures, found.suppress, found.multiplier) == (0, False, 1.0)


@given(st.lists(st.integers(0, 30), min_size=20, max_size=40), st.floats(0.01, 1.0))
def test_online_scale_is_the_moving_average(counts: list[int], alpha: float) -> None:
    online = OnlineScales(_scales("a", value=10.0), alpha=alpha)
    batch = _families({"a": (counts, [], 1)})
    (moved,) = online.update(batch)
    want = max((1 - alpha) * 10.0 + alpha * float(np.quantile(counts, 0.9)), 1.0)
    assert moved.after == pytest.approx(want)
    assert online.scales[0].value == moved.after
    assert moved.alarm == (abs(moved.after - 10.0) / 10.0 > 0.25)


def test_online_drift_adds_up_to_an_alarm_and_small_batches_do_nothing() -> None:
    online = OnlineScales(_scales("a", value=10.0))
    assert online.update(_families({"a": ([20] * 19, [], 1)})) == ()
    steps = [online.update(_families({"a": ([20] * 20, [], 1)}))[0] for _ in range(7)]
    assert [s.alarm for s in steps] == [False] * 5 + [True] * 2  # .26 after six steps of .05
    resumed = OnlineScales(online.scales, at_start=_scales("a", value=10.0))
    assert resumed.update(_families({"a": ([20] * 20, [], 1)}))[0].alarm
    with pytest.raises(RewardError, match="family b has no scale"):
        online.update(_families({"b": ([1] * 20, [], 1)}))
