"""Attacks on the console: cookies, bodies, paths, texts that a model or a task wrote, and secrets that must not leak."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa
import uvicorn.logging
from fastapi import FastAPI
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.accounts import link_for
from orchestrator.passwords import hash_password
from orchestrator.store import Store
from tests.console_cycle import HOSTILE, seed_cycle
from tests.console_people import SignedIn, app_for, client_as, settings_for
from webui.security import ACCESS_LOG_FILTER, HEADERS, MAX_BODY
from webui.sign_in import COOKIE, Keys

PASSWORD = "correct horse battery"
PER_FORM = 3  # pages of one form of address that the crawler opens


@pytest.fixture(scope="module")
def store(module_store: Store, module_folder: Path) -> Store:
    """One cycle in which every text is hostile, and a person whose name is."""
    seed_cycle(module_store, module_folder, name=HOSTILE)
    poison(module_store)
    return module_store


def poison(store: Store) -> None:
    """Every free text of every row gets something hostile at its end; states, digests and keys stay."""
    kept = re.compile(
        r"(^|_)(id|digest|sha256|state|kind|phase|role|verdict|end_reason|decision|part|severity|name|arm)$"
    )
    with store.transaction() as session:
        for table in ("cycle", "trajectory", "turn", "check_result", "runbook", "review", "log_line", "suite", "task"):
            known = m.metadata.tables.get(table)
            for column in () if known is None else known.columns:
                free = isinstance(column.type, sa.String) and not isinstance(column.type, sa.Enum)
                if free and not kept.search(column.name) and not column.foreign_keys and not column.primary_key:
                    if column.unique or table in ("review",):
                        continue
                    session.execute(sa.text(f"UPDATE {table} SET {column.name} = {column.name} || :x"), {"x": HOSTILE})
    user = store.users.add("evil", [m.Role.ANALYST], name=HOSTILE, email=HOSTILE)
    store.api_tokens.make(user.id or 0, HOSTILE, ["see"])
    store.audit_trail.add(HOSTILE, HOSTILE, object_kind=HOSTILE, object_id=HOSTILE, payload={HOSTILE: HOSTILE})


@pytest.fixture(scope="module")
def app(store: Store) -> FastAPI:
    return app_for(store)


@pytest.fixture
def client(app: FastAPI) -> SignedIn:
    signed_in = client_as(app)
    signed_in.follow_redirects = False
    return signed_in


# --------------------------------------------------------------------------------------------------------------- cookies


def test_a_cookie_that_was_not_made_here_is_nobody(app: FastAPI, store: Store, client: SignedIn) -> None:
    good = client.cookies[COOKIE]
    secret, _, signature = good.rpartition(".")
    user = store.users.named(client.login)
    assert user is not None
    ended = store.sign_ins.open(user.id or 0, "test", days=0)
    keys = Keys.of(settings_for(store))
    forged = [
        "",
        secret,
        f"{secret}.",
        f"{secret}.{signature[:-2]}AA",
        f"{secret[:-1]}X.{signature}",
        f"x{good}",
        Keys("k" * 40).cookie(secret),
        keys.cookie(ended),
        keys.cookie("never opened"),
        f"{secret}.{keys.csrf(secret).rpartition('.')[2]}",
        "a" * 5000,
    ]
    for cookie in forged:
        stranger = TestClient(app, follow_redirects=False, cookies={COOKIE: cookie})
        assert stranger.get("/cycles").status_code == 303, cookie
    assert client.get("/cycles").status_code == 200


def test_a_foisted_cookie_does_not_become_a_sign_in(app: FastAPI, store: Store, client: SignedIn) -> None:
    """Session fixation: signing in makes a fresh cookie, and the one that was there before ends."""
    store.users.add("victim", [m.Role.LEAD], password_hash=hash_password(PASSWORD))
    foisted = client.cookies[COOKIE]
    answer = client.post(
        "/sign-in", data={"login": "victim", "password": PASSWORD}, headers={"X-CSRF-Token": client.csrf}
    )
    assert answer.status_code == 303
    set_cookie = [v for v in answer.headers.get_list("Set-Cookie") if "Max-Age=0" not in v]
    assert set_cookie
    assert foisted not in "".join(set_cookie)
    attacker = TestClient(app, follow_redirects=False, cookies={COOKIE: foisted})
    assert attacker.get("/").status_code == 303


def test_behind_https_the_cookie_says_secure(store: Store) -> None:
    user = store.users.named("careful") or store.users.add("careful", [], password_hash=hash_password(PASSWORD))
    public = TestClient(app_for(store, console_url="https://rsi.example.org/"), follow_redirects=False)
    sent = {"login": user.login, "password": PASSWORD}
    answer = public.post("/sign-in", data=sent, headers={"Origin": "https://rsi.example.org"})
    assert "Secure" in answer.headers["Set-Cookie"]
    assert public.post("/sign-in", data=sent, headers={"Origin": "https://evil.example"}).status_code == 403


def test_nobody_raises_their_own_roles(app: FastAPI, store: Store) -> None:
    analyst = client_as(app, m.Role.ANALYST)
    me = store.users.named(analyst.login)
    assert me is not None
    for path in (f"/people/{me.id}/roles", f"/people/{me.id}/link", f"/people/{me.id}/enable", "/people"):
        answer = analyst.post(path, data={"csrf": analyst.csrf, "role": ["admin"], "login": "puppet"})
        assert answer.status_code == 403, path
    assert analyst.get("/people").status_code == 404
    changed = {"csrf": analyst.csrf, "roles": "admin", "role": "admin", "password": PASSWORD, "again": PASSWORD}
    analyst.post("/account/password", data=changed)  # a field too many changes nothing
    assert store.users.get(me.id or 0).roles == ["analyst"]
    assert store.users.named("puppet") is None


# ----------------------------------------------------------------------------------------------------- bodies and paths


def test_an_oversized_body_is_refused_unread(client: SignedIn, store: Store) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        for _ in range(MAX_BODY // 2**16 + 8):
            read += 2**16
            yield b"x" * 2**16

    form = {"Content-Type": "application/x-www-form-urlencoded"}
    told = client.post("/tokens", content=b"csrf=" + b"x" * MAX_BODY, headers=form)
    assert told.status_code == 413
    assert "4 MiB" in told.text
    assert client.post("/tokens", content=endless(), headers=form).status_code == 413
    held = client.post("/tokens", content=endless(), headers=form | {"X-CSRF-Token": client.csrf})
    assert held.status_code == 413
    stranger = TestClient(client.app, follow_redirects=False)
    assert stranger.post("/sign-in", content=endless(), headers=form).status_code == 413
    assert HEADERS.items() <= dict(told.headers).items() | {(k, told.headers[k]) for k in HEADERS}


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/..%2f..%2fpyproject.toml",
        "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "/static//etc/passwd",
        "/static/....//app.py",
        "/static/..\\app.py",
        "/static/vendor/../../app.py",
        "/static/console.css%00.py",
    ],
)
def test_static_files_stay_in_their_folder(client: SignedIn, path: str) -> None:
    scope_path = client.build_request("GET", path)
    answer = client.send(scope_path)
    assert answer.status_code in (404, 422), path
    assert "root:" not in answer.text
    assert "create_app" not in answer.text


def parameters(app: FastAPI) -> list[str]:
    """Addresses with a text parameter: what a traversal could be put into."""
    found, pending = [], list(app.routes)
    while pending:
        route = pending.pop()
        if hasattr(route, "original_router"):
            pending += route.original_router.routes
        elif "GET" in (getattr(route, "methods", None) or ()) and re.search(r"\{[^}:]+(:path)?\}", route.path):
            found.append(route.path)
    return found


@pytest.mark.parametrize(
    "away", ["../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "....//etc/passwd"]
)
def test_no_parameter_leads_out(app: FastAPI, client: SignedIn, away: str) -> None:
    forms = parameters(app)
    assert forms
    for form in forms:
        filled = re.sub(r"\{[^}:]+:int\}", "1", form)
        path = re.sub(r"\{[^}]+\}", lambda _: quote(away, safe=""), filled)
        answer = client.get(path)
        assert answer.status_code < 500, path
        assert "root:x:" not in answer.text, path


# ----------------------------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def crawled(app: FastAPI) -> list[tuple[str, httpx.Response]]:
    """Every page that links lead to, a few of each form of address; no page has to be listed here."""
    client = client_as(app)
    seen, forms, pending = set[str](), Counter[str](), ["/", "/tokens", "/account", "/nothing/here"]
    found = []
    while pending:
        address = pending.pop(0)
        path = address.partition("?")[0]
        form = re.sub(r"(?<=/)[0-9a-f]{6,}|(?<=/)\d+|%[0-9A-F]{2}", "*", path)
        if address in seen or forms[form] >= PER_FORM or path in ("/sign-out", "/events"):
            continue
        seen.add(address)
        forms[form] += 1
        answer = client.get(address)
        assert answer.status_code < 500, (address, answer.text[:300])
        found.append((address, answer))
        if is_page(answer):
            links = re.findall(r'(?:href|data-src|src)="(/[^"#]*)', answer.text)
            pending += [x.replace("&amp;", "&") for x in links if not x.startswith("/static")]
    return found


def is_page(answer: httpx.Response) -> bool:
    return "html" in answer.headers.get("Content-Type", "")


def test_hostile_texts_stay_texts_on_every_page(crawled: list[tuple[str, httpx.Response]]) -> None:
    """Stored XSS: instructions, outputs with escape codes, runbooks, logs, names."""
    pages = [(address, answer.text) for address, answer in crawled if is_page(answer)]
    for address, text in pages:
        assert "<script>alert" not in text, address
        assert "<img src=x" not in text, address
        assert not re.findall(r"<script(?![^>]* src=)[^>]*>", text), address
        assert "<style" not in text, address
        hidden = re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
        assert hidden is None, (address, text[max(0, hidden.start() - 80) : hidden.end() + 20])
        for link in re.findall(r'\s(?:href|src|action|formaction|hx-get|hx-post)="([^"]*)"', text):
            assert link.startswith(("/", "#")), (address, link)
    assert len(pages) >= 15
    assert sum("&lt;script&gt;alert" in text for _, text in pages) >= 5


def test_data_is_never_taken_for_a_page(crawled: list[tuple[str, httpx.Response]]) -> None:
    """Downloads hold hostile texts as they are: their type and the browser's obedience keep them data."""
    data = [(address, answer.headers) for address, answer in crawled if not is_page(answer)]
    assert data
    for address, headers in data:
        assert headers["X-Content-Type-Options"] == "nosniff", address
        assert "default-src 'none'" in headers["Content-Security-Policy"], address


@pytest.mark.parametrize("address", ["/", "/sign-in", "/nothing", "/static/console.css", "/static/none", "/healthz"])
def test_every_answer_carries_the_headers(app: FastAPI, client: SignedIn, address: str) -> None:
    for asks in (client, TestClient(app, follow_redirects=False)):
        for answer in (asks.get(address), asks.post(address)):
            for name, value in HEADERS.items():
                assert answer.headers[name] == value, (address, answer.status_code)


# --------------------------------------------------------------------------------------------------------------- secrets


def everything_stored(store: Store) -> str:
    with store.transaction() as session:
        rows = [
            str(text)
            for table in m.metadata.sorted_tables
            for text in session.execute(sa.text(f'SELECT t::text FROM "{table.name}" t')).scalars()
        ]
    return "\n".join(rows)


def test_no_secret_is_stored_or_logged(
    app: FastAPI, store: Store, client: SignedIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store.users.add("secretive", list(m.Role), password_hash=hash_password(PASSWORD))
    signs_in = TestClient(app, follow_redirects=False)
    typed = "typed-into-the-wrong-field"
    signs_in.post("/sign-in", data={"login": typed, "password": "wrong-password-1"})
    signs_in.post("/sign-in", data={"login": "secretive", "password": "wrong-password-2"})
    assert signs_in.post("/sign-in", data={"login": "secretive", "password": PASSWORD}).status_code == 303
    link = link_for(store, "secretive", settings=settings_for(store), actor="test").partition("key=")[2]
    signs_in.get(f"/sign-in/link?key={link}")
    made = client.post("/tokens", data={"csrf": client.csrf, "name": "x", "scope": "see", "days": "7"})
    token = re.search(r'value="(rsi_[^"]+)"', made.text)
    assert token is not None
    TestClient(app, headers={"Authorization": f"Bearer {token[1]}"}).get("/cycles")
    cookie = signs_in.cookies[COOKIE]
    secrets = [PASSWORD, "wrong-password-1", "wrong-password-2", link, token[1], cookie, cookie.partition(".")[0]]
    stored, logged = everything_stored(store), caplog.text.replace("HTTP Request", "")
    assert "argon2id" in stored
    for secret in secrets:
        assert secret not in stored
    rows = store.audit_trail.list(limit=200).items
    assert not any(typed in str(row) for row in rows)
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith("httpx"))
    assert not any(secret in ours for secret in secrets), logged


def test_the_access_log_gets_no_one_time_secret() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(uvicorn.logging.AccessFormatter('%(client_addr)s - "%(request_line)s" %(status_code)s'))
    log = logging.getLogger("test.access")
    log.addHandler(handler)
    log.addFilter(ACCESS_LOG_FILTER)
    for path in ("/sign-in/link?key=abc", "/sign-in/oidc/back?code=abc&state=d", "/cycles?q=shown"):
        log.warning('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
    assert "abc" not in written.getvalue()
    assert "q=shown" in written.getvalue()
    assert ACCESS_LOG_FILTER in logging.getLogger("uvicorn.access").filters


def test_a_sign_in_takes_as_long_for_an_unknown_login(app: FastAPI, store: Store) -> None:
    """Not by the clock, which this machine shares: the same work is done, one argon2 verification each."""
    from orchestrator import passwords

    calls: list[str] = []
    real = passwords._hasher.verify

    class Counting:
        def verify(self, hashed: str, password: str) -> bool:
            calls.append(hashed)
            return real(hashed, password)

        hash = staticmethod(passwords._hasher.hash)

    known = store.users.named("timed") or store.users.add("timed", [], password_hash=hash_password(PASSWORD))
    passwords._hasher, before = Counting(), passwords._hasher  # type: ignore[assignment]
    try:
        for login in (known.login, "not-there-at-all"):
            TestClient(app).post("/sign-in", data={"login": login, "password": "wrong one"})
    finally:
        passwords._hasher = before
    assert len(calls) == 2
    assert calls[0].split("$")[1:4] == calls[1].split("$")[1:4]  # the same parameters, so the same time
