"""Pause, resume and cancel: forms of a cycle's page. What is refused is said there, with the reason."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.launch import cancel_cycle, pause_cycle, resume_cycle
from stages.errors import ConfigError, ServiceError
from webui import urls
from webui.access import Action, needs, viewer_of
from webui.contexts.lead import CancelContext
from webui.pages.cycle import cycle_page
from webui.pages.parts import RowId, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter()


@router.get(
    "/cycles/{cycle_id:int}/cancel",
    response_class=HTMLResponse,
    dependencies=[Depends(needs(Action.CONTROL, page=True))],
)
def ask(request: Request, cycle_id: RowId) -> HTMLResponse:
    """Asks before a cycle is stopped for good."""
    row = queries_of(request).cycle(cycle_id)
    if row is None:
        raise missing(f"cycle {cycle_id}")
    stages = [s for s in store_of(request).stages.of_cycle(cycle_id) if s.state == "running"]
    running = f"{stages[0].name}, {stages[0].phase}" if stages and stages[0].phase else ""
    context = CancelContext(title=f"Cancel cycle {cycle_id}?", section="cycles", cycle=row, running=running)
    return page(request, context)


@router.post("/cycles/{cycle_id:int}/{verb}", dependencies=[Depends(needs(Action.CONTROL))])
def act(request: Request, cycle_id: RowId, verb: Literal["pause", "resume", "cancel"]) -> Response:
    """303 to the cycle's page; 409 and the page with the reason when the cycle refuses, 503 without Prefect."""
    store, actor, settings = store_of(request), viewer_of(request).login, request.app.state.settings
    before = queries_of(request).cycle(cycle_id)
    if before is None:
        raise missing(f"cycle {cycle_id}")
    try:
        if verb == "pause":
            pause_cycle(store, cycle_id, actor=actor)
        elif verb == "resume":
            resume_cycle(store, cycle_id, actor=actor, settings=settings)
        else:
            cancel_cycle(store, cycle_id, actor=actor, settings=settings)
    except ConfigError as error:
        return cycle_page(request, cycle_id, refused=str(error), status=409)
    except ServiceError as error:
        return cycle_page(request, cycle_id, refused=str(error), status=503)
    return RedirectResponse(urls.cycle(cycle_id), status_code=303)
