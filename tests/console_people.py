"""People who are signed in to the console, for its tests.

with client_as(store, Role.REVIEWER) as client:      # no role named: all four
    client.post(address, data={"csrf": client.csrf, …})

browser.new_context().add_cookies([{**cookie_for(store, "ada"), "url": base}])
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.settings import Settings
from orchestrator.store import Store
from webui.app import create_app
from webui.sign_in import COOKIE, Keys


class SignedIn(TestClient):
    """A client with the cookie of one person; `csrf` is what a form of theirs sends back."""

    csrf: str
    login: str


def settings_for(store: Store, **changes: object) -> Settings:
    """Settings whose files lie beside the artifacts of a test's store."""
    return Settings(home=Path(store.artifacts.url).parent / "console", **changes)  # type: ignore[arg-type]


def app_for(store: Store, **changes: object) -> FastAPI:
    return create_app(store, settings_for(store, **changes))


def person(store: Store, *roles: m.Role, login: str = "") -> m.User:
    """Somebody with these roles (none named: all four); the same one when asked again."""
    wanted = sorted(roles or m.Role)
    login = login or "-".join(wanted)
    return store.users.named(login) or store.users.add(login, wanted)


def client_as(of: Store | FastAPI, *roles: m.Role, login: str = "") -> SignedIn:
    app = app_for(of) if isinstance(of, Store) else of
    store: Store = app.state.store
    user = person(store, *roles, login=login)
    keys: Keys = app.state.keys
    secret = store.sign_ins.open(user.id or 0, "test")
    client = SignedIn(app)
    client.cookies.set(COOKIE, keys.cookie(secret))
    client.csrf, client.login = keys.csrf(secret), user.login
    return client


def cookie_for(store: Store, login: str = "") -> dict[str, str]:
    """Name and value for a browser; the person is made with all roles when there is none."""
    user = person(store, login=login)
    keys = Keys.of(settings_for(store))
    return {"name": COOKIE, "value": keys.cookie(store.sign_ins.open(user.id or 0, "test"))}
