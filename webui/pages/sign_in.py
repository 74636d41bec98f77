"""`/sign-in` and `/sign-out`: by password, or once by a link. (Through a provider: `webui.pages.oidc`.)"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.accounts import LOCAL
from orchestrator.passwords import verify_password
from webui import urls
from webui.access import viewer_of
from webui.contexts.account import LinkContext, SignInContext
from webui.formats import duration
from webui.pages.parts import store_of
from webui.rendering import page
from webui.sign_in import address_of, close_session, local_path, open_session

router = APIRouter()
WRONG = "Login and password do not belong together, or the account is disabled."
STALE = "This link was used already, or its quarter of an hour is over. Ask for a new one."


@router.get("/sign-in", response_class=HTMLResponse)
def sign_in_page(request: Request, next: str = "/") -> Response:
    if viewer_of(request).login:
        return RedirectResponse(local_path(next), 303)
    return sign_in_form(request, following=local_path(next))


@router.post("/sign-in", response_class=HTMLResponse)
def sign_in(
    request: Request,
    login: Annotated[str, Form(max_length=100)] = "",
    password: Annotated[str, Form(max_length=1000)] = "",
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """The same answer after the same time for an unknown login, a wrong password and a disabled account."""
    store, login, address = store_of(request), login.strip().replace("\0", ""), address_of(request)
    user = store.users.named(login)
    # People type passwords into the wrong field: what is no login is not written down.
    actor, where = (user.login if user else "unknown"), {"address": address}
    if (wait := store.sign_in_failures.begin(login, address)) > 0:
        store.audit_trail.add(actor, "sign-in.paused", payload={**where, "wait_s": round(wait)})
        problem = f"Too many failed tries for this login or from this address. Try again in {duration(wait)}."
        return sign_in_form(request, login, local_path(next), problem, status=429)
    if not verify_password(user.password_hash if user else None, password) or user is None or user.disabled_at:
        store.audit_trail.add(actor, "sign-in.failed", payload=where)
        return sign_in_form(request, login, local_path(next), WRONG, status=422)
    store.sign_in_failures.succeeded(login, address)
    answer = RedirectResponse(local_path(next), 303)
    open_session(request, answer, user, "password")
    return answer


@router.get("/sign-in/link", response_class=HTMLResponse)
def link_page(request: Request, key: str = "") -> HTMLResponse:
    """A page with a button: a mail scanner that opens the link does not use it up."""
    return page(request, LinkContext(title="Sign in", section="", key=key))


@router.post("/sign-in/link", response_class=HTMLResponse)
def use_link(request: Request, key: Annotated[str, Form(max_length=200)] = "") -> Response:
    store, address = store_of(request), address_of(request)
    user = store.sign_in_links.use(key)
    if user is None:
        store.audit_trail.add("unknown", "sign-in.failed", payload={"address": address, "how": "link"})
        return sign_in_form(request, problem=STALE, status=422)
    first = user.password_hash is None and user.oidc_subject is None and user.login != LOCAL
    answer = RedirectResponse(urls.account(done="choose") if first else urls.overview(), 303)
    open_session(request, answer, user, "link")
    return answer


@router.post("/sign-out")
def sign_out(request: Request) -> Response:
    viewer = viewer_of(request)
    answer = RedirectResponse(urls.sign_in(), 303)
    close_session(request, answer)
    store_of(request).audit_trail.add(viewer.login, "sign-out")
    return answer


def sign_in_form(
    request: Request, login: str = "", following: str = "/", problem: str = "", *, status: int = 200
) -> HTMLResponse:
    settings = request.app.state.settings
    context = SignInContext(
        title="Sign in",
        section="",
        login=login,
        following=following,
        problem=problem,
        oidc=settings.oidc_name if settings.oidc_issuer else "",
    )
    return page(request, context, status=status)
