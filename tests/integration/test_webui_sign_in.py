"""Signing in and out, by password; what nobody gets; what forms must send back."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.passwords import hash_password
from orchestrator.settings import Settings
from orchestrator.store import Store
from tests.console_people import SignedIn, app_for, client_as, settings_for
from webui.sign_in import COOKIE, local_path

PASSWORD = "a long enough one"


@pytest.fixture
def ada(store: Store) -> m.User:
    return store.users.add("ada", [m.Role.LEAD], name="Ada L.", password_hash=hash_password(PASSWORD))


@pytest.fixture
def stranger(store: Store) -> TestClient:
    return TestClient(app_for(store), follow_redirects=False)


def sign_in(client: TestClient, login: str = "ada", password: str = PASSWORD, **more: str) -> int:
    return client.post("/sign-in", data={"login": login, "password": password, **more}).status_code


def test_in_and_out(store: Store, ada: m.User, stranger: TestClient) -> None:
    asked = stranger.get("/cycles?q=a+b")
    assert (asked.status_code, asked.headers["Location"]) == (303, "/sign-in?next=%2Fcycles%3Fq%3Da%2Bb")
    form = stranger.get(asked.headers["Location"]).text
    following = re.search(r'name="next" value="([^"]*)"', form)
    assert following is not None
    assert following[1] == "/cycles?q=a+b"
    answer = stranger.post("/sign-in", data={"login": "ada", "password": PASSWORD, "next": "/cycles?q=a+b"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/cycles?q=a+b")
    set_cookie = answer.headers["Set-Cookie"]
    assert all(word in set_cookie for word in ("HttpOnly", "SameSite=lax", "Path=/"))
    page = stranger.get("/cycles").text
    assert "Ada L." in page
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)
    assert csrf is not None
    kept = stranger.cookies[COOKIE]
    out = stranger.post("/sign-out", data={"csrf": csrf[1]})
    assert (out.status_code, out.headers["Location"]) == (303, "/sign-in")
    assert stranger.get("/cycles").status_code == 303
    stranger.cookies.set(COOKIE, kept)  # a copy of the cookie ended with the sign-in
    assert stranger.get("/cycles").status_code == 303
    told = [(row.actor, row.action) for row in store.audit_trail.list().items]
    assert told == [("ada", "sign-out"), ("ada", "sign-in")]


def test_what_nobody_gets(stranger: TestClient) -> None:
    assert stranger.get("/healthz").status_code == 200
    assert stranger.get("/static/console.css").status_code == 200
    fragment = stranger.get("/cycles", headers={"HX-Request": "true"})
    stream, data = stranger.get("/events"), stranger.get("/cycles/1/charts/ev.json")
    for answer in (fragment, stream, data, stranger.post("/sign-out", headers={"Accept": "application/json"})):
        assert answer.status_code == 401
        assert "not signed in" in answer.json()["detail"]
    assert stranger.post("/sign-out").status_code == 401


def test_what_cannot_sign_in(store: Store, ada: m.User, stranger: TestClient) -> None:
    store.users.add("nopass", [m.Role.LEAD])
    for login, password in (("ada", "wrong one"), ("nobody", PASSWORD), ("nopass", ""), ("nopass", "nobody")):
        assert sign_in(stranger, login, password) == 422
    store.users.set_disabled(ada.id or 0, True)
    assert sign_in(stranger) == 422
    assert COOKIE not in stranger.cookies


def test_pauses_are_said_and_hold(store: Store, ada: m.User, stranger: TestClient) -> None:
    """The same for a login that nobody has, so that logins cannot be found out. (How they grow: test_webui_people.)"""

    def failures(login: str, **changes: object) -> int:
        with store.transaction() as session:
            row = session.get(m.SignInFailure, f"login:{login}")
            if row is None:
                return 0
            for name, value in changes.items():
                setattr(row, name, value)
            return row.failures

    for login in ("ada", "unknown"):
        for _ in range(3):
            assert sign_in(stranger, login, "wrong one") == 422
        assert failures(login, paused_until=now() + timedelta(minutes=2)) == 3
        answer = stranger.post("/sign-in", data={"login": login, "password": PASSWORD})
        assert answer.status_code == 429
        assert re.search(r"Try again in (1 m \d\d|2 m 00) s", answer.text)
        assert failures(login, paused_until=now()) == 3  # a refused try is not counted
    assert sign_in(stranger) == 303
    assert failures("ada") == 0
    assert failures("unknown") == 3


def test_a_disabled_person_is_out_at_once(store: Store) -> None:
    client = client_as(store)
    assert client.get("/").status_code == 200
    user = store.users.named(client.login)
    assert user is not None
    store.users.set_disabled(user.id or 0, True)
    assert client.get("/", follow_redirects=False).status_code == 303


def test_anonymous_readers_read_and_change_nothing(store: Store) -> None:
    reader = TestClient(app_for(store, anonymous_roles="lead, analyst"), follow_redirects=False)
    assert reader.get("/cycles").status_code == 200
    assert 'href="/sign-in"' in reader.get("/cycles").text
    assert reader.post("/sign-out").status_code == 401


@pytest.mark.parametrize(
    "away",
    [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "\\\\evil",
        "javascript:alert(1)",
        "/\t/evil.example",
        "http:evil.example",
        "/sign-in?next=/",
        "",
        "evil",
        "///evil.example",
        "/%0d%0a\r\nX: y",
    ],
)
def test_only_local_addresses_follow(away: str) -> None:
    assert local_path(away) == "/"


def _change(client: SignedIn, **request: object) -> int:
    return client.post("/sign-out", follow_redirects=False, **request).status_code  # type: ignore[arg-type]


def test_a_form_sends_back_the_token_of_its_sign_in(store: Store) -> None:
    app = app_for(store)
    mine, theirs = client_as(app), client_as(app, m.Role.LEAD)
    assert _change(mine) == 403
    assert _change(mine, data={"csrf": ""}) == 403
    assert _change(mine, data={"csrf": theirs.csrf}) == 403
    assert _change(mine, content=b'{"csrf": "x"}', headers={"Content-Type": "application/json"}) == 403
    assert _change(mine, data={"csrf": mine.csrf}, headers={"Sec-Fetch-Site": "cross-site"}) == 403
    assert _change(mine, data={"csrf": mine.csrf}, headers={"Sec-Fetch-Site": "same-site"}) == 403
    assert _change(mine, data={"csrf": mine.csrf}, headers={"Origin": "https://evil.example"}) == 403
    assert _change(mine, data={"csrf": mine.csrf}, headers={"Origin": "null"}) == 403
    assert mine.get("/").status_code == 200
    assert _change(mine, headers={"X-CSRF-Token": mine.csrf, "Origin": "http://testserver"}) == 303
    assert _change(theirs, files={"x": b"y"}, data={"csrf": theirs.csrf}) == 303


def test_the_key_is_made_once_and_is_private(store: Store) -> None:
    settings: Settings = settings_for(store)
    app_for(store)
    key = settings.secret_path.read_text()
    app_for(store)
    assert settings.secret_path.read_text() == key
    assert settings.secret_path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in settings.secret_path.parent.iterdir()] == ["secret"]
