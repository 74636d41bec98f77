"""`/lineage`: how checkpoints come from each other, actor and critic apart."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator.lineage import Lineage, ancestors
from webui import urls
from webui.access import Action, needs
from webui.charts.dag import dag
from webui.contexts import LineageContext
from webui.pages.parts import QueryId, choices, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
MOST = 200  # nodes; more are left out and counted


@router.get("/lineage", response_class=HTMLResponse)
def lineage(request: Request, cycle: QueryId = None, checkpoint: QueryId = None) -> HTMLResponse:
    """All kept checkpoints, one cycle's, or one checkpoint's ancestors."""
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    left_out = 0
    if checkpoint is not None:
        if queries.checkpoint(checkpoint) is None:
            raise missing(f"checkpoint {checkpoint}")
        graph = ancestors(store, [checkpoint])
    else:
        if cycle is not None and queries.cycle(cycle) is None:
            raise missing(f"cycle {cycle}")
        found = queries.checkpoint_page(cycle_id=cycle, candidates=False, limit=MOST)
        graph = ancestors(store, [c.id for c in found.items if c.id is not None])
        left_out = max(0, queries.count_checkpoints(cycle_id=cycle) - len(found.items)) if found.next else 0
    recent = store.cycles.list(limit=20).items
    context = LineageContext(
        title="Lineage",
        section="lineage",
        events_after=after,
        here=urls.lineage(cycle=cycle, checkpoint=checkpoint),
        dag=dag(graph, current=checkpoint),
        cycles=choices(
            [(str(c.id), f"{c.id} {c.name}") for c in recent],
            str(cycle or ""),
            lambda v: urls.lineage(cycle=int(v) if v else None),
            every="all cycles",
        ),
        shown=_count(graph),
        left_out=left_out,
    )
    return page(request, context)


def _count(graph: Lineage) -> int:
    return len(graph.checkpoints)
