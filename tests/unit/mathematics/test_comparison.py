"""Scores and paired comparisons: numerators, denominators, and the flags that make a number doubtful."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest

from stages.comparison import (
    Convention,
    FlagKind,
    choice_optimism,
    compare,
    compare_many,
    score_evaluation,
)
from stages.domain import Verdict
from stages.errors import EvaluationError
from stages.records import EvaluationDone, TaskScore
from tests.unit.mathematics import reference

_LETTERS = {"p": Verdict.PASSED, "f": Verdict.FAILED, "e": Verdict.INFRA_ERROR}


def _evaluation(
    outcomes: Mapping[str, str] | Sequence[tuple[str, str]],
    checkpoint: str = "A",
    digest: str = "d1",
    suite: str = "demo",
    settings: Mapping[str, float | int | str] | None = None,
    strata: Mapping[str, str] | None = None,
    k: int = 3,
) -> EvaluationDone:
    """task → one letter per attempt: p passed, f failed, e no verdict"""
    items = list(outcomes.items() if isinstance(outcomes, Mapping) else outcomes)
    tasks = tuple(
        TaskScore(
            task_id=t,
            family="net",
            stratum=(strata or {}).get(t, "easy"),
            verdicts=tuple(_LETTERS[c] for c in letters),
            checks_passed=tuple(4 if c == "p" else 1 for c in letters),
            checks_total=4,
        )
        for t, letters in items
    )
    flat = [v for t in tasks for v in t.verdicts]
    return EvaluationDone(
        suite=suite,
        suite_digest=digest,
        checkpoint=checkpoint,
        k=k,
        passed=sum(v is Verdict.PASSED for v in flat),
        attempts=len(flat),
        verdicts=sum(v.counts for v in flat),
        tasks=tasks,
        settings=settings or {},
    )


def _kinds(flags: Sequence[object]) -> set[FlagKind]:
    return {f.kind for f in flags}  # type: ignore[attr-defined]


def test_both_denominators_and_three_readings() -> None:
    got = score_evaluation(_evaluation({"a": "ppp", "b": "fep", "c": "eee", "d": "fff"}, strata={"d": "hard"}))
    assert (got.by_verdicts.passed, got.by_verdicts.of) == (4, 8)
    assert (got.by_attempts.passed, got.by_attempts.of) == (4, 12)
    assert (got.first_attempt, got.any_attempt, got.all_attempts) == (1, 2, 1)
    assert got.process_reward == pytest.approx((4 * 1.0 + 4 * 0.25) / 8)
    assert [(name, r.passed, r.of) for name, r in got.strata.items()] == [("easy", 4, 5), ("hard", 0, 3)]
    assert _kinds(got.flags) == {FlagKind.MISSING_VERDICTS, FlagKind.FEW_TASKS}
    assert got.by_verdicts.bootstrap is not None


@pytest.mark.parametrize("letter", ["p", "f"])
def test_all_pass_and_all_fail_say_that_nothing_varies(letter: str) -> None:
    got = score_evaluation(_evaluation({str(i): letter * 3 for i in range(12)}))
    assert got.by_verdicts.value == (letter == "p")
    assert got.by_verdicts.bootstrap is None
    assert got.by_verdicts.wilson is not None
    assert got.by_verdicts.wilson.high - got.by_verdicts.wilson.low > 0.2  # 12 tasks, not 36 attempts
    assert _kinds(got.flags) == {FlagKind.NO_VARIANCE}


def test_no_verdict_at_all_gives_no_rate() -> None:
    got = score_evaluation(_evaluation({"a": "eee", "b": "eee"}))
    assert got.by_verdicts.value is None
    assert got.by_verdicts.wilson is None
    assert got.by_attempts.value == 0.0
    assert got.process_reward is None


def test_one_attempt_per_task_is_flagged() -> None:
    assert FlagKind.ONE_ATTEMPT in _kinds(score_evaluation(_evaluation({"a": "p", "b": "f"})).flags)


def test_a_trial_that_may_be_in_twice_is_flagged() -> None:
    got = score_evaluation(_evaluation({"a": "ppff", "b": "pff"}))
    assert {FlagKind.SURPLUS_ATTEMPTS, FlagKind.UNEQUAL_DENOMINATORS} <= _kinds(got.flags)


def test_evaluations_that_cannot_be_scored() -> None:
    with pytest.raises(EvaluationError, match="no task"):
        score_evaluation(_evaluation({}))
    with pytest.raises(EvaluationError, match="1 tasks occur more than once, first a"):
        score_evaluation(_evaluation([("a", "p"), ("a", "f")]))
    with pytest.raises(EvaluationError, match="task a has no attempt"):
        score_evaluation(_evaluation({"a": ""}))


BEFORE = {str(i): "pff" if i % 2 else "fff" for i in range(20)}
AFTER = {str(i): "ppf" if i % 2 else "fff" for i in range(18)} | {"18": "pff", "19": "fff"}


def test_paired_difference() -> None:
    got = compare(_evaluation(BEFORE), _evaluation(AFTER, "B"), resamples=2000)
    assert got.common_tasks == 20
    assert got.before_rate == pytest.approx(10 / 60)
    assert got.after_rate == pytest.approx(19 / 60)
    assert got.difference == pytest.approx(9 / 60)
    assert (len(got.improved), got.worsened) == (10, ("19",))
    assert got.interval is not None
    assert got.interval.low < 9 / 60 < got.interval.high
    assert got.p_value is not None
    assert got.p_value < 0.05
    assert got.flip_p == pytest.approx(12 / 1024, rel=0.01)
    assert got.detectable is not None
    assert got.tasks_needed is not None
    assert got.flags == ()
    back = compare(_evaluation(AFTER, "B"), _evaluation(BEFORE), resamples=2000)
    assert back.difference == pytest.approx(-9 / 60)
    assert back.p_value == pytest.approx(got.p_value, abs=0.01)


def test_conventions_differ_where_verdicts_are_missing() -> None:
    a, b = _evaluation({"a": "pfe", "b": "fff"}), _evaluation({"a": "ppe", "b": "eee"}, "B")
    verdicts = compare(a, b)
    assert (verdicts.common_tasks, verdicts.difference) == (1, pytest.approx(0.5))  # b has no verdict after
    attempts = compare(a, b, convention=Convention.ATTEMPTS)
    assert (attempts.common_tasks, attempts.difference) == (2, pytest.approx(1 / 6))
    assert {FlagKind.MISSING_VERDICTS, FlagKind.UNEQUAL_DENOMINATORS, FlagKind.FEW_TASKS} <= _kinds(verdicts.flags)
    assert any("6 and 6 attempts, 5 and 2 verdicts" in f.text for f in verdicts.flags)


def test_a_changed_suite_gives_no_number_unless_tasks_are_vouched_for() -> None:
    a, b = _evaluation(BEFORE), _evaluation(AFTER, "B", digest="d2")
    got = compare(a, b)
    assert (got.difference, got.interval, got.p_value, got.common_tasks) == (None, None, None, 0)
    assert _kinds(got.flags) == {FlagKind.SUITE_CHANGED}
    some = compare(a, b, same_tasks={str(i) for i in range(12)})
    assert some.common_tasks == 12
    assert some.difference == pytest.approx(6 / 36)
    assert _kinds(some.flags) == {FlagKind.SUITE_CHANGED, FlagKind.UNPAIRED_TASKS}
    other = compare(a, _evaluation(AFTER, "B", suite="other"))
    assert other.difference is None
    assert _kinds(other.flags) == {FlagKind.DIFFERENT_SUITES}


def test_settings_and_unpaired_tasks_are_flagged() -> None:
    a = _evaluation(BEFORE, settings={"temperature": 0.6, "top_p": 0.95})
    b = _evaluation({t: o for t, o in AFTER.items() if t != "3"}, "B", settings={"temperature": 1.0, "top_p": 0.95})
    got = compare(a, b)
    assert got.common_tasks == 19
    texts = {f.kind: f.text for f in got.flags}
    assert "temperature 0.6 and 1.0" in texts[FlagKind.DIFFERENT_SETTINGS]
    assert texts[FlagKind.UNPAIRED_TASKS].startswith("1 tasks")


def test_no_difference_at_all_is_not_a_tight_interval() -> None:
    got = compare(_evaluation(BEFORE), _evaluation(BEFORE, "B"))
    assert (got.difference, got.interval, got.p_value, got.flip_p, got.tasks_needed) == (0.0, None, 1.0, None, None)
    assert _kinds(got.flags) == {FlagKind.NO_VARIANCE}


def test_holm_over_several_comparisons() -> None:
    a, b = _evaluation(BEFORE), _evaluation(AFTER, "B")
    got = compare_many([(a, b), (a, _evaluation(BEFORE, "C")), (a, _evaluation(AFTER, "D", digest="d2"))])
    assert got[0].p_value is not None
    assert got[0].p_holm == pytest.approx(2 * got[0].p_value)  # two p-values: the blocked one has none
    assert got[1].p_holm == 1.0
    assert got[2].p_holm is None


def test_optimism_of_choosing_on_the_suite() -> None:
    a, b = _evaluation(BEFORE), _evaluation(AFTER, "B")
    got = choice_optimism([a, b], splits=200)
    assert got is not None
    assert got.best == 1
    assert 0.0 <= got.optimism < got.apparent
    assert choice_optimism([a]) is None
    assert choice_optimism([]) is None
    with pytest.raises(EvaluationError, match="different suites"):
        choice_optimism([a, _evaluation(AFTER, "B", digest="d2")])


def _imported(checkpoint: str) -> EvaluationDone:
    """The real trials, read in the plainest way: reward 1 passed, another reward failed, no reward no verdict."""
    folder = reference.SHARED / "data" / "tb2-trials" / checkpoint
    if not folder.exists():
        pytest.skip(f"{folder} is not here")
    by_task: dict[str, str] = defaultdict(str)
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text())
        rewards = (result.get("verifier_result") or {}).get("rewards") or {}
        by_task[result["task_name"]] += "e" if "reward" not in rewards else "p" if rewards["reward"] == 1.0 else "f"
    return _evaluation(by_task, checkpoint, suite="tb2", k=5)


def test_facts_of_the_real_trials() -> None:
    """tmax-9b 121/445 and 121/438, Qwen3.5-9B 94/445 and 94/444; a paired interval over 89 tasks."""
    before, after = _imported("Qwen3.5-9B"), _imported("tmax-9b")
    for evaluation, verdicts, passed in ((before, 444, 94), (after, 438, 121)):
        got = score_evaluation(evaluation, resamples=500)
        assert (got.tasks, got.by_attempts.passed, got.by_attempts.of) == (89, passed, 445)
        assert (got.by_verdicts.passed, got.by_verdicts.of) == (passed, verdicts)
    pair = compare(before, after, convention=Convention.ATTEMPTS, resamples=2000)
    assert pair.common_tasks == 89
    assert pair.difference == pytest.approx(27 / 445)
    assert pair.interval is not None
    assert pair.interval.low < 27 / 445 < pair.interval.high
    assert {FlagKind.MISSING_VERDICTS, FlagKind.UNEQUAL_DENOMINATORS} <= _kinds(pair.flags)
