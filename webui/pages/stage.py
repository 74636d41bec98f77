"""`/cycles/{id}/stages/{name}`: one stage: curves over its steps, training health, facts of its phases, what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from orchestrator import models as m
from orchestrator.health import CERTIFIED, WATCHED, certificates, consistency, health
from orchestrator.store import Store
from orchestrator.store.metrics import Point
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.stage_figures import CHARTS, shown, stage_figure, steps_of
from webui.contexts import Choice, CurveTable, Fact
from webui.contexts.lead import StageChart, StageContext
from webui.pages.overview import describe
from webui.pages.parts import RowId, choices, missing, queries_of, store_of
from webui.pages.standing import tabs
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
SMOOTHING = (("5", "5 steps"), ("20", "20 steps"))
Smooth = Annotated[int, Query(ge=0, le=1000)]
Scale = Literal["linear", "log"]
CONSISTENCY = (*(metric for _, metric in CERTIFIED), "train/route_flip_share")
METRICS = sorted(
    {c.metric for chart in CHARTS.values() for c in chart.curves} | {metric for _, metric in WATCHED} | {*CONSISTENCY}
)


@router.get("/cycles/{cycle_id:int}/stages/{name}", response_class=HTMLResponse)
def stage(request: Request, cycle_id: RowId, name: str, smooth: Smooth = 0, scale: Scale = "linear") -> HTMLResponse:
    """`smooth`: span in steps of the line over the raw values; 0: none."""
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    cycle, row = _stage(request, cycle_id, name)
    stage_id = row.id or 0
    points = store.metrics.curve(METRICS, stage_ids=[stage_id])
    phases = store.stages.phases(stage_id)

    def here(**changes: object) -> str:
        kept: dict[str, object] = {"smooth": smooth or None, "scale": scale if scale != "linear" else None}
        return urls.stage(cycle_id, row.name, **(kept | changes))

    view: dict[str, object] = {"smooth": smooth or None, "scale": scale if scale != "linear" else None}
    context = StageContext(
        title=f"{row.name} of cycle {cycle_id}",
        section="cycles",
        events_after=after,
        cycle=cycle,
        stage=row,
        tabs=tabs(cycle_id, store.stages.of_cycle(cycle_id), row.name),
        here=here(),
        facts=_facts(store, row),
        phases=[(p, [Fact(label=k, value=_value(v)) for k, v in p.facts.items()]) for p in phases.values()],
        charts=[
            StageChart(
                key=key,
                title=chart.title,
                src=urls.stage_chart(cycle_id, row.name, key, **view),
                table=_table(key, points),
            )
            for key, chart in CHARTS.items()
            if shown(chart, points)
        ],
        smoothing=choices(SMOOTHING, str(smooth or ""), lambda v: here(smooth=v or None), every="raw only"),
        scales=[
            Choice(value=s, label=s, href=here(scale=s if s != "linear" else None), active=s == scale)
            for s in ("linear", "log")
        ],
        health=health(points),
        alarms=[(e, describe(e)) for e in queries.alarms(stage_id, cycle_id)],
        certificate=_certificate(points),
        certificates=_certificates(points),
        selections=[s for s in store.selections.of_cycle(cycle_id) if s.stage_id == stage_id],
        empty="" if points else _empty(row),
    )
    return page(request, context)


@router.get("/cycles/{cycle_id:int}/stages/{name}/charts/{chart}.json", include_in_schema=False)
def figure(
    request: Request, cycle_id: RowId, name: str, chart: str, smooth: Smooth = 0, scale: Scale = "linear"
) -> JSONResponse:
    _, row = _stage(request, cycle_id, name)
    if chart not in CHARTS:
        raise missing(f"chart {chart}")
    # every chart has the steps of the whole stage on its axis, so all metrics are read
    points = store_of(request).metrics.curve(METRICS, stage_ids=[row.id or 0])
    drawn = stage_figure(CHARTS[chart], points, smooth=smooth, log=scale == "log")
    return JSONResponse(drawn, headers={"Cache-Control": "no-cache"})


def _stage(request: Request, cycle_id: int, name: str) -> tuple[m.Cycle, m.Stage]:
    cycle = queries_of(request).cycle(cycle_id)
    row = store_of(request).stages.named(cycle_id, name) if cycle else None
    if cycle is None or row is None:
        raise missing(f"stage {name} in cycle {cycle_id}")
    return cycle, row


def _facts(store: Store, row: m.Stage) -> list[Fact]:
    parents = store.checkpoints.many([i for i in (row.actor_parent_id, row.critic_parent_id) if i is not None])

    def parent(side: str, parent_id: int | None) -> Fact:
        found = parents.get(parent_id or 0)
        href = urls.checkpoint(found.id) if found else ""
        return Fact(label=f"{side} from", value=found.name if found else formats.MISSING, href=href)

    took = formats.between(row.started_at, row.finished_at)
    return [
        parent("Actor", row.actor_parent_id),
        parent("Critic", row.critic_parent_id),
        Fact(label="Started", value=formats.when(row.started_at)),
        Fact(label="Took" if row.finished_at else "Running for", value=formats.duration(took)),
        Fact(label="Expected", value=formats.duration(row.expected_s)),
        Fact(label="Attempt", value=str(row.attempt or formats.MISSING)),
        Fact(label="Attempts of agents", value="list", href=urls.trajectories(stage=row.id)),
        Fact(label="Log", value="lines of this stage", href=urls.cycle_logs(row.cycle_id, stage=row.name.lower())),
    ]


def _certificate(points: Sequence[Point]) -> list[Fact]:
    """What the steps show about training on exactly the sampled tokens (spec §6)."""
    found = consistency(points)
    if found is None:
        return []
    drift = formats.MISSING if found.drift_tokens is None else formats.number(found.drift_tokens)
    facts = [
        Fact(label="Steps compared", value=str(found.steps)),
        Fact(label="Drifted tokens in the loss", value=f"{drift} ✓" if found.drift_tokens == 0 else drift),
        Fact(label="Largest mean gap", value=formats.number(found.largest_gap)),
    ]
    if found.replayed is not None:
        facts.append(Fact(label="Routes replayed, at least", value=formats.percent(found.replayed)))
    if found.route_flips is not None:
        facts.append(Fact(label="Routes that would differ, at most", value=formats.percent(found.route_flips)))
    return facts


def _certificates(points: Sequence[Point]) -> CurveTable:
    """The certificate of each step."""
    return CurveTable(
        caption="Consistency certificate of each step",
        columns=("phase", "step", *(label for label, _ in CERTIFIED)),
        rows=[(c.phase.value, str(c.step), *map(formats.number, c.values)) for c in certificates(points)],
    )


def _table(key: str, points: Sequence[Point]) -> CurveTable:
    chart = CHARTS[key]
    curves = shown(chart, points)
    values = {(p.phase, p.step, p.name): p.value for p in points}
    return CurveTable(
        caption=chart.title,
        columns=("phase", "step", *(c.label for c in curves)),
        rows=[
            (phase.value, str(step), *(formats.number(values.get((phase, step, c.metric))) for c in curves))
            for phase, step in steps_of(points)
            if any(values.get((phase, step, c.metric)) is not None for c in curves)
        ],
    )


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return formats.MISSING if value is None else str(value).lower()
    return formats.number(value) if isinstance(value, int | float) else str(value)


def _empty(row: m.Stage) -> str:
    if row.kind is m.StageKind.BASE:
        return "Base takes the model in and measures it: it makes no optimiser step, so it has no curves."
    if row.kind is m.StageKind.RSR:
        return "No step yet. A self-rewrite stage explores, rewrites, reviews and replays before it distils."
    return "No step yet. A policy-refine stage profiles its families first; then come four calibration updates, then joint ones."
