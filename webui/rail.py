"""The numbers behind the words of the left rail: what waits there for the person who looks."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from orchestrator.reviewing import waiting_for
from webui.access import Action, Viewer

CAP = 99  # more are shown as "99+": counting all of a long queue would cost every page


def counts(request: Request, viewer: Viewer) -> Mapping[str, str]:
    """Section of the rail -> how much waits; sections where nothing waits are left out."""
    if not viewer.login or not viewer.may(Action.DECIDE):
        return {}
    waiting = waiting_for(request.app.state.store, viewer.login, cap=CAP + 1)
    return {"reviews": f"{CAP}+" if waiting > CAP else str(waiting)} if waiting else {}
