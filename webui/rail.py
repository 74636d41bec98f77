"""The numbers behind the words of the left rail: what waits there for the person who looks."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from orchestrator.review_look import waiting_for
from webui.access import Action, Viewer

CAP = 99  # more are shown as "99+": counting all of a long queue would cost every page


def counts(request: Request, viewer: Viewer) -> Mapping[str, str]:
    """Section of the rail -> how much waits; sections where nothing waits are left out."""
    store, found = request.app.state.store, {}
    if viewer.login and viewer.may(Action.DECIDE):
        found["reviews"] = waiting_for(store, viewer.login, cap=CAP + 1)
    if viewer.user_id is not None and viewer.may(Action.OWN_TOKENS):
        found["inbox"] = store.notices.unread(viewer.user_id)
    return {section: f"{CAP}+" if n > CAP else str(n) for section, n in found.items() if n}
