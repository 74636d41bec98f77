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
    store = store_of(request)
    values = {"login": login.strip(), "name": name.strip(), "email": email.strip()}
    problems = {key: f"At most {LONGEST} characters." for key, text in values.items() if len(text) > LONGEST}
    problems |= {key: "Some of its characters cannot be shown." for key, t in values.items() if not t.isprintable()}
    if unknown := set(role) - set(m.Role):
        problems["role"] = f"There is no role {', '.join(sorted(unknown))[:100]}."
    if not problems:
        try:
            with store.transaction():
                user = store.users.add(
                    values["login"], [m.Role(r) for r in role], name=values["name"], email=values["email"]
                )
                _note(request, viewer, "user.add", user, roles=user.roles)
        except ConfigError as error:
            problems["login"] = str(error)
    if problems:
        return _page(request, viewer, values=values, chosen=role, problems=problems, status=422)
    return _link_page(request, viewer, user, status=201)


@router.post("/people/{user_id:int}/roles")
def set_roles(request: Request, viewer: Admin, user_id: RowId, role: Annotated[Sequence[str], Form()] = ()) -> Response:
    user, wanted = _person(request, user_id), sorted(set(role))
    if unknown := set(wanted) - set(m.Role):
        return _page(request, viewer, problem=f"There is no role {', '.join(sorted(unknown))[:100]}.", status=422)
    if user.id == viewer.user_id and m.Role.ADMIN not in wanted:
        problem = "You cannot stop being an administrator yourself: another one must do it, so that one is left."
        return _page(request, viewer, problem=problem, status=422)
    store = store_of(request)
    with store.transaction():
        store.users.set_roles(user_id, [m.Role(r) for r in wanted])
        _note(request, viewer, "user.roles", user, roles=wanted, before=user.roles)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/disable")
def disable(request: Request, viewer: Admin, user_id: RowId) -> Response:
    user, store = _person(request, user_id), store_of(request)
    if user.id == viewer.user_id:
        return _page(request, viewer, problem="You cannot disable yourself.", status=422)
    with store.transaction():
        store.users.set_disabled(user_id, True)
        ended = store.sign_ins.end_all(user_id)
        _note(request, viewer, "user.disable", user, ended=ended)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/enable")
def enable(request: Request, viewer: Admin, user_id: RowId) -> Response:
    user, store = _person(request, user_id), store_of(request)
    with store.transaction():
        store.users.set_disabled(user_id, False)
        _note(request, viewer, "user.enable", user)
    return RedirectResponse(urls.people(), 303)


@router.post("/people/{user_id:int}/link", response_class=HTMLResponse)
def link(request: Request, viewer: Admin, user_id: RowId) -> Response:
    """Answers with the page itself, the only one that shows the link."""
    return _link_page(request, viewer, _person(request, user_id), status=201)


def _person(request: Request, user_id: int) -> m.User:
    found = next((u for u in store_of(request).users.list(disabled=True) if u.id == user_id), None)
    if found is None:
        raise missing(f"person {user_id}")
    return found


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
