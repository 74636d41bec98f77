"""People, their passwords, links and tokens, and the log of it: by page, by program and by command."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from orchestrator import accounts
from orchestrator import models as m
from orchestrator.passwords import hash_password
from orchestrator.store import Store
from orchestrator.store.accounts import FREE, LONGEST_S, pause_s
from stages.errors import ConfigError
from tests.console_people import SignedIn, app_for, client_as, settings_for
from webui.access import Action

PASSWORD = "a long enough one"


@pytest.fixture
def app(store: Store) -> FastAPI:
    return app_for(store)


@pytest.fixture
def admin(app: FastAPI) -> Iterator[SignedIn]:
    client = client_as(app, m.Role.ADMIN, login="root")
    client.follow_redirects = False
    return client


def send(client: SignedIn, path: str, **fields: object) -> tuple[int, str]:
    answer = client.post(path, data={"csrf": client.csrf, **fields})  # type: ignore[dict-item]
    return answer.status_code, answer.text


def shown_once(html: str) -> str:
    found = re.search(r'id="once" class="mono" value="([^"]+)"', html)
    assert found is not None
    return found[1]


def problem_beside(html: str, name: str) -> str:
    found = re.search(rf'id="{name}-problem">([^<]+)<', html)
    return found[1] if found else ""


# ---------------------------------------------------------------------------------------------------------------- people


def test_somebody_is_added_and_signs_in_for_the_first_time(app: FastAPI, store: Store, admin: SignedIn) -> None:
    status, html = send(admin, "/people", login="ada", name="Ada L.", email="", role=["lead", "analyst"])
    assert status == 201
    link = shown_once(html)
    assert link not in admin.get("/people").text  # nowhere again
    path = link.removeprefix(settings_for(store).console_public)
    ada = TestClient(app, follow_redirects=False)
    assert ada.get(path).status_code == 200  # a scanner that opens the link does not use it up
    key = path.partition("key=")[2]
    first = ada.post("/sign-in/link", data={"key": key})
    assert (first.status_code, first.headers["Location"]) == (303, "/account?done=choose")
    page = ada.get("/account?done=choose").text
    assert "Choose a password" in page
    assert "Present password" not in page
    assert TestClient(app).post("/sign-in/link", data={"key": key}).status_code == 422  # once
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)
    assert csrf is not None
    chosen = {"csrf": csrf[1], "password": PASSWORD, "again": PASSWORD}
    assert ada.post("/account/password", data=chosen).status_code == 303
    other = TestClient(app, follow_redirects=False)
    assert other.post("/sign-in", data={"login": "ada", "password": PASSWORD}).status_code == 303
    person = store.users.named("ada")
    assert person is not None
    assert person.roles == ["analyst", "lead"]


def test_each_field_says_what_is_wrong_and_nobody_is_added(store: Store, admin: SignedIn) -> None:
    status, html = send(admin, "/people", login="a b", name="x" * 201, role=["emperor"])
    assert status == 422
    assert "no login" in problem_beside(html, "login") or "At most" in problem_beside(html, "name")
    assert "At most 200" in problem_beside(html, "name")
    assert "emperor" in problem_beside(html, "role")
    assert "taken" in problem_beside(send(admin, "/people", login="root")[1], "login")
    assert "no login" in problem_beside(send(admin, "/people", login="a/b")[1], "login")
    assert send(admin, "/people")[0] == 422
    assert [u.login for u in store.users.list()] == ["root"]


def test_roles_and_disabling_hold_at_once(app: FastAPI, store: Store, admin: SignedIn) -> None:
    bob = client_as(app, m.Role.ANALYST, login="bob")
    bob.follow_redirects = False
    number = store.users.named("bob").id  # type: ignore[union-attr]
    token = store.api_tokens.make(number or 0, "script", ["see"])
    program = {"Authorization": f"Bearer {token}"}
    assert bob.get("/audit-log").status_code == 404
    assert send(admin, f"/people/{number}/roles", role=["admin", "analyst"])[0] == 303
    assert bob.get("/audit-log").status_code == 200
    assert TestClient(app).get("/cycles", headers=program).status_code == 200
    assert send(admin, f"/people/{number}/disable")[0] == 303
    assert bob.get("/").status_code == 303
    assert TestClient(app).get("/cycles", headers=program).status_code == 401
    assert send(admin, f"/people/{number}/link")[0] == 422
    assert send(admin, f"/people/{number}/enable")[0] == 303
    assert bob.get("/").status_code == 303  # signs in anew
    assert TestClient(app).get("/cycles", headers=program).status_code == 200
    told = [row.action for row in store.audit_trail.list(object_kind="user", object_id="bob").items]
    assert told == ["user.enable", "user.disable", "user.roles"]


def test_the_last_administrator_stays(store: Store, admin: SignedIn) -> None:
    mine = store.users.named("root").id  # type: ignore[union-attr]
    assert "another one must do it" in send(admin, f"/people/{mine}/roles", role=["lead"])[1]
    assert send(admin, f"/people/{mine}/disable")[0] == 422
    assert send(admin, "/people/999/disable")[0] == 404
    assert store.users.get(mine or 0).roles == ["admin"]
    assert store.users.get(mine or 0).disabled_at is None


# ------------------------------------------------------------------------------------------------------------- passwords


def test_a_new_password_needs_the_present_one_and_ends_other_sign_ins(app: FastAPI, store: Store) -> None:
    user = store.users.add("eve", [m.Role.LEAD], password_hash=hash_password("the first one"))
    here, there = client_as(app, login="eve"), client_as(app, login="eve")
    there.follow_redirects = here.follow_redirects = False
    status, html = send(here, "/account/password", current="wrong", password=PASSWORD, again="another one")
    assert status == 422
    assert "not your present" in problem_beside(html, "current")
    assert "not the same" in problem_beside(html, "again")
    assert "8 are needed" in problem_beside(
        send(here, "/account/password", current="the first one", password="short", again="short")[1], "password"
    )
    assert there.get("/").status_code == 200
    assert send(here, "/account/password", current="the first one", password=PASSWORD, again=PASSWORD)[0] == 303
    assert here.get("/").status_code == 200
    assert there.get("/").status_code == 303
    assert store.users.get(user.id or 0).password_hash != user.password_hash
    third = client_as(app, login="eve")
    assert "browser" in here.get("/account").text
    assert send(here, "/account/sign-outs")[0] == 303
    assert third.get("/", follow_redirects=False).status_code == 303


def test_pauses_double_up_to_their_limit() -> None:
    for kind, free in FREE.items():
        assert pause_s(kind, free) == 0
        waits = [pause_s(kind, n) for n in range(free + 1, free + 60)]
        assert waits[:3] == [2, 4, 8]
        assert waits == sorted(waits)
        assert waits[-1] == LONGEST_S[kind]


# ----------------------------------------------------------------------------------------------------------------- links


def test_a_link_holds_once_and_for_its_person_only(store: Store) -> None:
    ada, bob = store.users.add("ada", []), store.users.add("bob", [])
    link = store.sign_in_links.make(ada.id or 0)
    assert store.sign_in_links.use(link[:-1]) is None
    found = store.sign_in_links.use(link)
    assert found is not None
    assert found.login == "ada"
    assert store.sign_in_links.use(link) is None
    assert store.sign_in_links.use(store.sign_in_links.make(ada.id or 0, minutes=0)) is None
    kept = store.sign_in_links.make(bob.id or 0)
    store.sign_ins.end_all(bob.id or 0)  # a reset password also ends links that are still out
    assert store.sign_in_links.use(kept) is None
    late = store.sign_in_links.make(ada.id or 0)
    store.users.set_disabled(ada.id or 0, True)
    assert store.sign_in_links.use(late) is None


def test_the_local_account_is_made_on_first_use(store: Store) -> None:
    embedded = settings_for(store, database_url=None)
    link = accounts.local_link(store, embedded)
    assert link.startswith("http://127.0.0.1:8400/sign-in/link?key=")
    local = store.users.named("local")
    assert local is not None
    assert local.roles == sorted(m.Role)
    assert accounts.local_link(store, embedded) != link
    assert len(store.users.list()) == 1
    assert "rsi users link" in accounts.sign_in_hint(store, settings_for(store, database_url="postgresql://db/x"))
    store.users.set_disabled(local.id or 0, True)
    assert accounts.local_link(store, embedded) == ""
    with pytest.raises(ConfigError, match="is disabled"):
        accounts.link_for(store, "local", settings=embedded, actor="cli")
    secret = link.partition("key=")[2]
    assert all(secret not in str(row) for row in store.audit_trail.list().items)


# ---------------------------------------------------------------------------------------------------------------- tokens


def test_a_token_is_shown_once_and_may_what_its_scopes_say(app: FastAPI, store: Store) -> None:
    lead = client_as(app, m.Role.LEAD, login="ada")
    lead.follow_redirects = False
    status, html = send(lead, "/tokens", name="notebook", scope=["see", "see.audit-log"], days="30")
    assert status == 201
    token = shown_once(html)
    page = lead.get("/tokens")
    assert token not in page.text
    assert token[:10] in page.text
    assert page.headers["Cache-Control"] == "no-store"
    row = store.api_tokens.list(store.users.named("ada").id or 0)[0]  # type: ignore[union-attr]
    assert token not in repr(row)
    assert row.last_used_at is None
    program = TestClient(app, headers={"Authorization": f"Bearer {token}"}, follow_redirects=False)
    assert program.get("/cycles").status_code == 200
    assert program.get("/audit-log.csv").status_code == 200
    assert program.get("/people").status_code == 404
    assert program.get("/tokens").status_code == 403  # a token makes no tokens
    assert program.post("/tokens", data={"name": "more", "scope": "see", "days": "30"}).status_code == 403
    assert program.post("/account/password", data={"password": PASSWORD, "again": PASSWORD}).status_code == 403
    assert store.api_tokens.list(row.user_id)[0].last_used_at is not None
    assert len(store.api_tokens.list(row.user_id)) == 1
    assert send(lead, f"/tokens/{row.id}/revoke")[0] == 303
    refused = program.get("/cycles")
    assert refused.status_code == 401
    assert "does not hold" in refused.text
    assert "revoked" in lead.get("/tokens").text


def test_a_token_form_says_what_is_wrong(app: FastAPI, store: Store) -> None:
    analyst = client_as(app, m.Role.ANALYST)
    status, html = send(analyst, "/tokens", name=" ", scope=["see", "cycle.launch", "people.manage"], days="9999")
    assert status == 422
    assert "1 to 100" in problem_beside(html, "name")
    assert "cycle.launch, people.manage" in problem_beside(html, "scope")
    assert "Choose among 7" in problem_beside(html, "days")
    assert "at least one" in problem_beside(send(analyst, "/tokens", name="x")[1], "scope")
    assert 'value="people.manage"' not in client_as(app).get("/tokens").text
    mine = store.users.named(analyst.login)
    assert mine is not None
    assert store.api_tokens.list(mine.id or 0) == []
    other = client_as(app, login="other")
    token = store.api_tokens.make(mine.id or 0, "mine", ["see"])
    number = store.api_tokens.list(mine.id or 0)[0].id
    assert send(other, f"/tokens/{number}/revoke")[0] == 404
    assert store.api_tokens.use(token) is not None


def test_a_token_loses_what_its_owner_loses(app: FastAPI, store: Store) -> None:
    user = store.users.add("ada", [m.Role.LEAD])
    token = store.api_tokens.make(user.id or 0, "x", [Action.SEE_AUDIT_LOG, Action.SEE])
    program = TestClient(app, headers={"Authorization": f"bearer {token}"})
    assert program.get("/audit-log").status_code == 200
    store.users.set_roles(user.id or 0, [m.Role.ANALYST])
    assert program.get("/audit-log").status_code == 404
    assert program.get("/cycles").status_code == 200


# ------------------------------------------------------------------------------------------------------------- audit log


def test_the_audit_log_filters_pages_and_exports(app: FastAPI, store: Store, admin: SignedIn) -> None:
    for i in range(120):
        store.audit_trail.add("ada" if i % 2 else "bob", "cycle.pause", object_kind="cycle", object_id=i)
    store.audit_trail.add("=cmd()", "odd", payload={"text": "<b>x</b>\x1b[0m", "list": [1]})
    html = admin.get("/audit-log").text
    assert html.count("<tr>") == 101
    assert "<b>x" not in html
    assert "^[[0m" in html
    older = re.search(r'href="(/audit-log\?before=\d+)" rel="next"', html)
    assert older is not None
    assert admin.get(older[1]).text.count("<tr>") == 22
    assert admin.get("/audit-log?actor=ada").text.count("<tr>") == 61
    assert admin.get("/audit-log?kind=cycle&object=7&action=cycle.pause").text.count("<tr>") == 2
    assert "Nothing fits" in admin.get("/audit-log?actor=nobody").text
    rows = list(csv.DictReader(io.StringIO(admin.get("/audit-log.csv").text)))
    assert len(rows) == 121
    assert rows[0]["actor"] == "'=cmd()"  # a spreadsheet shows it, and does not run it
    assert len(list(csv.reader(io.StringIO(admin.get("/audit-log.csv?actor=bob").text)))) == 61
