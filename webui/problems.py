"""The one shape of an error that a program gets: what is wrong, where, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field


class FieldProblem(BaseModel):
    """One field that cannot be used."""

    where: str = Field(description="path of the field, such as body.set.rounds")
    what: str


class Problem(BaseModel):
    error: str = Field(description="the status in words, such as not found")
    what: str = Field(description="what is wrong")
    where: str = Field(description="the address, or the part of the request")
    next: str = Field(description="what to do about it; may be empty")
    fields: list[FieldProblem] = Field(default=[], description="every field that cannot be used")


ADVICE = {
    400: "Send the body as JSON.",
    401: "Send a token as `Authorization: Bearer …`; you make one at /tokens.",
    403: "Ask an administrator for the role, or make a token with this scope.",
    404: "Lists show what exists: /api/v1 names their addresses.",
    405: "/api/v1 names the methods of each address.",
    409: "Read its state first.",
    413: "Send less at once.",
    422: "Correct the request and send it again.",
    429: "Wait a little, then send it again.",
    503: "`rsi status` shows which service is missing; then send it again.",
}


def is_api(path: str) -> bool:
    """Addresses whose errors are for programs."""
    return path.startswith("/api/")


def problem(
    status: int,
    what: str,
    where: str,
    following: str = "",
    *,
    fields: Sequence[tuple[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """`fields`: (where, what) of each field that is wrong. An empty `following` becomes the usual advice."""
    found = Problem(
        error=HTTPStatus(status).phrase.lower(),
        what=what,
        where=where,
        next=following or ADVICE.get(status, ""),
        fields=[FieldProblem(where=w, what=t) for w, t in fields],
    )
    return JSONResponse(found.model_dump(), status, headers=dict(headers or {}))
