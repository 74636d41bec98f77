"""`/cycles/{id}/charts/{name}.json`: figures for Plotly, as plain JSON."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from webui.access import Action, needs
from webui.charts.figures import ev_figure, success_figure
from webui.pages.curves import ev_points, success_points
from webui.pages.parts import RowId, missing, queries_of, store_of

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])


@router.get("/cycles/{cycle_id:int}/charts/{name}.json", include_in_schema=False)
def chart(request: Request, cycle_id: RowId, name: str) -> JSONResponse:
    store = store_of(request)
    if queries_of(request).cycle(cycle_id) is None:
        raise missing(f"cycle {cycle_id}")
    stages = {s.id: s for s in store.stages.of_cycle(cycle_id) if s.id is not None}
    if name == "ev":
        figure = ev_figure(ev_points(store, cycle_id, stages))
    elif name == "success":
        figure = success_figure(success_points(store, cycle_id, stages))
    else:
        raise missing(f"chart {name}")
    return JSONResponse(figure, headers={"Cache-Control": "no-cache"})
