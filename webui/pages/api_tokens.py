"""`/tokens`: one's own API tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import models as m
from orchestrator.models.columns import now
from webui import urls
from webui.access import SCOPES, Action, Viewer, in_person
from webui.contexts.account import ApiTokensContext, ScopeChoice, TokenRow
from webui.pages.parts import RowId, missing, store_of
from webui.rendering import page

router = APIRouter()
Me = Annotated[Viewer, Depends(in_person)]
LIFETIMES = (7, 30, 90, 365)  # days
USUAL = 90
LONGEST_NAME = 100


@router.get("/tokens", response_class=HTMLResponse)
def tokens(request: Request, viewer: Me) -> HTMLResponse:
    return _page(request, viewer, scopes=[Action.SEE])


@router.post("/tokens", response_class=HTMLResponse)
def make_token(
    request: Request,
    viewer: Me,
    name: Annotated[str, Form()] = "",
    scope: Annotated[Sequence[str], Form()] = (),
    days: Annotated[str, Form()] = str(USUAL),
) -> Response:
    """Answers with the page itself, the only one that shows the token: a redirect would have to carry it."""
    name = name.strip()
    secret, problems = new_token(request, viewer, name, scope, days)
    if problems:
        return _page(request, viewer, scopes=scope, name=name, days=days, problems=problems, status=422)
    return _page(request, viewer, scopes=[Action.SEE], fresh=secret, status=201)


def new_token(
    request: Request, viewer: Viewer, name: str, scope: Sequence[str], days: str
) -> tuple[str, dict[str, str]]:
    """The new token, which is shown once; or "" and what is wrong with each field."""
    store, problems = store_of(request), {}
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        problems["name"] = f"A name has 1 to {LONGEST_NAME} characters."
    if not scope:
        problems["scope"] = "Choose at least one."
    elif beyond := set(scope) - set(_offered(viewer)):
        problems["scope"] = f"Your roles do not allow {', '.join(sorted(beyond))[:200]}."
    if days not in map(str, LIFETIMES):
        problems["days"] = f"Choose among {', '.join(map(str, LIFETIMES))} days."
    if problems:
        return "", problems
    ends = now() + timedelta(days=int(days))
    with store.transaction():
        secret = store.api_tokens.make(viewer.user_id or 0, name, scope, expires_at=ends)
        payload = {"name": name, "scopes": sorted(scope), "expires_at": ends.isoformat()}
        store.audit_trail.add(viewer.login, "token.make", object_kind="token", payload=payload)
    return secret, {}


@router.post("/tokens/{token_id:int}/revoke")
def revoke(request: Request, viewer: Me, token_id: RowId) -> Response:
    revoke_token(request, viewer, token_id)
    return RedirectResponse(urls.tokens(), 303)


def revoke_token(request: Request, viewer: Viewer, token_id: int) -> m.ApiToken:
    """Raises 404 for a token that is not the viewer's."""
    store = store_of(request)
    with store.transaction():
        if (token := store.api_tokens.revoke(token_id, viewer.user_id or 0)) is None:
            raise missing(f"token {token_id} of yours")
        payload = {"name": token.name}
        store.audit_trail.add(viewer.login, "token.revoke", object_kind="token", object_id=token_id, payload=payload)
    return token


def _offered(viewer: Viewer) -> list[Action]:
    return [action for action in SCOPES if viewer.may(action)]


def state_of(token: m.ApiToken) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at is not None and token.expires_at <= now() else "active"


def _page(
    request: Request,
    viewer: Viewer,
    *,
    scopes: Sequence[str],
    name: str = "",
    days: str = str(USUAL),
    fresh: str = "",
    problems: Mapping[str, str] | None = None,
    status: int = 200,
) -> HTMLResponse:
    context = ApiTokensContext(
        title="Your API tokens",
        section="account",
        tokens=[TokenRow(token=t, state=state_of(t)) for t in store_of(request).api_tokens.list(viewer.user_id or 0)],
        scopes=[ScopeChoice(value=a, says=SCOPES[a], chosen=a in scopes) for a in _offered(viewer)],
        lifetimes=[(n, str(n) == days) for n in LIFETIMES],
        name=name,
        fresh=fresh,
        problems=problems or {},
    )
    answer = page(request, context, status=status)
    answer.headers["Cache-Control"] = "no-store"
    return answer
