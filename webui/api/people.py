"""People and their roles, and the log of what was changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from orchestrator import models as m
from orchestrator.accounts import link_for
from webui.access import Action, Viewer, needs, viewer_of
from webui.api.listing import Body, Reader, Shape, at_once, by_number, listing, noun_router, number
from webui.pages.audit_log import Filters, where
from webui.pages.parts import RowId, store_of
from webui.pages.people import change_roles, new_person, person_row, set_disabled
from webui.problems import problem

router = noun_router("people")
twins = APIRouter()
Admin = Annotated[Viewer, Depends(needs(Action.MANAGE_PEOPLE))]


class Person(Shape):
    id: int
    login: str
    name: str
    email: str
    roles: list[m.Role]
    disabled_at: datetime | None
    created_at: datetime


class NewPerson(Body):
    login: str
    name: str = ""
    email: str = ""
    roles: list[m.Role] = Field(default=[], max_length=10)


class Roles(Body):
    roles: list[m.Role] = Field(max_length=10)


class Link(Shape):
    """An address that signs the person in once, within 15 minutes. It is shown here only."""

    person: Person
    link: str


class Change(Shape):
    id: int
    actor: str
    action: str
    object_kind: str
    object_id: str
    payload: dict[str, Any]
    created_at: datetime


def people(request: Request) -> Reader:
    return at_once(store_of(request).users.list(disabled=True))


def changes(request: Request, filters: Filters) -> Reader:
    """`kind` and `object`: what was changed."""
    return lambda cursor, limit: by_number(
        store_of(request).audit_trail.list(**where(filters, viewer_of(request)), before=number(cursor), limit=limit)
    )


listing(router, "/people", Person, people, says="Everybody, by login", action=Action.SEE_PEOPLE, twins=twins)
listing(router, "/audit-log", Change, changes, says="Changes, newest first", action=Action.SEE_AUDIT_LOG, twins=twins)


@router.post("/people", response_model=Link, status_code=201)
def add_person(request: Request, viewer: Admin, body: NewPerson) -> Response | Link:
    """With a link for the first sign-in."""
    values = {"login": body.login.strip(), "name": body.name.strip(), "email": body.email.strip()}
    user, wrong = new_person(request, viewer, values, body.roles)
    return _refused(wrong) if user is None else _link(request, viewer, user)


@router.put("/people/{user_id:int}/roles", response_model=Person)
def set_roles(request: Request, viewer: Admin, user_id: RowId, body: Roles) -> m.User:
    change_roles(request, viewer, user_id, body.roles)
    return person_row(request, user_id)


@router.post("/people/{user_id:int}/{verb}", response_model=Person)
def disable_or_enable(request: Request, viewer: Admin, user_id: RowId, verb: Literal["disable", "enable"]) -> m.User:
    """A disabled person is signed out everywhere."""
    set_disabled(request, viewer, user_id, verb == "disable")
    return person_row(request, user_id)


@router.post("/people/{user_id:int}/link", response_model=Link, status_code=201)
def make_link(request: Request, viewer: Admin, user_id: RowId) -> Link:
    return _link(request, viewer, person_row(request, user_id))


def _link(request: Request, viewer: Viewer, user: m.User) -> Link:
    made = link_for(store_of(request), user.login, settings=request.app.state.settings, actor=viewer.login)
    return Link(person=Person.model_validate(user), link=made)


def _refused(errors: dict[str, str]) -> JSONResponse:
    fields: Sequence[tuple[str, str]] = [(f"body.{name}", what) for name, what in errors.items()]
    return problem(422, "This person cannot be added", "body", "Correct these fields.", fields=fields)
