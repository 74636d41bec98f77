"""What is one's own: who one is, the inbox, API tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from orchestrator import models as m
from orchestrator.store.notices import InboxEntry
from webui.access import Action, Viewer, in_person, needs
from webui.api.listing import Body, Found, Reader, Shape, by_number, listing, noun_router, number
from webui.pages.api_tokens import USUAL, new_token, revoke_token, state_of
from webui.pages.inbox import person_id
from webui.pages.parts import RowId, store_of
from webui.problems import problem

router = noun_router("own")
twins = APIRouter()
Me = Annotated[Viewer, Depends(in_person)]
Own = Annotated[Viewer, Depends(needs(Action.OWN_TOKENS))]


class Whoami(Shape):
    login: str
    name: str
    roles: list[m.Role]
    may: list[Action] = Field(description="with this token or sign-in")


class Notice(Shape):
    id: int
    kind: str
    cycle_id: int | None
    stage_id: int | None
    text: str
    payload: dict[str, Any]
    created_at: datetime
    read_at: datetime | None


class Read(Body):
    notices: list[Annotated[int, Field(ge=1, le=2**62)]] | None = Field(
        default=None, max_length=1000, description="null: all of them"
    )


class Marked(Shape):
    marked: int


class ApiToken(Shape):
    id: int
    name: str
    hint: str = Field(description="its first characters")
    scopes: list[str]
    state: str = Field(description="active, expired or revoked")
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None


class NewToken(Body):
    name: str
    scopes: list[str] = Field(max_length=50)
    days: Literal[7, 30, 90, 365] = USUAL  # type: ignore[assignment]


class Secret(Shape):
    token: str = Field(description="shown here only; send it as `Authorization: Bearer …`")


def inbox(
    request: Request, viewer: Annotated[Viewer, Depends(needs(Action.OWN_TOKENS, page=True))], unread: bool = False
) -> Reader:
    def read(cursor: str | None, limit: int) -> Found:
        notices = store_of(request).notices
        found = by_number(notices.inbox(person_id(viewer), unread=unread, before=number(cursor), limit=limit))
        return Found(items=[_notice(entry) for entry in found.items], next=found.next)

    return read


listing(
    router, "/inbox", Notice, inbox, says="Your notices, newest first", action=Action.OWN_TOKENS, twins=twins, page=True
)


@router.get("/me", response_model=Whoami)
def get_me(viewer: Annotated[Viewer, Depends(needs(Action.SEE))]) -> Whoami:
    return Whoami(
        login=viewer.login, name=viewer.name, roles=sorted(viewer.roles), may=[a for a in Action if viewer.may(a)]
    )


@router.post("/inbox/read", response_model=Marked)
def mark_read(request: Request, viewer: Own, body: Read) -> Marked:
    return Marked(marked=store_of(request).notices.mark_read(person_id(viewer), body.notices))


@router.get("/tokens", response_model=list[ApiToken])
def list_tokens(request: Request, viewer: Me) -> Sequence[ApiToken]:
    """Newest first, revoked ones included. Not for tokens themselves: sign in."""
    return [_token(t) for t in store_of(request).api_tokens.list(viewer.user_id or 0)]


@router.post("/tokens", response_model=Secret, status_code=201)
def make_token(request: Request, viewer: Me, body: NewToken) -> Response | Secret:
    secret, wrong = new_token(request, viewer, body.name.strip(), body.scopes, str(body.days))
    if wrong:
        fields = [(f"body.{name}", what) for name, what in wrong.items()]
        return problem(422, "This token cannot be made", "body", "Correct these fields.", fields=fields)
    return Secret(token=secret)


@router.post("/tokens/{token_id:int}/revoke", response_model=ApiToken)
def revoke(request: Request, viewer: Me, token_id: RowId) -> ApiToken:
    return _token(revoke_token(request, viewer, token_id))


def _notice(entry: InboxEntry) -> Notice:
    own = {name: getattr(entry.notice, name) for name in Notice.model_fields if name != "read_at"}
    return Notice(**own, read_at=entry.read_at)


def _token(row: m.ApiToken) -> ApiToken:
    own = {name: getattr(row, name) for name in ApiToken.model_fields if name != "state"}
    return ApiToken(**own, state=state_of(row))
