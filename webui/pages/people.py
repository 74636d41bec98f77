"""`/people`: who may sign in, with which roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Form, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import models as m
from orchestrator.accounts import link_for
from stages.errors import ConfigError
from webui import urls
from webui.access import Action, Viewer, needs
from webui.contexts.account import PeopleContext, PersonRow
from webui.pages.parts import RowId, missing, store_of
from webui.rendering import page

router = APIRouter()
Admin = Annotated[Viewer, Depends(needs(Action.MANAGE_PEOPLE))]
LONGEST = 200  # characters of a name or an address


@router.get("/people", response_class=HTMLResponse)
def people(request: Request, viewer: Annotated[Viewer, Depends(needs(Action.SEE_PEOPLE))]) -> HTMLResponse:
    return _page(request, viewer)


@router.post("/people", response_class=HTMLResponse)
def add(
    request: Request,
    viewer: Admin,
    login: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
    email: Annotated[str, Form()] = "",
    role: Annotated[Sequence[str], Form()] = (),
) -> Response:
    """Answers with the page itself, the only one that shows the link for the first sign-in."""
    values = {"login": login.strip(), "name": name.strip(), "email": email.strip()}
    user, problems = new_person(request, viewer, values, role)
    if user is None:
        return _page(request, viewer, values=values, chosen=role, problems=problems, status=422)
    return _link_page(request, viewer, user, status=201)


@router.post("/people/{user_id:int}/roles")
def set_roles(request: Request, viewer: Admin, user_id: RowId, role: Annotated[Sequence[str], Form()] = ()) -> Response:
    try:
        change_roles(request, viewer, user_id, role)
    except ConfigError as error:
        return _page(request, viewer, problem=str(error), status=422)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/disable")
def disable(request: Request, viewer: Admin, user_id: RowId) -> Response:
    try:
        set_disabled(request, viewer, user_id, True)
    except ConfigError as error:
        return _page(request, viewer, problem=str(error), status=422)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/enable")
def enable(request: Request, viewer: Admin, user_id: RowId) -> Response:
    set_disabled(request, viewer, user_id, False)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/link", response_class=HTMLResponse)
def link(request: Request, viewer: Admin, user_id: RowId) -> Response:
    """Answers with the page itself, the only one that shows the link."""
    return _link_page(request, viewer, person_row(request, user_id), status=201)


def person_row(request: Request, user_id: int) -> m.User:
    found = next((u for u in store_of(request).users.list(disabled=True) if u.id == user_id), None)
    if found is None:
        raise missing(f"person {user_id}")
    return found


def new_person(
    request: Request, viewer: Viewer, values: Mapping[str, str], roles: Sequence[str]
) -> tuple[m.User | None, dict[str, str]]:
    """Somebody new, or what is wrong with each field. `values`: login, name, email."""
    store = store_of(request)
    problems = {key: f"At most {LONGEST} characters." for key, text in values.items() if len(text) > LONGEST}
    problems |= {key: "Some of its characters cannot be shown." for key, t in values.items() if not t.isprintable()}
    if unknown := set(roles) - set(m.Role):
        problems["role"] = f"There is no role {', '.join(sorted(unknown))[:100]}."
    if problems:
        return None, problems
    try:
        with store.transaction():
            user = store.users.add(
                values["login"], [m.Role(r) for r in roles], name=values["name"], email=values["email"]
            )
            _note(request, viewer, "user.add", user, roles=user.roles)
    except ConfigError as error:
        return None, {"login": str(error)}
    return user, {}


def change_roles(request: Request, viewer: Viewer, user_id: int, roles: Sequence[str]) -> None:
    """Raises ConfigError for an unknown role, or for an administrator who would stop being one."""
    user, wanted, store = person_row(request, user_id), sorted(set(roles)), store_of(request)
    if unknown := set(wanted) - set(m.Role):
        raise ConfigError(f"There is no role {', '.join(sorted(unknown))[:100]}.")
    if user.id == viewer.user_id and m.Role.ADMIN not in wanted:
        raise ConfigError(
            "You cannot stop being an administrator yourself: another one must do it, so that one is left."
        )
    with store.transaction():
        store.users.set_roles(user_id, [m.Role(r) for r in wanted])
        _note(request, viewer, "user.roles", user, roles=wanted, before=user.roles)


def set_disabled(request: Request, viewer: Viewer, user_id: int, disabled: bool) -> None:
    """A disabled person is signed out everywhere. Raises ConfigError for oneself."""
    user, store = person_row(request, user_id), store_of(request)
    if disabled and user.id == viewer.user_id:
        raise ConfigError("You cannot disable yourself.")
    with store.transaction():
        store.users.set_disabled(user_id, disabled)
        if disabled:
            _note(request, viewer, "user.disable", user, ended=store.sign_ins.end_all(user_id))
        else:
            _note(request, viewer, "user.enable", user)


def _note(request: Request, viewer: Viewer, action: str, user: m.User, **payload: object) -> None:
    trail = store_of(request).audit_trail
    trail.add(viewer.login, action, object_kind="user", object_id=user.login, payload=payload)


def _link_page(request: Request, viewer: Viewer, user: m.User, *, status: int) -> HTMLResponse:
    try:
        link = link_for(store_of(request), user.login, settings=request.app.state.settings, actor=viewer.login)
    except ConfigError as error:
        return _page(request, viewer, problem=str(error), status=422)
    return _page(request, viewer, link=link, link_for=user.login, status=status)


def _page(
    request: Request,
    viewer: Viewer,
    *,
    values: Mapping[str, str] | None = None,
    chosen: Sequence[str] = (),
    link: str = "",
    link_for: str = "",
    problem: str = "",
    problems: Mapping[str, str] | None = None,
    status: int = 200,
) -> HTMLResponse:
    if not viewer.may(Action.SEE_PEOPLE):  # a token that may manage and not see
        raise HTTPException(404)
    context = PeopleContext(
        title="People",
        section="people",
        people=[
            PersonRow(user=u, how=_how(u), me=u.id == viewer.user_id)
            for u in store_of(request).users.list(disabled=True)
        ],
        roles=list(m.Role),
        values=values or {"login": "", "name": "", "email": ""},
        chosen=chosen,
        link=link,
        link_for=link_for,
        problem=problem,
        problems=problems or {},
    )
    answer = page(request, context, status=status)
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _how(user: m.User) -> str:
    ways = [way for way, has in (("password", user.password_hash), ("provider", user.oidc_subject)) if has]
    return " or ".join(ways) or "link only"
