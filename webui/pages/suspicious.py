"""`/suspicious`: attempts that passed although something was flagged, and the most expensive ones that failed."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator.store import TrajectoryFilter
from orchestrator.store.task_queries import TaskQueries
from webui import formats, urls
from webui.access import Action, needs
from webui.contexts.analysis import SuspiciousContext
from webui.pages.parts import Before, QueryId, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE, EXPENSIVE, WORDS = 50, 20, 300


@router.get("/suspicious", response_class=HTMLResponse)
def suspicious(request: Request, cycle: QueryId = None, before: Before = None) -> HTMLResponse:
    store = store_of(request)
    if cycle is not None and queries_of(request).cycle(cycle) is None:
        raise missing(f"cycle {cycle}")
    found = TaskQueries(store).suspicious(cycle_id=cycle, before=before, limit=PAGE)
    context = SuspiciousContext(
        title="Suspicious passes" if cycle is None else f"Suspicious passes of cycle {cycle}",
        section="suspicious",
        rows=found.items,
        evidence={t.id: formats.visible(t.verifier_log.strip()[:WORDS]) for t in found.items},
        expensive=store.trajectories.expensive_failures(TrajectoryFilter(cycle_id=cycle), limit=EXPENSIVE),
        cycle=cycle,
        next_href=urls.suspicious(cycle=cycle, before=found.next) if found.next else "",
    )
    return page(request, context)
