"""`/sign-in/oidc`: to the provider, and back from it."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import RedirectResponse, Response

from orchestrator import models as m
from stages.errors import ConfigError, ServiceError
from webui.oidc import BACK, FLIGHT_S, Identity, Provider
from webui.pages.parts import store_of
from webui.pages.sign_in import sign_in_form
from webui.sign_in import address_of, is_https, local_path, open_session

router = APIRouter()
COOKIE = "rsi_oidc"
PATH = "/sign-in/oidc"


@router.get(PATH)
def begin(request: Request, next: str = "/") -> Response:
    try:
        url, flight = _provider(request).begin(local_path(next))
    except ServiceError as error:
        return sign_in_form(request, problem=str(error), status=502)
    answer = RedirectResponse(url, 303)
    answer.set_cookie(
        COOKIE, flight, max_age=FLIGHT_S, path=PATH, httponly=True, samesite="lax", secure=is_https(request)
    )
    return answer


@router.get(BACK)
def back(request: Request) -> Response:
    store = store_of(request)
    try:
        identity, following = _provider(request).finish(request.cookies.get(COOKIE, ""), request.query_params)
        with store.transaction():
            user = _person(request, identity)
    except (ServiceError, ConfigError) as error:
        payload = {"address": address_of(request), "how": "oidc"}
        store.audit_trail.add("unknown", "sign-in.failed", payload=payload)
        return sign_in_form(request, problem=str(error), status=422)
    answer = RedirectResponse(local_path(following), 303)
    answer.delete_cookie(COOKIE, path=PATH)
    open_session(request, answer, user, "oidc")
    return answer


def _provider(request: Request) -> Provider:
    provider: Provider | None = request.app.state.provider
    if provider is None:
        raise HTTPException(404)
    return provider


def _person(request: Request, identity: Identity) -> m.User:
    """Who that is here: known by subject, else by a verified e-mail that an administrator wrote down, else new.

    Raises ConfigError for a disabled person, and when the login is somebody else's.
    """
    store = store_of(request)
    user = store.users.with_subject(identity.subject)
    if user is None:
        user = store.users.unclaimed(identity.email) if identity.email else None
        if user is None:
            user = store.users.add(identity.login, (), name=identity.name, email=identity.email)
            store.audit_trail.add("oidc", "user.add", object_kind="user", object_id=user.login)
        store.users.set_subject(user.id or 0, identity.subject)
    if user.disabled_at is not None:
        raise ConfigError("This account is disabled. Ask an administrator.")
    if identity.roles is not None and set(user.roles) != identity.roles:
        roles = sorted(identity.roles)
        store.users.set_roles(user.id or 0, roles)
        payload = {"roles": roles, "before": user.roles}
        store.audit_trail.add("oidc", "user.roles", object_kind="user", object_id=user.login, payload=payload)
    return user
