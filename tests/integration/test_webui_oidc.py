"""Signing in through a real OpenID Connect provider on loopback: it checks PKCE, signs tokens, and can misbehave."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.embedded.services import CONSOLE_APP
from orchestrator.passwords import hash_password
from orchestrator.store import Store
from stages.errors import ConfigError
from tests.console_people import app_for
from webui.oidc import role_table

pytest.importorskip("authlib", reason="pip install 'terminal-rsi[oidc]'")
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

SECRET = "secret-of-the-client"


@dataclass
class Issuer:
    """The provider: whoever comes to /authorize is signed in there as `who` at once."""

    url: str = ""
    who: dict[str, Any] = field(default_factory=lambda: {"sub": "u-1", "preferred_username": "ada"})
    lie: dict[str, Any] = field(default_factory=dict)  # claims that are put wrong
    key: ECKey = field(default_factory=lambda: ECKey.generate_key("P-256", parameters={"kid": "k", "alg": "ES256"}))
    shown: ECKey | None = None  # published instead of the key that signs
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def authorize(self, query: dict[str, str]) -> str:
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        return f"{query['redirect_uri']}?code={code}&state={query['state']}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        asked = self.codes.pop(form["code"], None)
        given = base64.b64decode(authorization.partition(" ")[2]).decode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if asked is None or given != f"rsi:{SECRET}":
            return 400, {"error": "invalid_grant"}
        if challenge.decode() != asked["code_challenge"] or form["redirect_uri"] != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant", "error_description": "PKCE"}
        now = int(time.time())
        claims = {"iss": self.url, "aud": "rsi", "iat": now, "exp": now + 60, "nonce": asked["nonce"], **self.who}
        token = jwt.encode({"alg": "ES256", "kid": "k"}, claims | self.lie, self.key)
        return 200, {"access_token": "a", "token_type": "Bearer", "id_token": token}

    def documents(self, path: str) -> dict[str, Any]:
        if path == "/jwks":
            return dict(KeySet([self.shown or self.key]).as_dict(private=False))
        ends = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/jwks"}
        return {"issuer": self.url, **{name: self.url + end for name, end in ends.items()}}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer, address = self.server.issuer, urlsplit(self.path)  # type: ignore[attr-defined]
            if address.path == "/authorize":
                self.send_response(302)
                self.send_header("Location", issuer.authorize(dict(parse_qsl(address.query))))
                self.end_headers()
                return
            self.answer(200, issuer.documents(address.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            issuer = self.server.issuer  # type: ignore[attr-defined]
            self.answer(*issuer.token(dict(parse_qsl(body)), self.headers.get("Authorization", "")))

        def answer(self, status: int, document: dict[str, Any]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def issuer(server: ThreadingHTTPServer) -> Issuer:
    fresh = Issuer(url=f"http://127.0.0.1:{server.server_port}")
    server.issuer = fresh  # type: ignore[attr-defined]
    return fresh


def settings(issuer: Issuer, tmp_path: Path, **changes: object) -> dict[str, object]:
    secret = tmp_path / "client-secret"
    secret.write_text(SECRET + "\n")
    chosen: dict[str, object] = {"oidc_issuer": issuer.url, "oidc_client_id": "rsi", "oidc_client_secret_file": secret}
    return chosen | changes


@pytest.fixture
def browser(store: Store, issuer: Issuer, tmp_path: Path) -> TestClient:
    roles = "staff=analyst, boss=admin, boss=lead"
    return TestClient(app_for(store, **settings(issuer, tmp_path, oidc_roles=roles)), follow_redirects=False)


def come_back(browser: TestClient, *, next: str = "/cycles") -> str:
    """To the provider and back; returns the console's address that the provider leads to."""
    away = browser.get("/sign-in/oidc", params={"next": next})
    assert away.status_code == 303
    assert "HttpOnly" in away.headers["Set-Cookie"]
    back = urlsplit(httpx.get(away.headers["Location"], follow_redirects=False).headers["Location"])
    assert back.netloc == "127.0.0.1:8400"
    return f"{back.path}?{back.query}"


def refused(browser: TestClient, address: str) -> str:
    answer = browser.get(address)
    assert answer.status_code == 422
    assert browser.get("/cycles").status_code == 303  # still nobody
    return answer.text


def test_somebody_new_signs_in_with_the_roles_of_their_groups(
    store: Store, issuer: Issuer, browser: TestClient
) -> None:
    issuer.who |= {"name": "Ada L.", "groups": ["staff", "other"], "email": "ada@example.org", "email_verified": True}
    assert "Sign in with single sign-on" in browser.get("/sign-in").text
    answer = browser.get(come_back(browser))
    assert (answer.status_code, answer.headers["Location"]) == (303, "/cycles")
    assert "Ada L." in browser.get("/cycles").text
    user = store.users.named("ada")
    assert user is not None
    assert (user.roles, user.email, user.password_hash) == (["analyst"], "ada@example.org", None)
    issuer.who["groups"] = ["boss"]
    issuer.who["preferred_username"] = "renamed"
    assert browser.get(come_back(browser)).status_code == 303
    again = store.users.named("ada")
    assert again is not None
    assert (again.id, again.roles) == (user.id, ["admin", "lead"])
    assert [u.login for u in store.users.list()] == ["ada"]
    told = [(row.actor, row.action) for row in store.audit_trail.list().items]
    assert ("oidc", "user.add") in told
    assert told.count(("ada", "sign-in")) == 2


def test_an_account_is_taken_over_by_verified_e_mail_only(store: Store, issuer: Issuer, browser: TestClient) -> None:
    store.users.add("grace", [m.Role.REVIEWER], email="grace@example.org")
    issuer.who |= {"preferred_username": "grace", "email": "grace@example.org"}
    assert "taken" in refused(browser, come_back(browser))
    issuer.who["email_verified"] = True
    issuer.who["groups"] = ["staff"]
    assert browser.get(come_back(browser)).status_code == 303
    grace = store.users.named("grace")
    assert grace is not None
    assert grace.oidc_subject == f"{issuer.url}|u-1"
    store.users.add("bob", [m.Role.ADMIN], email="bob@example.org", password_hash=hash_password("long enough"))
    issuer.who |= {"sub": "u-2", "preferred_username": "bob", "email": "bob@example.org"}
    other = TestClient(browser.app, follow_redirects=False)
    assert "taken" in refused(other, come_back(other))  # a password is a way in of its own
    assert store.users.named("bob").oidc_subject is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        ({"iss": "https://evil.example"}, "iss"),
        ({"aud": "another"}, "aud"),
        ({"aud": ["rsi", "another"]}, "another client"),
        ({"nonce": "old"}, "nonce"),
        ({"exp": 1}, "expired"),
        ({"sub": None}, "sub"),
    ],
)
def test_a_token_that_does_not_hold_lets_nobody_in(
    store: Store, issuer: Issuer, browser: TestClient, lie: dict[str, Any], word: str
) -> None:
    issuer.lie = lie
    assert word in refused(browser, come_back(browser))
    assert store.users.list() == []


def test_a_token_of_another_key_lets_nobody_in(store: Store, issuer: Issuer, browser: TestClient) -> None:
    issuer.shown = ECKey.generate_key("P-256", parameters={"kid": "k", "alg": "ES256"})
    assert "does not hold" in refused(browser, come_back(browser))


def test_state_cookie_and_code_belong_together(store: Store, issuer: Issuer, browser: TestClient) -> None:
    address = come_back(browser)
    query = {k: v[0] for k, v in parse_qs(urlsplit(address).query).items()}
    stranger = TestClient(browser.app, follow_redirects=False)
    assert "another browser" in refused(stranger, address)  # somebody else's answer, foisted on this browser
    assert "another sign-in" in refused(browser, f"/sign-in/oidc/back?code={query['code']}&state=guessed")
    denied = f"/sign-in/oidc/back?error=access_denied&state={query['state']}"
    assert "access_denied" in refused(browser, denied)
    issuer.codes[query["code"]]["code_challenge"] = "of another verifier"
    assert "invalid_grant" in refused(browser, address)


def test_only_local_addresses_follow(issuer: Issuer, browser: TestClient) -> None:
    answer = browser.get(come_back(browser, next="https://evil.example/"))
    assert answer.headers["Location"] == "/"


def test_a_disabled_person_stays_out(store: Store, issuer: Issuer, browser: TestClient) -> None:
    user = store.users.add("ada", [])
    store.users.set_subject(user.id or 0, f"{issuer.url}|u-1")
    store.users.set_disabled(user.id or 0, True)
    assert "disabled" in refused(browser, come_back(browser))


def test_settings_that_do_not_fit_are_refused(store: Store, issuer: Issuer, tmp_path: Path) -> None:
    for changes, word in (
        ({"oidc_issuer": "http://provider.example"}, "https://"),
        ({"oidc_issuer": "provider"}, "no address"),
        ({"oidc_issuer": "https://"}, "no address"),
        ({"oidc_issuer": "https://[::1"}, "no address"),
        ({"oidc_issuer": "https://x:99999999"}, "no address"),
        ({"oidc_issuer": "https://x.example/?a=b"}, "no \\?"),
        ({"oidc_client_id": ""}, "CLIENT_ID"),
        ({"oidc_client_secret_file": tmp_path / "none"}, "cannot be read"),
        ({"oidc_roles": "boss=king"}, "no word=role"),
    ):
        with pytest.raises(ConfigError, match=word):
            app_for(store, **settings(issuer, tmp_path, **changes))
    assert role_table("a=b=lead,x=admin") == (("a=b", m.Role.LEAD), ("x", m.Role.ADMIN))
    assert TestClient(app_for(store)).get("/sign-in/oidc").status_code == 404


def test_a_console_of_bad_settings_ends_with_one_line(store: Store, tmp_path: Path) -> None:
    """As `rsi console` starts it."""
    url = store.engine.url.render_as_string(hide_password=False)
    bad = {"RSI_HOME": str(tmp_path), "RSI_DATABASE_URL": url, "RSI_OIDC_ISSUER": "http://provider.example"}
    command = [sys.executable, "-m", "uvicorn", CONSOLE_APP, "--factory", "--port", "0"]
    ended = subprocess.run(command, env=os.environ | bad, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "error: the console does not start: RSI_OIDC_ISSUER is 'http://provider.example'" in ended.stderr
    assert "Set it to" in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.parametrize("what", ["nobody listens", "another service"])
def test_without_the_provider_people_sign_in_by_password(
    store: Store, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "another service":
        monkeypatch.setattr(issuer, "documents", lambda path: {"issuer": issuer.url})
        changes = {}
    else:
        changes = {"oidc_issuer": "http://127.0.0.1:9"}
    browser = TestClient(app_for(store, **settings(issuer, tmp_path, **changes)), follow_redirects=False)
    answer = browser.get("/sign-in/oidc")
    assert answer.status_code == 502
    assert ("does not answer" if changes else "does not say its authorization_endpoint") in answer.text
    assert 'name="password"' in answer.text
    store.users.add("carol", [m.Role.LEAD], password_hash=hash_password("long enough"))
    signed_in = browser.post("/sign-in", data={"login": "carol", "password": "long enough", "next": "/cycles"})
    assert (signed_in.status_code, signed_in.headers["Location"]) == (303, "/cycles")
    assert browser.get("/cycles").status_code == 200
