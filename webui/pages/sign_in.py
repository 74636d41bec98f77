"""`/sign-in` and `/sign-out`: by password, or once by a link."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.passwords import verify_password
from webui.access import viewer_of
from webui.contexts.account import SignInContext
from webui.formats import duration
from webui.pages.parts import store_of
from webui.rendering import page
from webui.sign_in import SIGN_IN, address_of, close_session, local_path, open_session

router = APIRouter()
WRONG = "Login and password do not belong together, or the account is disabled."


@router.get(SIGN_IN, response_class=HTMLResponse)
def sign_in_page(request: Request, next: str = "/") -> Response:
    if viewer_of(request).login:
        return RedirectResponse(local_path(next), 303)
    return _form(request, following=local_path(next))


@router.post(SIGN_IN, response_class=HTMLResponse)
def sign_in(
    request: Request,
    login: Annotated[str, Form(max_length=100)],
    password: Annotated[str, Form(max_length=1000)],
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """The same answer after the same time for an unknown login, a wrong password and a disabled account."""
    store, login, address = store_of(request), login.strip(), address_of(request)
    if (wait := store.sign_in_failures.begin(login, address)) > 0:
        store.audit_trail.add(login, "sign-in.paused", payload={"address": address, "wait_s": round(wait)})
        problem = f"Too many failed tries for this login or from this address. Try again in {duration(wait)}."
        return _form(request, login, local_path(next), problem, status=429)
    user = store.users.named(login)
    if not verify_password(user.password_hash if user else None, password) or user is None or user.disabled_at:
        store.audit_trail.add(login, "sign-in.failed", payload={"address": address})
        return _form(request, login, local_path(next), WRONG, status=422)
    store.sign_in_failures.succeeded(login, address)
    answer = RedirectResponse(local_path(next), 303)
    open_session(request, answer, user, "password")
    return answer


@router.post("/sign-out")
def sign_out(request: Request) -> Response:
    viewer = viewer_of(request)
    answer = RedirectResponse(SIGN_IN, 303)
    close_session(request, answer)
    store_of(request).audit_trail.add(viewer.login, "sign-out")
    return answer


def _form(
    request: Request, login: str = "", following: str = "/", problem: str = "", *, status: int = 200
) -> HTMLResponse:
    context = SignInContext(title="Sign in", section="", login=login, following=following, problem=problem)
    return page(request, context, status=status)
