"""`/cycles`: every cycle, newest first."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from webui import urls
from webui.access import Action, needs
from webui.contexts import CyclesContext
from webui.pages.parts import LIVE, Before, choices, queries_of, store_of, strips
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE = 50
GROUPS: dict[str, tuple[m.CycleState, ...]] = {
    "live": tuple(sorted(LIVE)),
    "waiting": (m.CycleState.SUSPENDED, m.CycleState.PAUSED),
    "done": (m.CycleState.DONE,),
    "failed": (m.CycleState.FAILED,),
    "cancelled": (m.CycleState.CANCELLED,),
}


@router.get("/cycles", response_class=HTMLResponse)
def cycles(request: Request, state: str = "", q: str = "", before: Before = None) -> HTMLResponse:
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    found = store.cycles.list(states=GROUPS.get(state, ()), text=q, before=before, limit=PAGE)
    rows = queries.summaries(found.items)
    context = CyclesContext(
        title="Cycles",
        section="cycles",
        events_after=after,
        rows=rows,
        strips=strips(queries, rows),
        states=choices(((g, g) for g in GROUPS), state, lambda v: urls.cycles(state=v, q=q)),
        query=q,
        state=state,
        next_href=urls.cycles(state=state, q=q, before=found.next) if found.next else "",
        empty=not rows and not store.cycles.list(limit=1).items,
    )
    return page(request, context)
