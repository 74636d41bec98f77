"""`/audit-log`: who changed what, newest first, and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from orchestrator import models as m
from orchestrator.store import Store
from webui import urls
from webui.access import Action, needs
from webui.contexts.account import AuditLogContext
from webui.formats import iso
from webui.pages.parts import Before, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE_AUDIT_LOG))])
PAGE = 100
BATCH = 1000  # rows of the CSV that are in memory at once
Word = Annotated[str, Query(max_length=200)]


@router.get("/audit-log", response_class=HTMLResponse)
def audit_log(
    request: Request, actor: Word = "", action: Word = "", kind: Word = "", object: Word = "", before: Before = None
) -> HTMLResponse:
    filters = _filters(actor, action, kind, object)
    found = store_of(request).audit_trail.list(**_where(filters), before=before, limit=PAGE)
    context = AuditLogContext(
        title="Audit log",
        section="audit-log",
        rows=[(row, words(row.payload)) for row in found.items],
        filters=filters,
        next_href=urls.audit_log(**filters, before=found.next) if found.next else "",
        csv_href=urls.audit_log_csv(**filters),
        empty=not found.items,
    )
    return page(request, context)


@router.get("/audit-log.csv", include_in_schema=False)
def audit_log_csv(
    request: Request, actor: Word = "", action: Word = "", kind: Word = "", object: Word = ""
) -> StreamingResponse:
    """Everything that fits, newest first."""
    lines = _csv(store_of(request), _filters(actor, action, kind, object))
    headers = {"Content-Disposition": 'attachment; filename="audit-log.csv"'}
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)


def words(payload: Mapping[str, object]) -> str:
    """`wait_s=4 roles=["lead"]`."""
    return " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in payload.items())


def cell(value: object) -> str:
    """Text that a spreadsheet does not run as a formula."""
    text = str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _csv(store: Store, filters: Mapping[str, str]) -> Iterator[str]:
    yield _line(("id", "time", "actor", "action", "object_kind", "object_id", "payload"))
    before: int | None = None
    while True:
        found = store.audit_trail.list(**_where(filters), before=before, limit=BATCH)
        yield "".join(_line(_row(row)) for row in found.items)
        if (before := found.next) is None:
            return


def _row(row: m.AuditLog) -> tuple[object, ...]:
    payload = json.dumps(row.payload, ensure_ascii=False)
    return row.id, iso(row.created_at), row.actor, row.action, row.object_kind, row.object_id, payload


def _line(values: tuple[object, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow([cell(v) for v in values])
    return buffer.getvalue()


def _filters(actor: str, action: str, kind: str, object_id: str) -> dict[str, str]:
    return {"actor": actor, "action": action, "kind": kind, "object": object_id}


def _where(filters: Mapping[str, str]) -> dict[str, str | None]:
    names = {"actor": "actor", "action": "action", "kind": "object_kind", "object": "object_id"}
    return {names[key]: value.strip() or None for key, value in filters.items()}
