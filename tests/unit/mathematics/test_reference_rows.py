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


LINE = ("Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2")
T1_LINE = ("Base", "SFT", "T1")
# Spec §8 and §2.4, figure by figure; None: not printed.
PRINTED: dict[tuple[str, str, str], tuple[tuple[str, ...], tuple[float | None, ...]]] = {
    ("Terminal-RSI", "TB-4.0", ""): (LINE, (0.00, 6.10, 16.67, 17.46, 19.84)),
    ("Terminal-RSI", "four-suite mean", ""): (LINE, (20.68, 34.25, 44.50, 48.75, 50.58)),
    ("Terminal-RSI", "TB-2.1", ""): (LINE, (51.70, 70.10, 77.53, None, 86.52)),
    ("Terminal-RSI", "TB-3.0", ""): (LINE, (0.00, 6.80, 14.30, None, 16.95)),
    ("Terminal-RSI", "TB-Hard", ""): (LINE, (31.00, 54.00, 69.50, None, 79.00)),
    ("Terminal-RSI", "LHTB", ""): (LINE, (0.21, 0.29, None, None, 0.37)),
    ("Terminal-RSI", "LHTB-strict", ""): (LINE, (0, 0, None, None, 5)),
    ("Terminal-RSI", "SWR100", ""): (LINE, (3.00, None, 6.00, 6.00, 6.00)),
    ("Terminal-RSI", "strata", "easy"): (LINE, (31.78, None, None, None, 72.88)),
    ("Terminal-RSI", "strata", "medium"): (LINE, (23.58, None, None, None, 58.96)),
    ("Terminal-RSI", "strata", "hard"): (LINE, (14.91, None, None, None, 49.12)),
    ("Terminal-RSI", "strata", "extreme"): (LINE, (10.98, None, None, None, 10.98)),
    ("Direct PPO", "TB-2.1", ""): (("Direct PPO",), (48.31,)),
    ("Direct PPO", "TB-3.0", ""): (("Direct PPO",), (1.44,)),
    ("Direct PPO", "TB-4.0", ""): (("Direct PPO",), (0.00,)),
    ("Direct PPO", "TB-Hard", ""): (("Direct PPO",), (39.00,)),
    ("T1", "TB-2.1", ""): (T1_LINE, (43.8, 49.4, 64.0)),
    ("T1", "LHTB", ""): (T1_LINE, (18.9, 23.6, 27.9)),
    ("T1", "TB-Hard", ""): (T1_LINE, (20.0, 28.3, 38.0)),
    ("T1", "turns per attempt", ""): (T1_LINE, (41.1, 31.5, 94.4)),
    ("T1", "strata", "easy"): (T1_LINE, (100, 100, 100)),
    ("T1", "strata", "medium"): (T1_LINE, (56, 58, 78)),
    ("T1", "strata", "hard"): (T1_LINE, (20, 30, 33)),
    **{
        (system, suite, ""): (("",), (value,))
        for system, suite, value in (
            ("GPT-5.4", "TB-2.1", 54.8),
            ("DeepSeek-V4-Flash", "TB-2.1", 56.9),
            ("Claude Opus 4.6", "TB-2.1", 63.8),
            ("Claude Opus 4.6 in Claude Code", "TB-2.1", 70.1),
            ("Claude Opus 4.7", "TB-2.1", 66.1),
            ("Claude Sonnet 4.6", "TB-2.1", 51.5),
            ("Claude Sonnet 4.6", "LHTB", 37.3),
            ("GPT-5.4", "LHTB", 27.2),
            ("GLM-5.1", "LHTB", 26.7),
            ("DeepSeek V4 Pro", "TB-Hard", 36.0),
            ("Gemini 3.8 Flash", "TB-4.0", 19.70),
            ("DeepSeek V4 Pro", "TB-4.0", 14.60),
            ("GPT-6 Astra", "TB-4.0", 54.00),
            ("GPT-6 Sol", "TB-2.1", 85.40),
            ("Kimi K3", "TB-2.1", 85.00),
        )
    },
}


def test_every_figure_of_the_specification_is_there_and_no_other() -> None:
    wanted = {
        (*key, checkpoint): value
        for key, (line, values) in PRINTED.items()
        for checkpoint, value in zip(line, values, strict=True)
        if value is not None
    }
    found = {(r.system, r.suite, r.stratum, r.checkpoint): r.value for r in reference_rows()}
    assert found == wanted
    facts = reference_facts()
    assert facts["ev_warmup"] == [-1.15, 0.01]
    assert (facts["ev_rpr1_peak"], facts["ev_rpr2_range"], facts["ev_rpr2_positive"]) == (0.33, [0.01, 0.52], [16, 16])
    assert facts["audit_gate_only_failures"] == 48
    assert facts["audit_failure_share_pct"] == {"fdr": 50.09, "spr": 28.72}
    assert facts["long_reward_step20_loss_pp"] == {"TB-3.0": 2.66, "TB-4.0": 2.38, "TB-Hard": 3.00}
    assert facts["fdr_arm_gain_tb30_pp"] == 0.19
    (dip,) = {r.note for r in reference_rows() if r.stratum == "extreme"}
    assert "6.10" in dip
