"""`/account`: one's own password, and where one is signed in."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import credentials
from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.passwords import hash_password, verify_password
from stages.errors import ConfigError
from webui import urls
from webui.access import Viewer, in_person
from webui.contexts import Fact
from webui.contexts.account import AccountContext, SignInRow
from webui.formats import duration, when
from webui.pages.parts import store_of
from webui.rendering import page
from webui.sign_in import address_of, session_secret

router = APIRouter()
Me = Annotated[Viewer, Depends(in_person)]
FRESH = timedelta(minutes=15)  # after a sign-in by link, a forgotten password may be replaced
DONE = {
    "choose": "You are signed in. Choose a password, so that you can come back without a link.",
    "password": "The password is changed; other browsers are signed out.",
    "signed-out": "All other browsers are signed out.",
}


@router.get("/account", response_class=HTMLResponse)
def account(request: Request, viewer: Me, done: str = "") -> HTMLResponse:
    return _page(request, viewer, done=DONE.get(done, ""))


@router.post("/account/password", response_class=HTMLResponse)
def change_password(
    request: Request,
    viewer: Me,
    current: Annotated[str, Form(max_length=1000)] = "",
    password: Annotated[str, Form(max_length=1000)] = "",
    again: Annotated[str, Form(max_length=1000)] = "",
) -> Response:
    store = store_of(request)
    user = store.users.get(viewer.user_id or 0)
    problems: dict[str, str] = {}
    if _asks_current(request, user):
        if wait := store.sign_in_failures.begin(user.login, address_of(request)):
            problems["current"] = f"Too many failed tries. Try again in {duration(wait)}."
        elif not verify_password(user.password_hash, current):
            problems["current"] = "This is not your present password."
            store.audit_trail.add(user.login, "password.refused", object_kind="user", object_id=user.login)
        else:
            store.sign_in_failures.succeeded(user.login, address_of(request))
    if password != again:
        problems["again"] = "The two are not the same."
    hashed = ""
    try:
        hashed = hash_password(password)
    except ConfigError as error:
        problems["password"] = str(error)
    if problems:
        return _page(request, viewer, problems=problems, status=422)
    with store.transaction():
        store.users.set_password_hash(user.id or 0, hashed)
        store.sign_ins.end_all(user.id or 0, but=session_secret(request) or "")
        store.audit_trail.add(user.login, "password.change", object_kind="user", object_id=user.login)
    return RedirectResponse(urls.account(done="password"), 303)


@router.post("/account/sign-outs")
def sign_out_elsewhere(request: Request, viewer: Me) -> Response:
    store = store_of(request)
    with store.transaction():
        ended = store.sign_ins.end_all(viewer.user_id or 0, but=session_secret(request) or "")
        store.audit_trail.add(viewer.login, "sign-out.elsewhere", payload={"ended": ended})
    return RedirectResponse(urls.account(done="signed-out"), 303)


def _asks_current(request: Request, user: m.User) -> bool:
    """Not of somebody without a password, nor right after a link, which is how a forgotten one is replaced."""
    mine = credentials.digest(session_secret(request) or "")
    found = next((s for s in store_of(request).sign_ins.list(user.id or 0) if s.digest == mine), None)
    by_link = found is not None and found.how == "link" and now() - found.created_at < FRESH
    return user.password_hash is not None and not by_link


def _page(
    request: Request, viewer: Viewer, *, done: str = "", problems: dict[str, str] | None = None, status: int = 200
) -> HTMLResponse:
    store = store_of(request)
    user = store.users.get(viewer.user_id or 0)
    mine = credentials.digest(session_secret(request) or "")
    context = AccountContext(
        title="Your account",
        section="account",
        facts=[
            Fact(label="login", value=user.login, mono=True),
            Fact(label="name", value=user.name),
            Fact(label="e-mail", value=user.email or "—"),
            Fact(label="roles", value=", ".join(user.roles) or "none: ask an administrator"),
            Fact(label="since", value=when(user.created_at)),
        ],
        sign_ins=[
            SignInRow(
                how=s.how,
                address=s.address,
                agent=s.agent,
                created_at=s.created_at,
                expires_at=s.expires_at,
                this=s.digest == mine,
            )
            for s in store.sign_ins.list(user.id or 0)
        ],
        asks_current=_asks_current(request, user),
        done=done,
        problems=problems or {},
    )
    return page(request, context, status=status)
