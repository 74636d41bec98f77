"""Permissions: the table of role × action × address, made from `webui.access.ALLOWED` and the app's own routes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import Mount, Route

from orchestrator import models as m
from orchestrator.store import Store
from tests.console_people import SignedIn, app_for, client_as
from webui.access import ALLOWED, ANONYMOUS, EVERYBODY, SCOPES, Action, Viewer

OPEN = {  # what nobody must be able to ask, and why
    "/healthz": "probes",
    "/static": "the sign-in page's look",
    "/sign-in": "signing in",
    "/sign-in/link": "signing in",
    "/sign-in/oidc": "signing in",
    "/sign-in/oidc/back": "signing in",
    "/sign-out": "who is signed in may always leave",
}
SAFE = {"GET", "HEAD"}


@dataclass(frozen=True)
class Address:
    path: str
    method: str
    action: Action | None

    @property
    def example(self) -> str:
        """An address of this form; nothing is stored under it."""
        return re.sub(r"\{[^}:]+:int\}", "999999", re.sub(r"\{[^}:]+(?::path)?\}", "none", self.path))


def guards(dependant: object) -> Iterator[Action]:
    for inner in dependant.dependencies:  # type: ignore[attr-defined]
        if (action := getattr(inner.call, "action", None)) is not None:
            yield action
        yield from guards(inner)


def addresses(app: FastAPI) -> list[Address]:
    """Every address with what guards it: the narrowest of its guards, the endpoint's own, comes last."""
    found = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        if hasattr(route, "original_router"):
            pending += route.original_router.routes
        elif isinstance(route, APIRoute):
            named = list(guards(route.dependant))
            found += [Address(route.path, method, named[-1] if named else None) for method in sorted(route.methods)]
        elif isinstance(route, Mount | Route):
            found.append(Address(route.path, "GET", None))
        else:
            raise AssertionError(f"a route of a kind that this test does not know: {route!r}")
    return found


@pytest.fixture(scope="module")
def app(module_store: Store) -> FastAPI:
    return app_for(module_store)


@pytest.fixture(scope="module")
def people(app: FastAPI) -> dict[m.Role, SignedIn]:
    clients = {role: client_as(app, role) for role in m.Role}
    for client in clients.values():
        client.follow_redirects = False
    return clients


def test_every_address_names_its_guard(app: FastAPI) -> None:
    unguarded = {a.path for a in addresses(app) if a.action is None}
    assert unguarded <= OPEN.keys(), "give the route a `needs(Action.…)`"
    assert len(addresses(app)) > 20


def test_what_changes_something_is_no_page_right(app: FastAPI) -> None:
    """An unsafe method under a `see` action would let every reader change something."""
    wrong = [
        (a.method, a.path, a.action)
        for a in addresses(app)
        if a.method not in SAFE and a.action is not None and a.action.value.startswith("see")
    ]
    assert wrong == []


def test_the_table_is_whole() -> None:
    assert set(ALLOWED) == set(Action)
    assert set(SCOPES) == set(Action) - {Action.MANAGE_PEOPLE}
    assert all(action.value.startswith("see") for action in ANONYMOUS)
    assert Action.SEE_HIDDEN not in ANONYMOUS


@pytest.mark.parametrize("role", list(m.Role))
def test_role_by_action_by_address(app: FastAPI, people: dict[m.Role, SignedIn], role: m.Role) -> None:
    """Who may not gets 404 for a page and 403 for an action; who may gets anything else.

    What somebody may do is tried on things that do not exist only: an empty launch form launches a cycle.
    """
    client, denied = people[role], 0
    for address in addresses(app):
        may = address.action is None or role in ALLOWED[address.action]
        acts = address.method not in SAFE
        if address.action is None or address.path == "/events" or (may and acts and "{" not in address.path):
            continue
        answer = client.request(address.method, address.example, headers={"X-CSRF-Token": client.csrf})
        what = f"{address.method} {address.example} needs {address.action}: {answer.status_code}"
        if may:
            assert answer.status_code not in (401, 403), what
            assert answer.status_code < 500, what
            continue
        denied += 1
        assert answer.status_code == (403 if acts else 404), what
    assert denied or all(role in allowed for allowed in ALLOWED.values())


def test_nobody_gets_in_anywhere(app: FastAPI) -> None:
    stranger = TestClient(app, follow_redirects=False)
    for address in addresses(app):
        if address.path in OPEN:
            continue
        answer = stranger.request(address.method, address.example)
        assert answer.status_code in (303, 401), address
        if answer.status_code == 303:
            assert answer.headers["Location"].startswith("/sign-in"), address


def test_unsafe_requests_without_the_token_of_their_sign_in(app: FastAPI, people: dict[m.Role, SignedIn]) -> None:
    for address in addresses(app):
        if address.method in SAFE or address.path.startswith("/sign-in"):
            continue
        for role, client in people.items():
            answer = client.request(address.method, address.example)
            assert answer.status_code == 403, (role, address)
            assert "does not hold any more" in answer.text, (role, address)


@pytest.mark.parametrize("role", list(m.Role))
def test_the_rail_shows_what_opens(people: dict[m.Role, SignedIn], role: m.Role) -> None:
    client = people[role]
    rail = client.get("/").text.partition("</header>")[0]
    links = re.findall(r'href="(/[^"]*)"', rail)
    assert len(links) >= 5
    for link in links:
        assert client.get(link.replace("&amp;", "&")).status_code == 200, link
    assert ("/people" in links) == (role is m.Role.ADMIN)


def test_a_viewer_may_what_one_of_their_roles_may() -> None:
    for action, allowed in ALLOWED.items():
        for role in m.Role:
            assert Viewer(login="x", roles=frozenset({role})).may(action) == (role in allowed)
        assert Viewer(login="x", roles=EVERYBODY).may(action)
        assert not Viewer(login="x", roles=EVERYBODY, scope=frozenset()).may(action)
        assert not Viewer().may(action)
