"""The papers' figures are consistent with each other, the corrected misprint included."""

from __future__ import annotations

import pytest

from stages.reference_rows import FOUR_SUITES, Origin, Zone, four_suite_mean, reference_facts, reference_rows


def _value(suite: str, checkpoint: str, system: str = "Terminal-RSI") -> float:
    (found,) = [r for r in reference_rows() if (r.system, r.suite, r.checkpoint) == (system, suite, checkpoint)]
    return found.value


@pytest.mark.parametrize("checkpoint", ["Base", "RSR-1", "RPR-1", "RPR-2"])
def test_four_suite_mean_follows_from_its_suites(checkpoint: str) -> None:
    got = four_suite_mean({s: _value(s, checkpoint) for s in FOUR_SUITES})
    assert got == pytest.approx(_value("four-suite mean", checkpoint), abs=0.0051)


def test_the_misprint_is_corrected_and_noted() -> None:
    (row,) = [r for r in reference_rows() if (r.suite, r.checkpoint) == ("TB-3.0", "RPR-1")]
    assert (row.value, row.origin) == (14.30, Origin.CORRECTED)
    assert "64.30" in row.note
    printed = {s: _value(s, "RPR-1") for s in FOUR_SUITES} | {"TB-3.0": 64.30}
    assert four_suite_mean(printed) != pytest.approx(44.50, abs=1.0)


def test_printed_percentages_fit_their_denominators() -> None:
    fitted = [r for r in reference_rows() if r.of is not None and r.metric == "success_pct"]
    assert len(fitted) == 6
    for row in fitted:
        assert row.passed is not None
        assert row.of is not None
        assert row.value == pytest.approx(100 * row.passed / row.of, abs=0.0051)
    assert len({r.of for r in fitted}) == 2  # 252 and 246: to be flagged when compared


def test_t1_gain_is_the_corrected_one() -> None:
    base, sft, t1 = (_value("TB-2.1", c, "T1") for c in ("Base", "SFT", "T1"))
    assert base < sft < t1
    assert 100 * (t1 / sft - 1) == pytest.approx(29.6, abs=0.05)


def test_rows_are_complete_and_unique() -> None:
    rows = reference_rows()
    keys = [(r.report, r.system, r.suite, r.stratum, r.checkpoint) for r in rows]
    assert len(set(keys)) == len(keys)
    assert {r.zone for r in rows} == set(Zone)
    assert all(r.note for r in rows if r.origin is not Origin.PRINTED)
    assert {r.metric for r in rows if r.suite == "LHTB"} == {"process_reward", "process_reward_pct"}
    assert reference_facts()["audit_failures_at_or_above_one"] == {"fdr": 158, "spr": 0}
    assert four_suite_mean({"TB-2.1": 1.0}) is None
