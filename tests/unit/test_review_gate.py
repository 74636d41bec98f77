"""How verdicts add up (spec §2.1): properties over arbitrary histories, and the cases by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.domain import Decision, Finding, LeakPart, Review, Runbook, RunbookLine, Severity, Stratum, Task
from stages.review import (
    GateStatus,
    ModelQuestion,
    PolicyMode,
    ReviewContext,
    ReviewPolicy,
    gate_decision,
    quota_met,
    review_runbook,
    review_with_model,
)

AUTO = ReviewPolicy()
HUMAN = ReviewPolicy(mode=PolicyMode.HUMAN)
TWO = ReviewPolicy(mode=PolicyMode.HUMAN, required_reviewers=2)


def finding(severity: Severity) -> Finding:
    return Finding(part=LeakPart.PATTERN, severity=severity, rule="pattern.x", message="m")


def review(reviewer: str, decision: Decision, reason: str = "", *findings: Finding, revision: int = 1) -> Review:
    return Review(
        runbook_id="b", revision=revision, reviewer=reviewer, decision=decision, reason=reason, findings=findings
    )


CLEAN = review("rules", Decision.APPROVE)
SOFT = review("rules", Decision.REJECT, "soft", finding(Severity.SOFT))
HARD = review("rules", Decision.REJECT, "hard", finding(Severity.HARD))


def person(name: str, decision: Decision, reason: str = "because", revision: int = 1) -> Review:
    return review(f"person:{name}", decision, reason, revision=revision)


def model(decision: Decision) -> Review:
    return review("model:m", decision, "the model's reason")


YES, NO = Decision.APPROVE, Decision.REJECT

decisions = st.sampled_from(list(Decision))
people = st.builds(
    person, st.sampled_from(["ann", "bo", "cy", "di"]), decisions, st.sampled_from(["", "because"]), st.just(1)
)
models = st.builds(model, decisions)
rules = st.sampled_from([CLEAN, SOFT, HARD])
policies = st.builds(
    ReviewPolicy,
    mode=st.sampled_from(list(PolicyMode)),
    required_reviewers=st.integers(1, 2),
)
histories = st.lists(st.one_of(people, models), max_size=8)


@given(histories, policies)
def test_hard_findings_beat_everybody(history: list[Review], policy: ReviewPolicy) -> None:
    state = gate_decision([HARD, *history], policy)
    assert state.status is GateStatus.REJECTED
    assert state.hard


@given(histories, policies)
def test_nothing_is_approved_before_the_rules_ran(history: list[Review], policy: ReviewPolicy) -> None:
    assert gate_decision(history, policy).status is GateStatus.PENDING


@given(histories, policies, rules, models)
def test_a_model_never_changes_what_people_decided(
    history: list[Review], policy: ReviewPolicy, by_rules: Review, late: Review
) -> None:
    before = gate_decision([by_rules, *history], policy)
    after = gate_decision([by_rules, *history, late], policy)
    if any(r.startswith("person:") for r in before.decided_by) or policy.mode is PolicyMode.HUMAN:
        assert after.status is before.status


@given(histories, policies, rules)
def test_each_reviewers_last_verdict_counts(history: list[Review], policy: ReviewPolicy, by_rules: Review) -> None:
    last = {r.reviewer: r for r in history}
    assert (
        gate_decision([by_rules, *history], policy).status is gate_decision([by_rules, *last.values()], policy).status
    )


@given(st.permutations([CLEAN, person("ann", YES), person("bo", NO), person("cy", YES), model(NO)]), policies)
def test_order_of_reviewers_is_irrelevant(history: list[Review], policy: ReviewPolicy) -> None:
    assert gate_decision(history, policy).status is GateStatus.APPROVED


@given(histories, policies, rules)
def test_people_decide_by_majority_and_a_tie_rejects(
    history: list[Review], policy: ReviewPolicy, by_rules: Review
) -> None:
    state = gate_decision([by_rules, *history], policy)
    if by_rules is HARD:
        return
    last = {r.reviewer: r for r in history if r.reviewer.startswith("person:")}
    valid = [r for r in last.values() if by_rules is CLEAN or r.decision is NO or r.reason]
    needed = policy.required_reviewers if policy.mode is PolicyMode.HUMAN else 1
    if len(valid) < needed:
        assert policy.mode is PolicyMode.AUTO or state.status is GateStatus.PENDING
        return
    yes = sum(r.decision is YES for r in valid)
    assert (state.status is GateStatus.APPROVED) == (2 * yes > len(valid))
    assert (state.people_needed == 1) == (2 * yes == len(valid))


@given(histories, policies, rules, st.sampled_from(["ann", "person:ann"]))
def test_the_authors_verdict_does_not_count(
    history: list[Review], policy: ReviewPolicy, by_rules: Review, author: str
) -> None:
    others = [r for r in history if r.reviewer != "person:ann"]
    with_author = gate_decision([by_rules, *history], policy, author=author)
    assert with_author == gate_decision([by_rules, *others], policy, author=author)


@given(histories, policies, rules)
def test_an_edit_voids_verdicts(history: list[Review], policy: ReviewPolicy, by_rules: Review) -> None:
    fresh = review("rules", Decision.APPROVE, revision=2)
    state = gate_decision([by_rules, *history, fresh], policy)
    assert state == gate_decision([fresh], policy)
    assert state.revision == 2


@given(histories, rules)
def test_without_people_mode_human_only_waits(history: list[Review], by_rules: Review) -> None:
    only_models = [r for r in history if not r.reviewer.startswith("person:")]
    state = gate_decision([by_rules, *only_models], HUMAN)
    assert state.status is (GateStatus.REJECTED if by_rules is HARD else GateStatus.PENDING)


@pytest.mark.parametrize(
    ("history", "policy", "expected"),
    [
        ([CLEAN], AUTO, GateStatus.APPROVED),
        ([SOFT], AUTO, GateStatus.REJECTED),
        ([CLEAN, model(NO)], AUTO, GateStatus.REJECTED),
        ([CLEAN, model(NO), person("ann", YES)], AUTO, GateStatus.APPROVED),  # a person overrides the model
        ([CLEAN, person("ann", NO), model(YES)], AUTO, GateStatus.REJECTED),  # never the other way round
        ([SOFT, person("ann", YES, "the name is public")], AUTO, GateStatus.APPROVED),  # dismissed with a reason
        ([SOFT, person("ann", YES, "  ")], AUTO, GateStatus.REJECTED),  # no reason, no dismissal
        ([SOFT, person("ann", YES, "")], HUMAN, GateStatus.PENDING),
        ([CLEAN, person("ann", YES, "")], HUMAN, GateStatus.APPROVED),
        ([CLEAN, person("ann", YES)], TWO, GateStatus.PENDING),
        ([CLEAN, person("ann", YES), person("bo", YES)], TWO, GateStatus.APPROVED),
        ([CLEAN, person("ann", YES), person("bo", NO)], TWO, GateStatus.REJECTED),  # until a third decides
        ([CLEAN, person("ann", YES), person("bo", NO), person("cy", YES)], TWO, GateStatus.APPROVED),
        ([CLEAN, person("ann", YES), person("bo", NO), person("cy", NO)], TWO, GateStatus.REJECTED),
        ([CLEAN, person("ann", NO), person("ann", YES)], HUMAN, GateStatus.APPROVED),  # changed mind
    ],
)
def test_cases(history: list[Review], policy: ReviewPolicy, expected: GateStatus) -> None:
    assert gate_decision(history, policy).status is expected


def test_two_runbooks_are_refused() -> None:
    other = Review(runbook_id="c", revision=1, reviewer="rules", decision=YES)
    with pytest.raises(ValueError, match="several runbooks"):
        gate_decision([CLEAN, other], AUTO)


def test_quota() -> None:
    settled = gate_decision([CLEAN, person("ann", YES)], HUMAN)
    open_ = gate_decision([CLEAN], HUMAN)
    hard = gate_decision([HARD], HUMAN)
    tie = gate_decision([CLEAN, person("ann", YES), person("bo", NO)], HUMAN)
    half = ReviewPolicy(mode=PolicyMode.HUMAN, quota=0.5)
    assert quota_met([open_, open_], AUTO)
    assert not quota_met([settled, open_], HUMAN)
    assert quota_met([settled, open_], half)
    assert quota_met([settled, hard], HUMAN)  # nobody is asked about a hard finding
    assert not quota_met([settled, tie], HUMAN)
    assert quota_met([], HUMAN)


# ------------------------------------------------------------------------------------------------- the model reviewer


class Recorder:
    name = "recorder"

    def __init__(self) -> None:
        self.asked: list[ModelQuestion] = []

    async def review(self, question: ModelQuestion) -> tuple[Decision, str]:
        self.asked.append(question)
        return Decision.REJECT, "looks copied"


def context() -> ReviewContext:
    task = Task(
        id="t",
        suite="s",
        family="f",
        stratum=Stratum.EASY,
        instruction="Save the word to w.txt.",
        root=Path("."),
        digest="",
    )
    return ReviewContext(task=task, hidden_texts={"tests/test.sh": "grep -qx xylophone w.txt"})


def book(*lines: str) -> Runbook:
    return Runbook(
        id="b", task_id="t", source_trajectory_id="s", planner="p", lines=tuple(RunbookLine(text=x) for x in lines)
    )


def test_model_is_asked_with_public_text_only() -> None:
    runbook, reviewer = book("Save a word to w.txt.", "The verifier is strict."), Recorder()
    by_rules = review_runbook(runbook, context(), PolicyMode.HUMAN)
    assert by_rules.findings
    assert by_rules.decision is Decision.APPROVE  # soft findings go to people in mode `human`
    by_model = asyncio.run(review_with_model(runbook, context(), reviewer, by_rules))
    assert by_model is not None
    assert (by_model.reviewer, by_model.decision, by_model.reason) == (
        "model:recorder",
        Decision.REJECT,
        "looks copied",
    )
    assert "xylophone" not in repr(reviewer.asked)
    assert reviewer.asked[0].instruction == "Save the word to w.txt."
    assert gate_decision([review_runbook(runbook, context()), by_model], AUTO).status is GateStatus.REJECTED


def test_model_is_not_asked_after_a_hard_finding() -> None:
    runbook, reviewer = book("cat /tests/test.sh"), Recorder()
    by_rules = review_runbook(runbook, context())
    assert asyncio.run(review_with_model(runbook, context(), reviewer, by_rules)) is None
    assert reviewer.asked == []
