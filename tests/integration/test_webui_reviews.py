"""The reviewer's pages: who may see what, forms and their errors, blindness in the HTML, hidden files, hostile text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from orchestrator import models as m
from orchestrator import review_look, reviewing
from orchestrator.cli import app as rsi
from orchestrator.models import Role
from orchestrator.review_sources import task_of
from orchestrator.settings import get_settings
from orchestrator.store import Store
from stages.domain import Decision
from tests.console_cycle import HOSTILE, Seeded, seed_cycle
from tests.console_people import SignedIn, app_for, client_as
from tests.review_world import Gate, NewGate


@pytest.fixture(scope="module")
def world(module_store: Store, module_folder: Path, module_database_url: str) -> tuple[Store, Path, FastAPI, str]:
    return module_store, module_folder, app_for(module_store), module_database_url


@pytest.fixture
def gate(new_gate: NewGate) -> Gate:
    return new_gate(clean=2, reviewers=2)


def who(world: tuple[Store, Path, FastAPI, str], login: str, *roles: Role) -> SignedIn:
    return client_as(world[2], *(roles or (Role.REVIEWER,)), login=login)


def send(client: SignedIn, path: str, **fields: object) -> object:
    return client.post(path, data={"csrf": client.csrf} | fields, follow_redirects=False)  # type: ignore[arg-type]


def flat(html: str) -> str:
    return re.sub(r"\s+", " ", html)


# --------------------------------------------------------------------------------------------------------- permissions


def test_pages_and_forms_are_for_their_roles(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    book = gate.clean[0]
    lead, analyst, reviewer = (
        who(world, "lea", Role.LEAD),
        who(world, "ann", Role.ANALYST),
        who(world, "ada"),
    )
    for path in ("/reviews", f"/reviews/{book}"):
        assert [c.get(path).status_code for c in (lead, analyst, reviewer)] == [200, 404, 200]
    assert [c.get(f"/reviews/{book}?hidden=1").status_code for c in (lead, analyst, reviewer)] == [404, 404, 200]
    for action in ("decide", "undo", "revise", "skip", "claim", "comment"):
        for client in (lead, analyst):
            assert send(client, f"/reviews/{book}/{action}", revision=1).status_code == 403, action
    assert send(lead, "/reviews/reject", runbook=book, number=1).status_code == 403
    assert send(lead, f"/reviews/{book}/assign", assignee="bob").status_code == 303
    assert send(analyst, f"/reviews/{book}/assign", assignee="bob").status_code == 403
    assert "Reviews" not in analyst.get("/cycles").text.split("</nav>")[0]
    assert "See" not in lead.get(f"/reviews/{book}").text.split("<main")[1].split("Hidden tests")[0]
    assert "Hidden tests" not in lead.get(f"/reviews/{book}").text
    assert world[0].runbooks.get(book).state is m.RunbookState.WAITING


def test_a_form_without_its_token_changes_nothing(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client = who(world, "ada")
    answer = client.post(f"/reviews/{gate.clean[0]}/decide", data={"decision": "approve"}, follow_redirects=False)
    assert answer.status_code == 403
    assert world[0].reviews.standing(gate.clean[0], 1).keys() == {"rules"}


def test_numbers_of_thousands_of_digits_are_no_error_of_ours(
    world: tuple[Store, Path, FastAPI, str], gate: Gate
) -> None:
    client, analyst, many = who(world, "ada"), who(world, "ann", Role.ANALYST), "9" * 5000
    path = f"/reviews/{gate.soft}/decide"
    for fields in ({"number": many}, {"seen": many}, {f"dismiss-{many}": "x"}, {"revision": many, "number": "1"}):
        answer = send(client, path, decision="reject", **fields)
        assert answer.status_code in (303, 422), fields
    assert send(analyst, "/audits", cycle=many).status_code == 422
    assert send(analyst, "/audits", checkpoint=f"{many}/x").status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("get", "/reviews/nothing", 404),
        ("get", "/reviews?state=great", 422),
        ("get", "/reviews?after=x", 422),
        ("get", "/reviews?cycle=x", 422),
        ("get", "/reviews?state=all&task=nothing", 200),
        ("post", "/reviews/nothing/decide", 404),
        ("post", "/reviews/nothing/undo", 404),
        ("post", "/reviews/nothing/comment", 404),
    ],
)
def test_wrong_addresses(world: tuple[Store, Path, FastAPI, str], method: str, path: str, status: int) -> None:
    client = who(world, "ada")
    answer = client.get(path) if method == "get" else send(client, path, decision="approve")
    assert answer.status_code == status


# -------------------------------------------------------------------------------------------------------------- queue


def test_the_queue_shows_findings_filters_and_what_waits_for_me(
    world: tuple[Store, Path, FastAPI, str], gate: Gate
) -> None:
    client = who(world, "ada")
    page = client.get(f"/reviews?mine=1&cycle={gate.cycle_id}").text
    for book in (*gate.clean, gate.soft):
        assert f'href="/reviews/{book}"' in page
    assert f'href="/reviews/{gate.hard}"' not in page
    assert "1 soft artifact" in page
    assert "3 runbooks wait for you" in flat(page)
    waiting = review_look.waiting_for(world[0], "ada")
    assert f'Reviews <span class="count">({waiting})</span>' in page
    rejected = client.get(f"/reviews?state=rejected&stage={gate.stage.id}").text
    assert f'href="/reviews/{gate.hard}"' in rejected
    assert "hard pattern" in rejected
    first, second = gate.clean
    send(client, f"/reviews/{first}/claim", back=f"/reviews?cycle={gate.cycle_id}")
    claimed = client.get(f"/reviews?claimed=1&cycle={gate.cycle_id}").text
    assert f'href="/reviews/{first}"' in claimed
    assert f'href="/reviews/{second}"' not in claimed
    assert "Release" in claimed


def test_a_redirect_never_leaves_the_console(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client = who(world, "ada")
    answer = send(client, f"/reviews/{gate.clean[0]}/claim", back="https://evil.example/")
    assert answer.headers["location"] == "/"
    answer = send(client, "/reviews/reject", runbook=gate.clean[0], number=1, back="//evil.example/reviews")
    assert answer.headers["location"] == "/reviews"


def test_bulk_rejection_says_what_is_missing(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client = who(world, "ada")
    here = f"/reviews?cycle={gate.cycle_id}"
    answer = send(client, "/reviews/reject", number=1, back=here)
    assert answer.status_code == 422
    assert "Tick some runbooks first" in answer.text
    assert f'href="/reviews/{gate.soft}"' in answer.text  # the same list
    answer = send(client, "/reviews/reject", runbook=[gate.clean[1]], number=9, back=here)
    assert answer.status_code == 422
    assert re.findall(r'name="runbook" value="(\w+)" checked', answer.text) == [gate.clean[1]]  # nothing is lost
    assert '<option value="9" selected>' in answer.text
    answer = send(client, "/reviews/reject", runbook=list(gate.clean), number=4, reason="the key", back=here)
    assert (answer.status_code, answer.headers["location"]) == (303, here)
    assert world[0].reviews.standing(gate.clean[0], 1)["person:ada"].reason == "holds a secret: the key"


# ----------------------------------------------------------------------------------------------------------- two panes


def test_a_runbook_stands_beside_its_turns_with_its_findings_in_place(
    world: tuple[Store, Path, FastAPI, str], gate: Gate
) -> None:
    html = who(world, "ada").get(f"/reviews/{gate.soft}").text
    finding = world[0].reviews.findings(gate.soft, 1)[0]
    line = world[0].runbooks.get(gate.soft).lines[finding.line or 0]["text"]
    assert f'<mark class="soft" data-findings="1">{line[finding.start : finding.end]}</mark>' in html
    assert 'id="finding-1"' in html
    assert re.search(r'<a href="#t1">t1</a>', html)
    assert re.search(r'class="turn cited" id="t1"', html)
    assert re.search(r'class="turn" id="t2"', html)
    assert f'name="seen" value="{finding.id}"' in html


def test_errors_stand_beside_their_fields_and_keep_what_was_typed(
    world: tuple[Store, Path, FastAPI, str], gate: Gate
) -> None:
    client, store = who(world, "ada"), world[0]
    finding = store.reviews.findings(gate.soft, 1)[0]
    path = f"/reviews/{gate.soft}/decide"
    unseen = send(client, path, decision="approve", reason="my words", revision=1)
    assert unseen.status_code == 422
    assert "findings were not looked at yet" in unseen.text
    assert "my words</textarea>" in unseen.text
    undismissed = send(client, path, decision="approve", seen=finding.id, revision=1)
    assert (
        f'name="dismiss-{finding.id}" form="decision" value="" maxlength="2000" aria-invalid="true"' in undismissed.text
    )
    assert send(client, path, decision="reject", revision=1).text.count('id="reason-error"') == 1
    assert send(client, path, decision="maybe", revision=1).status_code == 422
    stale = send(client, path, decision="reject", number=1, revision=7)
    assert "has a newer revision" in stale.text
    assert "needs words" in send(client, f"/reviews/{gate.soft}/comment", text="  ").text
    wrong = send(client, f"/reviews/{gate.soft}/revise", revision=1, text="ls  [turn 99]")
    assert "there is no turn 99" in wrong.text
    assert "ls  [turn 99]</textarea>" in wrong.text
    assert store.reviews.standing(gate.soft, 1).keys() == {"rules"}
    assert store.runbooks.get(gate.soft).revision == 1


def test_a_hard_finding_has_no_approve_button(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client = who(world, "ada")
    html = client.get(f"/reviews/{gate.hard}").text
    assert 'value="approve"' not in html
    ids = [f.id for f in world[0].reviews.findings(gate.hard, 1)]
    forced = send(client, f"/reviews/{gate.hard}/decide", decision="approve", seen=ids, reason="please", revision=1)
    assert forced.status_code == 422
    assert "only a new revision cures it" in forced.text


def test_a_verdict_leads_on_and_others_stay_hidden_until_then(
    world: tuple[Store, Path, FastAPI, str], gate: Gate
) -> None:
    ada, bob = who(world, "ada"), who(world, "bob")
    book = gate.clean[0]
    send(ada, f"/reviews/{book}/comment", text="ada's remark")
    answer = send(ada, f"/reviews/{book}/decide", decision="reject", number=8, reason="ada's words", revision=1)
    assert answer.status_code == 303
    assert answer.headers["location"].endswith(f"?last={book}")
    following = ada.get(answer.headers["location"]).text
    assert "You rejected runbook" in following
    assert f'action="/reviews/{book}/undo"' in following
    blind = bob.get(f"/reviews/{book}").text
    assert "1 other verdict hidden until yours" in flat(blind)
    assert "ada&#39;s" not in blind
    assert "another is hidden until yours" in bob.get(f"/reviews?cycle={gate.cycle_id}").text
    lead = who(world, "lea", Role.LEAD).get(f"/reviews/{book}").text
    assert "ada&#39;s words" in lead
    send(bob, f"/reviews/{book}/decide", decision="approve", revision=1)
    seeing = bob.get(f"/reviews/{book}").text
    assert "ada&#39;s words" in seeing
    assert "ada&#39;s remark" in seeing
    row = (
        bob.get(f"/reviews?state=all&cycle={gate.cycle_id}").text.split(f'href="/reviews/{book}"')[1].split("</tr>")[0]
    )
    assert "another is hidden" not in row
    assert "approve" in row
    assert send(bob, f"/reviews/{book}/undo").status_code == 303
    assert "person:bob" not in world[0].reviews.standing(book, 1)


def test_a_look_at_hidden_files_is_logged_and_not_cached(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client, store = who(world, "ada"), world[0]
    assert "solve.sh" not in client.get(f"/reviews/{gate.hard}").text
    before = len(store.audit_trail.list(object_id=gate.hard).items)
    answer = client.get(f"/reviews/{gate.hard}?hidden=1")
    assert "solution/solve.sh" in answer.text
    assert "tests/test.sh" in answer.text
    assert answer.headers["cache-control"] == "no-store"
    log = store.audit_trail.list(object_id=gate.hard).items
    assert len(log) == before + 1
    assert (log[0].actor, log[0].action) == ("ada", "runbook.see-hidden")


def test_a_pool_that_is_not_here_is_said(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    store = world[0]
    row = store.runbooks.get(gate.soft)
    folder = task_of(store, row).root
    folder.rename(folder.with_suffix(".away"))
    try:
        html = who(world, "ada").get(f"/reviews/{gate.soft}?hidden=1").text
        assert "is not on this machine" in html
        client = who(world, "ada")
        text = "\n".join(line["text"] for line in row.lines) + "\nls"
        assert "is not on this machine" in send(client, f"/reviews/{gate.soft}/revise", revision=1, text=text).text
        assert store.runbooks.get(gate.soft).revision == 1  # unchecked, so not stored
    finally:
        folder.with_suffix(".away").rename(folder)


def test_single_keys_are_a_preference(world: tuple[Store, Path, FastAPI, str], gate: Gate) -> None:
    client, store = who(world, "ada"), world[0]
    assert 'id="keys" data-on="1"' in client.get(f"/reviews/{gate.soft}").text
    user = store.users.named("ada")
    assert user is not None
    store.users.set_preferences(user.id or 0, {"theme": "dark"})
    send(client, "/reviews/keys", on="0", back=f"/reviews/{gate.soft}")
    assert 'id="keys" data-on="0"' in client.get(f"/reviews/{gate.soft}").text
    assert store.users.get(user.id or 0).preferences == {"theme": "dark", "review_keys": False}
    send(client, "/reviews/keys", on="1")


def test_a_known_leak_is_revealed_after_the_verdict_only(
    world: tuple[Store, Path, FastAPI, str], new_gate: NewGate
) -> None:
    gate = new_gate(clean=3, planted=0.3)
    leak = world[0].review_queue.planted_in(gate.stage.id or 0)[0]
    client = who(world, "cyd")
    address = f"/reviews/{leak.runbook_id}"
    assert f'href="{address}"' in client.get(f"/reviews?mine=1&cycle={gate.cycle_id}").text
    html = client.get(address).text
    assert "known leak" not in html.lower()
    assert leak.copy_of not in html
    trajectory = world[0].runbooks.get(leak.runbook_id).source_trajectory_id
    assert leak.runbook_id not in client.get(f"/trajectories/{trajectory}").text
    answer = send(client, f"{address}/decide", decision="reject", number=1, revision=1)
    after = client.get(answer.headers["location"]).text
    assert "A known leak, and you found it." in after
    assert "known leak, planted in line" in client.get(address).text
    assert "known leak" not in who(world, "bob").get(address).text.lower()
    assert leak.runbook_id not in who(world, "lea", Role.LEAD).get(f"/reviews?cycle={gate.cycle_id}").text


# -------------------------------------------------------------------------------------------------------- hostile text


@pytest.fixture(scope="module")
def hostile(world: tuple[Store, Path, FastAPI, str]) -> Seeded:
    seeded = seed_cycle(world[0], world[1], until=2, running=True, offset=3_000_000)
    world[0].runbooks.set_state(seeded.runbook_id, 1, m.RunbookState.WAITING)
    return seeded


def test_no_text_of_a_model_or_person_becomes_markup(world: tuple[Store, Path, FastAPI, str], hostile: Seeded) -> None:
    client = who(world, "ada")
    path = f"/reviews/{hostile.runbook_id}"
    world[0].review_queue.comment(hostile.runbook_id, 1, "ada", HOSTILE)
    for address in (path, f"{path}?edit=1", f"{path}?hidden=1", f"/reviews?cycle={hostile.cycle.id}"):
        html = client.get(address).text
        assert "<script>alert" not in html, address
        assert "<img src=x" not in html, address
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", html), address
        assert not re.findall(r"<script(?![^>]* src=)|<style", html), address
    assert html.count("evil&lt;task&gt;") >= 1


# ---------------------------------------------------------------------------------------------------------------- cli


def test_the_command_line_keeps_the_same_rules(
    world: tuple[Store, Path, FastAPI, str], gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RSI_DATABASE_URL", world[3])
    monkeypatch.setenv("RSI_HOME", str(tmp_path))
    monkeypatch.setenv("RSI_ARTIFACT_URL", str(world[1] / "artifacts"))
    monkeypatch.setenv("COLUMNS", "200")
    get_settings.cache_clear()
    run = CliRunner()

    def call(*words: str) -> str:
        result = run.invoke(rsi, ["review", *words])
        return result.output + (f" {result.exception}" if result.exception else "")

    try:
        assert gate.soft in call("list", "--as", "ada", "--cycle", str(gate.cycle_id), "--mine")
        assert "not looked at" in call("approve", gate.soft, "--as", "ada", "--reason", "x")
        reviewing.decide(world[0], gate.soft, "bob", Decision.REJECT, reason="bob says no")
        shown = call("show", gate.soft[:9], "--as", "ada")
        assert "bob says no" not in shown
        assert "hidden until yours" in shown
        assert "still wait" in call("approve", gate.soft, "--as", "ada", "--reason", "x")
        assert "bob says no" in call("show", gate.soft, "--as", "ada")
        assert "pending" in call("undo", gate.soft, "--as", "ada")
        assert "is yours until" in call("claim", gate.clean[0], "--as", "ada")
        assert "is free" in call("release", gate.clean[0], "--as", "ada")
        lines = tmp_path / "lines.txt"
        lines.write_text(call("revise", gate.clean[0], "--as", "ada") + "ls  [turn 0]\n", encoding="utf-8")
        assert "revision 2: the rules approve" in call("revise", gate.clean[0], "--as", "ada", "--file", str(lines))
        assert "wrote this revision" in call("approve", gate.clean[0], "--as", "ada")
        assert "needs a reason" in call("reject", gate.clean[1], "--as", "ada")
        assert "adda is no person here" in call("approve", gate.clean[1], "--as", "adda")
        assert "adda is no person here" in call("show", gate.clean[1], "--as", "adda")
        monkeypatch.setenv("USER", "adda")
        assert gate.soft in call("list")  # anybody at this machine may look
        assert "adda is no person here" in call("approve", gate.clean[1])
        monkeypatch.setenv("USER", "ada")
        assert "needs a reason" in call("reject", gate.clean[1])
        assert "ada" in call("statistics")
    finally:
        get_settings.cache_clear()
