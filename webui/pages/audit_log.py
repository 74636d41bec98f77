"""`/audit-log`: who changed what, newest first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from webui import urls
from webui.access import Action, Viewer, needs, viewer_of
from webui.contexts.account import AuditLogContext
from webui.pages.parts import Before, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE_AUDIT_LOG))])
PAGE = 100
Word = Annotated[str, Query(max_length=200)]


def audit_filters(actor: Word = "", action: Word = "", kind: Word = "", object: Word = "") -> dict[str, str]:
    """A dependency: what the address narrows the log to."""
    return {"actor": actor, "action": action, "kind": kind, "object": object}


Filters = Annotated[dict[str, str], Depends(audit_filters)]


@router.get("/audit-log", response_class=HTMLResponse)
def audit_log(request: Request, filters: Filters, before: Before = None) -> HTMLResponse:
    found = store_of(request).audit_trail.list(**where(filters, viewer_of(request)), before=before, limit=PAGE)
    context = AuditLogContext(
        title="Audit log",
        section="audit-log",
        rows=[(row, words(row.payload)) for row in found.items],
        filters=filters,
        next_href=urls.audit_log(**filters, before=found.next) if found.next else "",
        empty=not found.items,
    )
    return page(request, context)


def words(payload: Mapping[str, object]) -> str:
    """`wait_s=4 roles=["lead"]`."""
    return " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in payload.items())


def where(filters: Mapping[str, str], viewer: Viewer) -> dict[str, str | None]:
    """The same as arguments of the store. Who reviews, too, reads here no verdict before the own one."""
    names = {"actor": "actor", "action": "action", "kind": "object_kind", "object": "object_id"}
    narrowed = {names[key]: value.strip() or None for key, value in filters.items()}
    return narrowed | {"blind_to": viewer.login if viewer.blind else None}
