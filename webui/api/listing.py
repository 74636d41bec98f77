"""A list of the API and its twins: read once per noun, told as pages of JSON, and whole as CSV, JSON or Parquet.

A noun gives a dependency that reads the filters from the address and returns a `Reader`. `listing` makes of it
`GET /api/v1/<noun>`, page by page, and `GET /<page>.csv`, `.json`, `.parquet`, with the same filters and every row.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of the functions that are made here.

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, model_validator

from orchestrator import table_streams
from orchestrator.store.base import Page
from webui.access import Action, needs
from webui.problems import Problem

PREFIX = "/api/v1"
BATCH = 1000  # rows of an export that are in memory at once
MOST = 500  # rows of one answer

Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the answer before; none: the first rows")]
Limit = Annotated[int, Query(ge=1, le=MOST, description="rows of one answer")]


class Shape(BaseModel):
    """A response, read from rows and dataclasses of the same field names."""

    model_config = ConfigDict(from_attributes=True)


class Body(BaseModel):
    """What a request sends. Unknown fields are refused, and text that Postgres cannot hold."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        try:
            sent = json.dumps(value, ensure_ascii=False, default=str)
            sent.encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise ValueError("it holds text that is no Unicode, or is nested too deeply") from error
        if "\\u0000" in sent:
            raise ValueError("it holds a NUL character")
        return value


T = TypeVar("T")


class Slice(Shape, Generic[T]):
    """One page of a list. `next` goes into the next request's `cursor`; null: these were the last."""

    items: list[T]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    items: Sequence[Any]
    next: str | None = None


Reader = Callable[[str | None, int], Found]  # cursor, limit
REASONS = {
    400: "the body is no JSON",
    401: "not signed in, or a token that does not hold",
    403: "not allowed",
    404: "there is none, or you may not see it",
    422: "the request cannot be used; `fields` says which parts",
}


class Kind(StrEnum):
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


MEDIA = {
    Kind.CSV: "text/csv; charset=utf-8",
    Kind.JSON: "application/json",
    Kind.PARQUET: "application/vnd.apache.parquet",
}
STREAMS: dict[Kind, Callable[[table_streams.Columns, table_streams.Rows], Iterator[Any]]] = {
    Kind.CSV: table_streams.csv,
    Kind.JSON: table_streams.json_array,
    Kind.PARQUET: table_streams.parquet,
}


def noun_router(noun: str) -> APIRouter:
    """The router of one noun, whose errors are `Problem`s."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": words} for status, words in REASONS.items()
    }
    return APIRouter(prefix=PREFIX, tags=[noun], responses=errors)


def also(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Further errors that one operation may answer with."""
    words = {409: "its state does not allow it", 503: "a service that it needs is not running"}
    return {status: {"model": Problem, "description": words[status]} for status in statuses}


def number(cursor: str | None) -> int | None:
    """A cursor that is a row's number. Raises 422 for anything else."""
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise HTTPException(422, f"cursor {cursor[:40]!r} is none of this list: give the `next` of the answer before")
    return int(cursor)


def by_number(found: Page[Any]) -> Found:
    """A page of the store, whose cursor is a number."""
    return Found(items=found.items, next=None if found.next is None else str(found.next))


def at_once(rows: Sequence[Any]) -> Reader:
    """A list that is short and read whole; its cursor is the position of its next row."""

    def read(cursor: str | None, limit: int) -> Found:
        start = number(cursor) or 0
        more = start + limit < len(rows)
        return Found(items=rows[start : start + limit], next=str(start + limit) if more else None)

    return read


def listing(
    router: APIRouter,
    path: str,
    shape: type[Shape],
    reads: Callable[..., Reader],
    *,
    says: str,
    action: Action = Action.SEE,
    page: bool = False,
    twins: APIRouter | None = None,
) -> None:
    """Add `GET path` to the API and, with `twins`, the exports of the console's page of the same path.

    `reads`: a dependency that reads the filters and returns a `Reader`. `page`: as in `needs`.
    """

    def many(reader: Annotated[Reader, Depends(reads)], cursor: Cursor = None, limit: Limit = 50) -> Found:
        return reader(cursor, limit)

    router.add_api_route(
        path,
        many,
        response_model=Slice[shape],  # type: ignore[valid-type]
        dependencies=[Depends(needs(action, page=page))],
        summary=says,
        operation_id=f"list_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '').replace('-', '_')}",
    )
    if twins is None:
        return

    def whole(reader: Annotated[Reader, Depends(reads)], suffix: Kind) -> StreamingResponse:
        first = reader(None, BATCH)  # before the answer begins, so that a wrong filter is an answer of its own
        return export(path.strip("/"), suffix, columns_of(shape), _batches(shape, reader, first))

    twins.add_api_route(
        f"{path}.{{suffix}}",
        whole,
        include_in_schema=False,
        dependencies=[Depends(needs(action, page=page))],
        methods=["GET"],
    )


def export(
    name: str, kind: Kind, columns: table_streams.Columns, batches: Iterator[Sequence[dict[str, Any]]]
) -> StreamingResponse:
    """A download. `name` holds letters, digits and dashes only."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.{kind}"', "Cache-Control": "private, no-cache"}
    return StreamingResponse(STREAMS[kind](columns, batches), media_type=MEDIA[kind], headers=headers)


def columns_of(shape: type[Shape]) -> table_streams.Columns:
    return {name: field.annotation for name, field in shape.model_fields.items()}


def table(rows: Sequence[dict[str, Any]]) -> table_streams.Columns:
    """The columns of rows that are there already: those of the first, each of the type that its values have."""
    columns: table_streams.Columns = {}
    for name in rows[0] if rows else ():
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        kinds = kinds - {int} if kinds == {int, float} else kinds
        columns[name] = kinds.pop() if len(kinds) == 1 else str
    return columns


def _batches(shape: type[Shape], reader: Reader, first: Found) -> Iterator[Sequence[dict[str, Any]]]:
    found = first
    while True:
        yield [shape.model_validate(row).model_dump() for row in found.items]
        if found.next is None:
            return
        found = reader(found.next, BATCH)
