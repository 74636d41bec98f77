"""The rules about reviewers, on real gates: blindness, authors, third persons, findings that must be seen, undo, claims."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import text

from orchestrator import models as m
from orchestrator import review_look, reviewing, revising, workers
from orchestrator.finished import StoredPhases
from orchestrator.gate import policy_of
from orchestrator.models.columns import now
from orchestrator.persist import persist
from orchestrator.reviewing import ReviewRefused
from orchestrator.store.review_queue import QueueFilter
from stages.domain import Decision, Phase, Review, RunbookLine
from stages.errors import ConfigError, ServiceError, StoreError
from stages.records import PhaseStarted, RunbookReviewed
from tests.review_world import Gate, decide, look, state

YES, NO = Decision.APPROVE, Decision.REJECT


pytestmark = pytest.mark.usefixtures("submitted")
two = pytest.mark.parametrize("gate", [2], indirect=True)


# ------------------------------------------------------------------------------------------------------------ findings


def test_an_approval_asks_that_every_finding_was_seen_and_that_soft_ones_are_answered(gate: Gate) -> None:
    store, soft = gate.store, gate.soft
    findings = store.reviews.findings(soft, 1)
    assert findings
    with pytest.raises(ReviewRefused, match=f"{len(findings)} of {len(findings)} findings") as refused:
        reviewing.decide(store, soft, "ada", YES, reason="fine")
    assert refused.value.field == "seen"
    with pytest.raises(ReviewRefused, match="may stay") as refused:
        reviewing.decide(store, soft, "ada", YES, seen=[f.id or 0 for f in findings])
    assert refused.value.field == f"dismiss-{findings[0].id}"
    assert look(gate, soft, "ada").unseen == []  # the store knows
    assert len(look(gate, soft, "bob").unseen) == len(findings)  # of each person
    answers = {f.id or 0: f"because {i}" for i, f in enumerate(findings)}
    outcome = reviewing.decide(store, soft, "ada", YES, dismissals=answers)
    assert outcome.state is not None
    assert state(gate, soft) is m.RunbookState.APPROVED
    reason = store.reviews.standing(soft, 1)["person:ada"].reason
    assert findings[0].rule in reason
    assert "because 0" in reason


def test_findings_of_other_runbooks_do_not_count_as_seen(gate: Gate) -> None:
    foreign = gate.store.reviews.findings(gate.hard, 1)[0].id
    with pytest.raises(ReviewRefused, match="not looked at"):
        reviewing.decide(gate.store, gate.soft, "ada", YES, reason="x", seen=[foreign or 0, 10**12])
    assert gate.store.review_queue.seen(gate.hard, 1, "ada") == set()


def test_a_hard_finding_is_cured_by_a_revision_only(gate: Gate) -> None:
    store, hard = gate.store, gate.hard
    with pytest.raises(ReviewRefused, match="only a new revision"):
        decide(gate, hard, "ada", YES)
    assert state(gate, hard) is m.RunbookState.REJECTED
    lines = revising.from_text(revising.as_text(store.runbooks.get(hard).lines))
    rules = revising.revise(store, hard, "ada", lines[:-1], revision=1)
    assert not rules.findings
    assert state(gate, hard) is m.RunbookState.WAITING
    worse = [*lines[:-1], RunbookLine(text="cat /tests/test.sh", cites=(0,))]
    assert revising.revise(store, hard, "bob", worse, revision=2).decision is NO  # re-checked at once
    assert state(gate, hard) is m.RunbookState.REJECTED


@pytest.mark.parametrize(("number", "words"), [(None, ""), (9, " "), (10, "x"), (0, "x")])
def test_a_rejection_needs_a_reason(gate: Gate, number: int | None, words: str) -> None:
    with pytest.raises(ReviewRefused) as refused:
        decide(gate, gate.clean[0], "ada", NO, reason=words, number=number)
    assert refused.value.field == "reason"
    assert "person:ada" not in gate.store.reviews.standing(gate.clean[0], 1)


# ------------------------------------------------------------------------------------------------ people and the gate


@two
def test_reviewers_are_blind_until_their_own_verdict(gate: Gate) -> None:
    book = gate.clean[0]
    decide(gate, book, "ada", NO, reason="I say no")
    reviewing.comment(gate.store, book, "ada", "look at line 1")
    for_bob = look(gate, book, "bob")
    assert (for_bob.others, for_bob.hidden, for_bob.comments) == ([], 1, [])
    assert [c.text for c in look(gate, book, "ada").comments] == ["look at line 1"]
    assert look(gate, book, "lea", decider=False).others[0].reason == "I say no"  # a lead decides nothing
    decide(gate, book, "bob", YES)
    after = look(gate, book, "bob")
    assert [r.reviewer for r in after.others] == ["person:ada"]
    assert [c.text for c in after.comments] == ["look at line 1"]
    reviewing.undo(gate.store, book, "bob")
    assert look(gate, book, "bob").others == []


@two
def test_two_who_differ_wait_for_a_third(gate: Gate, submitted: list[int]) -> None:
    for book in (*gate.clean, gate.soft):
        for who, decision in (("ada", YES), ("bob", NO if book == gate.soft else YES)):
            outcome = decide(gate, book, who, decision)
    assert outcome.open
    assert submitted == []
    assert state(gate, gate.soft) is m.RunbookState.WAITING
    assert review_look.queue_of(gate.store, "cyd").count(gate.soft) == 1
    assert gate.soft not in review_look.queue_of(gate.store, "ada")
    assert not decide(gate, gate.soft, "cyd", NO).open
    assert state(gate, gate.soft) is m.RunbookState.REJECTED
    assert submitted == [gate.cycle_id]
    assert gate.store.cycles.get(gate.cycle_id).state is m.CycleState.RESUMING


def test_an_edit_voids_verdicts_and_excludes_its_author(gate: Gate) -> None:
    store, book = gate.store, gate.clean[0]
    decide(gate, book, "ada", YES)
    lines = revising.from_text(revising.as_text(store.runbooks.get(book).lines) + "\nls  [turn 0]")
    revising.revise(store, book, "bob", lines, revision=1)
    assert state(gate, book) is m.RunbookState.WAITING
    assert look(gate, book, "ada").mine is None
    with pytest.raises(ConfigError, match="bob wrote this revision"):
        decide(gate, book, "bob", YES)
    assert book not in review_look.queue_of(store, "bob")
    with pytest.raises(ReviewRefused, match="newer revision"):
        decide(gate, book, "ada", YES, revision=1)
    with pytest.raises(ReviewRefused, match="revised it meanwhile"):
        revising.revise(store, book, "cyd", lines[:-1], revision=1)
    with pytest.raises(ReviewRefused, match="nothing was changed"):
        revising.revise(store, book, "cyd", lines, revision=2)
    with pytest.raises(ReviewRefused, match="no turn 99"):
        revising.revise(store, book, "cyd", [RunbookLine(text="ls", cites=(99,))], revision=2)
    decide(gate, book, "ada", YES, revision=2)
    assert state(gate, book) is m.RunbookState.APPROVED
    assert ("+", "ls  [turn 0]") in revising.changes(*store.runbooks.revisions(book))


def test_undo_until_the_gate_has_consumed_it(gate: Gate, submitted: list[int]) -> None:
    store, (first, second) = gate.store, gate.clean
    decide(gate, first, "ada", YES)
    reviewing.undo(store, first, "ada")
    assert state(gate, first) is m.RunbookState.WAITING
    assert [r.decision.value for r in store.reviews.of(first, 1)] == [
        "approve",
        "approve",
        "withdraw",
    ]  # rules, ada, ada
    with pytest.raises(ReviewRefused, match="has no verdict"):
        reviewing.undo(store, first, "bob")
    for book, decision in ((first, YES), (second, NO), (gate.soft, NO)):
        decide(gate, book, "ada", decision)
    assert submitted == [gate.cycle_id]
    reviewing.undo(store, second, "ada")  # the flow has not come to the replays yet
    policy = policy_of(store, gate.stage)
    assert StoredPhases(store, gate.stage, policy).approved() is None  # so it will suspend again
    decide(gate, second, "ada", NO)
    assert StoredPhases(store, gate.stage, policy).approved() == {first}
    persist(store, gate.stage, PhaseStarted(phase=Phase.REPLAY, total=1))
    for book in (first, second):  # the rejected one as well
        assert look(gate, book, "ada").closed
        for act in (lambda b=book: reviewing.undo(store, b, "ada"), lambda b=book: decide(gate, b, "bob", NO)):
            with pytest.raises(ConfigError, match="consumed"):
                act()
        with pytest.raises(ConfigError, match="consumed"):
            revising.revise(store, book, "bob", [RunbookLine(text="ls")], revision=1)


@two
def test_two_reviewers_at_the_same_moment_settle_everything_once(gate: Gate, submitted: list[int]) -> None:
    books = (*gate.clean, gate.soft)
    ready = threading.Barrier(2)
    problems: list[BaseException] = []

    def review(who: str) -> None:
        try:
            for book in books:
                ready.wait(timeout=10)
                decide(gate, book, who, YES)
        except BaseException as error:
            problems.append(error)
            ready.abort()

    threads = [threading.Thread(target=review, args=(who,)) for who in ("ada", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert problems == []
    assert {state(gate, book) for book in books} == {m.RunbookState.APPROVED}
    assert submitted == [gate.cycle_id]


def test_bulk_rejection_is_all_or_nothing(gate: Gate, submitted: list[int]) -> None:
    with pytest.raises(StoreError, match="no runbook"):
        reviewing.reject_many(gate.store, [gate.clean[0], "f" * 24], "ada", number=1)
    assert state(gate, gate.clean[0]) is m.RunbookState.WAITING
    everything = [*gate.clean, gate.soft, gate.soft]
    assert reviewing.reject_many(gate.store, everything, "ada", number=1, settings=gate.settings) == 3
    assert submitted == [gate.cycle_id]
    assert not hasattr(reviewing, "approve_many")


# ----------------------------------------------------------------------------------------------------- claims and queue


def test_a_claim_keeps_others_out_and_ends_by_itself(gate: Gate) -> None:
    store, book = gate.store, gate.clean[0]
    assert timedelta(minutes=29) < reviewing.claim(store, book, "ada") - now() <= timedelta(minutes=30)
    assert book not in review_look.queue_of(store, "bob")
    for act in (lambda: reviewing.claim(store, book, "bob"), lambda: decide(gate, book, "bob", NO)):
        with pytest.raises(ReviewRefused, match="ada has claimed it"):
            act()
    with pytest.raises(ReviewRefused, match="ends by itself"):
        reviewing.release(store, book, "ada", by="bob")
    with store.transaction() as session:
        session.execute(
            text("UPDATE review_claim SET expires_at = now() - interval '1 s' WHERE runbook_id = :b"), {"b": book}
        )
    assert book in review_look.queue_of(store, "bob")
    reviewing.claim(store, book, "bob")
    decide(gate, book, "bob", NO)
    assert store.review_queue.claims([book]) == {}


@two
def test_as_many_may_claim_as_must_decide(gate: Gate) -> None:
    book = gate.clean[0]
    reviewing.claim(gate.store, book, "ada")
    reviewing.claim(gate.store, book, "bob")
    with pytest.raises(ReviewRefused, match="claimed"):
        reviewing.claim(gate.store, book, "cyd")


def test_an_assignment_keeps_nobody_out(gate: Gate) -> None:
    store, book = gate.store, gate.clean[0]
    if store.users.named("lea") is None:
        store.users.add("lea", [m.Role.LEAD])
    with pytest.raises(ReviewRefused, match="lea is no reviewer"):
        reviewing.assign(store, book, "lea", by="bob")
    reviewing.assign(store, book, "ada", by="lea")
    needs = review_look.needs(store)
    claimed = store.review_queue.rows(
        QueueFilter(claimed=True, cycle_id=gate.cycle_id), "ada", decider=True, needs=needs
    )
    assert [r.id for r in claimed] == [book]
    assert book in review_look.queue_of(store, "bob")
    reviewing.release(store, book, "ada", by="lea")
    assert store.review_queue.claims([book]) == {}


def test_what_is_put_off_comes_last(gate: Gate) -> None:
    first = gate.clean[0]
    reviewing.skip(gate.store, first, "ada")
    assert review_look.queue_of(gate.store, "ada")[-1] == first
    assert review_look.queue_of(gate.store, "bob")[-1] != first


def test_every_act_is_in_the_audit_log(gate: Gate) -> None:
    store, book = gate.store, gate.clean[0]
    reviewing.claim(store, book, "ada")
    reviewing.skip(store, book, "ada")
    reviewing.comment(store, book, "ada", "hm")
    assert "tests/test.sh" in review_look.look_at_hidden(store, book, "ada")
    decide(gate, book, "ada", YES)
    reviewing.undo(store, book, "ada")
    acts = [row.action for row in store.audit_trail.list(object_kind="runbook", object_id=book).items]
    assert acts == [f"runbook.{a}" for a in ("withdraw", "approve", "see-hidden", "comment", "skip", "claim")]


# -------------------------------------------------------------------------------------------------------------- races


def test_the_gate_closes_in_the_moment_in_which_it_counts(gate: Gate, submitted: list[int]) -> None:
    """A withdrawal between the count and the first replay would be taken, and the runbook replayed all the same."""
    store = gate.store
    for book in (*gate.clean, gate.soft):
        decide(gate, book, "ada", YES if book in gate.clean else NO)
    assert submitted == [gate.cycle_id]
    counted = StoredPhases(store, gate.stage, policy_of(store, gate.stage)).approved()
    assert counted == set(gate.clean)
    for act in (
        lambda: reviewing.undo(store, gate.clean[0], "ada"),
        lambda: decide(gate, gate.soft, "bob", YES),
    ):
        with pytest.raises(ConfigError, match="consumed"):
            act()
    assert StoredPhases(store, gate.stage, policy_of(store, gate.stage)).approved() == counted  # after a crash


def test_a_model_advises_and_people_decide(gate: Gate) -> None:
    """In mode `human` a model's rejection keeps the runbook in the queue, and never follows upon a person's verdict."""
    store, (first, second) = gate.store, gate.clean
    decide(gate, second, "ada", YES)
    for book in (first, second):
        said = Review(runbook_id=book, revision=1, reviewer="model:small", decision=NO, reason="looks odd")
        persist(store, gate.stage, RunbookReviewed(review=said), human_review=True)
    assert state(gate, first) is m.RunbookState.WAITING
    assert first in review_look.queue_of(store, "ada")
    assert look(gate, first, "ada").hidden == 0  # a planted one has no model's verdict
    assert state(gate, second) is m.RunbookState.APPROVED


def test_a_verdict_stands_when_no_server_takes_the_cycle(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> str:
        raise ServiceError("No Prefect server answers")

    monkeypatch.setattr(workers, "submit_cycle", away)
    for book in (*gate.clean, gate.soft):
        outcome = decide(gate, book, "ada", NO)
    assert not outcome.open
    row = gate.store.cycles.get(gate.cycle_id)
    assert row.state is m.CycleState.FAILED
    assert "No Prefect server answers" in row.error
