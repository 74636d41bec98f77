"""What reviewers do not learn before their own verdict: what others decided, and which items are planted."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from orchestrator import known_leaks, review_look, reviewing, revising
from orchestrator import models as m
from orchestrator.finished import StoredPhases
from orchestrator.gate import policy_of
from orchestrator.models import Role
from orchestrator.persist import persist
from orchestrator.review_statistics import review_statistics
from orchestrator.reviewing import ReviewRefused
from orchestrator.store.review_queue import QueueFilter
from stages.domain import Decision, Phase
from stages.errors import ConfigError
from stages.records import PhaseStarted
from tests.console_people import app_for, client_as
from tests.review_world import Gate, NewGate, decide, look

YES, NO = Decision.APPROVE, Decision.REJECT


pytestmark = pytest.mark.usefixtures("submitted")
two = pytest.mark.parametrize("gate", [2], indirect=True)


def test_a_planted_leak_looks_like_any_other_item_and_reaches_nothing(new_gate: NewGate, submitted: list[int]) -> None:
    gate = new_gate(clean=3, planted=0.5)
    store = gate.store
    assert gate.stage.id is not None
    planted = store.review_queue.planted_in(gate.stage.id)
    assert len(planted) == 2  # half of four
    leak = planted[0]
    copy, original = store.runbooks.get(leak.runbook_id), store.runbooks.get(leak.copy_of)
    assert copy.lines != original.lines
    assert (copy.stage_id, copy.cycle_id) == (None, None)
    assert (copy.created_at, copy.author, copy.planner) == (original.created_at, "", original.planner)
    ids = {p.runbook_id for p in planted}
    waiting = set(review_look.queue_of(store, "ada"))
    assert ids <= waiting
    assert not {p.copy_of for p in planted} & waiting  # two of one task would tell
    assert not ids & {b.id for b in store.runbooks.load(gate.stage.id)}
    assert not ids & {r.id for r in store.runbooks.list(limit=1000).items}
    before = look(gate, leak.runbook_id, "ada")
    assert before.planted is None
    assert before.stage is not None
    assert before.stage.id == gate.stage.id
    assert not before.hard
    with pytest.raises(ReviewRefused):  # the same rules hold for it
        reviewing.decide(store, leak.runbook_id, "ada", NO)
    reviewing.claim(store, leak.runbook_id, "ada")
    outcome = decide(gate, leak.runbook_id, "ada", NO)
    assert outcome.planted is not None
    assert outcome.planted.truth == leak.truth
    assert look(gate, leak.runbook_id, "ada").planted is not None
    assert look(gate, leak.runbook_id, "bob").planted is None  # still an item for others
    assert leak.copy_of in review_look.queue_of(store, "ada")
    assert leak.runbook_id in review_look.queue_of(store, "bob")
    assert leak.copy_of not in review_look.queue_of(store, "bob")
    with pytest.raises(ReviewRefused, match="revealed"):
        reviewing.undo(store, leak.runbook_id, "ada")
    decide(gate, planted[1].runbook_id, "bob", YES)
    mine = {r.login: r for r in review_statistics(store).reviewers}
    assert (mine["ada"].leaks_found, mine["ada"].leaks) == (1, 1)
    assert (mine["bob"].leaks_found, mine["bob"].leaks) == (0, 1)
    for book in (*gate.clean, gate.soft):
        decide(gate, book, "ada", YES)
    assert submitted == [gate.cycle_id]  # the one that ada has not decided on holds nothing up
    assert not ids & set(review_look.queue_of(store, "ada"))  # and leaves with its gate
    assert StoredPhases(store, gate.stage, policy_of(store, gate.stage)).approved() == {*gate.clean, gate.soft}
    assert known_leaks.plant(store, gate.stage, policy_of(store, gate.stage), 0.5) == 0  # once


@two
def test_statistics_count_first_verdicts(gate: Gate) -> None:
    before = review_statistics(gate.store)
    first, second = gate.clean
    for who, decision in (("ada", YES), ("bob", YES)):
        decide(gate, first, who, decision)
    for who, decision in (("ada", YES), ("bob", NO)):
        decide(gate, second, who, decision)
    reviewing.undo(gate.store, second, "bob")
    decide(gate, second, "bob", YES)
    after = review_statistics(gate.store)
    assert (after.agreed - before.agreed, after.pairs - before.pairs) == (1, 2)
    assert after.turnaround_s is not None
    taken = {r.login: r.withdrawn for r in before.reviewers}
    assert next(r for r in after.reviewers if r.login == "bob").withdrawn == taken.get("bob", 0) + 1


def test_a_planted_leak_that_others_decided_on_says_no_more_than_a_real_one(new_gate: NewGate) -> None:
    """A real runbook with as many verdicts as it needs waits for nobody: such a count would betray the planted one."""
    gate = new_gate(clean=3, planted=0.5)
    store = gate.store
    first, second = (p.runbook_id for p in store.review_queue.planted_in(gate.stage.id or 0))
    decide(gate, first, "ada", NO)
    decide(gate, second, "ada", NO)
    event = store.events.latest(cycle_id=gate.cycle_id, limit=1)[0]
    assert (event.kind, event.stage_id, event.payload) == ("reviews.changed", gate.stage.id, {})  # as of a real one
    for_bob = look(gate, first, "bob")
    assert (for_bob.people, for_bob.hidden, for_bob.closed) == (0, 0, False)
    where = QueueFilter(cycle_id=gate.cycle_id)
    rows = store.review_queue.rows(where, "bob", decider=True, needs=review_look.needs(store))
    assert {r.people for r in rows} == {0}
    book = store.runbooks.get(first)
    lines = revising.from_text(revising.as_text(book.lines))
    with pytest.raises(ReviewRefused, match="nothing was changed"):  # probing costs what an edit costs
        revising.revise(store, first, "bob", lines, revision=1)
    assert "person:bob" not in store.reviews.standing(first, 1)
    reviewing.claim(store, first, "bob")
    with pytest.raises(ReviewRefused, match="bob has claimed it"):
        decide(gate, first, "cyd", NO)
    persist(store, gate.stage, PhaseStarted(phase=Phase.REPLAY, total=1))
    assert look(gate, first, "bob").closed
    with pytest.raises(ConfigError, match="consumed"):
        decide(gate, first, "bob", NO)


@two
def test_counts_and_the_audit_log_tell_no_verdict_before_the_own_one(gate: Gate) -> None:
    store, book = gate.store, gate.clean[0]

    def told() -> tuple[object, list[str]]:
        reviewers = {r.login: r for r in review_statistics(store, blind_to="bob").reviewers}
        log = store.audit_trail.list(object_kind="runbook", object_id=book, blind_to="bob").items
        return reviewers.get("ada"), [f"{row.actor} {row.action}" for row in log]

    before = told()
    decide(gate, book, "ada", NO)
    decide(gate, gate.soft, "ada", YES)
    assert told() == before
    assert store.audit_trail.list(object_kind="runbook", object_id=book).items[0].action == "runbook.reject"
    assert not review_look.readable(store, book, "bob")
    decide(gate, book, "bob", YES)
    assert told()[1][:2] == ["bob runbook.approve", "ada runbook.reject"]
    assert told()[0] != before[0]
    assert review_look.readable(store, book, "bob")
    reviewing.undo(store, book, "bob")
    assert "ada runbook.reject" not in told()[1]  # blind again
    assert not review_look.readable(store, book, "bob")


def test_what_a_finding_matches_in_hidden_files_is_for_those_who_may_see_them() -> None:
    finding = m.Finding(evidence="42", evidence_source="tests/test.sh:3")
    assert review_look.evidence(finding, hidden=False) == ""
    assert review_look.evidence(finding, hidden=True) == "42"
    finding.evidence_source = "turn 3"
    assert review_look.evidence(finding, hidden=False) == "42"


def test_no_other_way_in_sees_more(gate: Gate) -> None:
    """A token that may only read, a browser that is signed out, the source's page, the audit log of who also leads."""
    store, book = gate.store, gate.clean[0]
    app = app_for(store, anonymous_roles="reviewer,lead")
    decide(gate, book, "ada", NO, reason="ada's own words")
    bob = client_as(app, Role.REVIEWER, login="bob")
    user = store.users.named("bob")
    assert user is not None
    secret = store.api_tokens.make(user.id or 0, "reader", ["see", "see.reviews"])
    both = client_as(app, Role.REVIEWER, Role.LEAD)
    stranger, program = TestClient(app), TestClient(app, headers={"Authorization": f"Bearer {secret}"})
    source = f"/trajectories/{store.runbooks.get(book).source_trajectory_id}"
    for client in (bob, both, stranger, program):
        for path in (f"/reviews/{book}", source, "/reviews?state=all", f"/audit-log?object={book}"):
            html = client.get(path).text
            assert "ada&#39;s own words" not in html, path
            assert "ada: reject" not in html, path
        assert book not in client.get(source).text  # a planted one would not stand there either
        assert ">runbook.reject</a>" not in client.get(f"/audit-log?object={book}").text
    lead = client_as(app, Role.LEAD)
    assert "ada&#39;s own words" in lead.get(f"/reviews/{book}").text
    assert book in lead.get(source).text
    assert "ada&#39;s own words" in lead.get(f"/audit-log?object={book}").text
