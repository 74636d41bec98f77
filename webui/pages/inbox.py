"""`/inbox`: what one person was told, and for those who see the audit log what became of the webhook's deliveries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from webui import urls
from webui.access import Action, Viewer, needs
from webui.contexts import Choice
from webui.contexts.lead import InboxContext
from webui.pages.parts import Before, form_of, missing, store_of
from webui.rendering import page

router = APIRouter()
PAGE = 50


@router.get("/inbox", response_class=HTMLResponse)
def inbox(
    request: Request,
    viewer: Annotated[Viewer, Depends(needs(Action.OWN_TOKENS, page=True))],
    unread: bool = False,
    before: Before = None,
) -> HTMLResponse:
    store = store_of(request)
    after = store.events.last_id()
    user_id = person_id(viewer)
    found = store.notices.inbox(user_id, unread=unread, before=before, limit=PAGE)
    context = InboxContext(
        title="Inbox",
        section="inbox",
        events_after=after,
        entries=found.items,
        unread_only=unread,
        unread=store.notices.unread(user_id),
        filters=[
            Choice(value="", label="all", href=urls.inbox(), active=not unread),
            Choice(value="1", label="unread", href=urls.inbox(unread=True), active=unread),
        ],
        here=urls.inbox(unread=unread, before=before),
        next_href=urls.inbox(unread=unread, before=found.next) if found.next else "",
        deliveries=store.notices.deliveries(limit=20) if viewer.may(Action.SEE_AUDIT_LOG) else (),
    )
    return page(request, context)


@router.post("/inbox/read")
def read(
    request: Request,
    viewer: Annotated[Viewer, Depends(needs(Action.OWN_TOKENS))],
    form: Annotated[Mapping[str, str], Depends(form_of)],
) -> RedirectResponse:
    """Mark one notice as read (`notice`), or all of them. Only one's own inbox changes, so the audit log is not written."""
    text = form.get("notice", "")
    chosen = [int(text)] if text.isdecimal() and len(text) < 19 else []
    store_of(request).notices.mark_read(person_id(viewer), chosen if text else None)
    return RedirectResponse(urls.inbox(unread=form.get("unread") == "1"), status_code=303)


def person_id(viewer: Viewer) -> int:
    """Raises 404 for nobody, who has no inbox."""
    if viewer.user_id is None:
        raise missing("inbox without signing in")
    return viewer.user_id
