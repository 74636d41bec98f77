"""`/cycles/{id}/analysis`: explained variance by turn position and family, staleness, and what oversampling has shifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse

from orchestrator import models as m
from orchestrator.analysis import EVCurve, EVPoint, alarm_text, ev_curves, oversampling, rpr_setting
from orchestrator.store import Store
from stages.domain import Phase
from stages.errors import EvaluationError
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.analysis import ev_grid
from webui.contexts import CurveTable
from webui.contexts.analysis import CycleAnalysisContext, StageAnalysis
from webui.pages.parts import RowId, missing, queries_of, store_of
from webui.pages.standing import tabs
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
DROPPED = 40  # ids shown


@router.get("/cycles/{cycle_id:int}/analysis", response_class=HTMLResponse)
def analysis(request: Request, cycle_id: RowId) -> HTMLResponse:
    store = store_of(request)
    cycle = queries_of(request).cycle(cycle_id)
    if cycle is None:
        raise missing(f"cycle {cycle_id}")
    curves = {c.stage_id: c for c in ev_curves(store, cycle_id=cycle_id)}
    stages = store.stages.of_cycle(cycle_id)
    parts = [_stage(store, cycle, s, curves.get(s.id or 0)) for s in stages if s.kind is m.StageKind.RPR]
    context = CycleAnalysisContext(
        title=f"Analysis of cycle {cycle_id}",
        section="cycles",
        cycle=cycle,
        tabs=tabs(cycle_id, stages, "analysis"),
        stages=[p for p in parts if p is not None],
        charts=[
            (f"{c.stage}, EV by turn position", urls.cycle_analysis(cycle_id, f"{c.stage_id}.json"))
            for c in curves.values()
            if c.by_turn
        ],
    )
    return page(request, context)


@router.get("/cycles/{cycle_id:int}/analysis/{stage_id:int}.json", include_in_schema=False)
def chart(request: Request, cycle_id: RowId, stage_id: RowId) -> JSONResponse:
    found = ev_curves(store_of(request), cycle_id=cycle_id)
    curve = next((c for c in found if c.stage_id == stage_id), None)
    if curve is None:
        raise missing(f"EV curve of stage {stage_id} in cycle {cycle_id}")
    steps = _steps(curve.by_turn)
    figure = ev_grid(
        [f"{phase.value} {step}" for phase, step in steps],
        [str(t) for t in curve.by_turn],
        [[_at(own).get(s) for s in steps] for own in curve.by_turn.values()],
    )
    return JSONResponse(figure, headers={"Cache-Control": "no-cache"})


def _stage(store: Store, cycle: m.Cycle, stage: m.Stage, curve: EVCurve | None) -> StageAnalysis | None:
    table, note, dropped = _oversampling(store, cycle, stage)
    tables = []
    if curve is not None:
        tables = [
            _table("EV by turn position, 0 first; the last one holds all later turns", "turn", curve.by_turn),
            _table("EV by family", "family", curve.by_family),
        ]
    tables = [t for t in tables if t.rows]
    if not tables and table is None and not (curve and curve.alarm):
        return None
    return StageAnalysis(
        stage=stage,
        tables=tables,
        alarm=alarm_text(curve.alarm) if curve and curve.alarm else "",
        stale=list(curve.stale_families) if curve else [],
        oversampling=table,
        oversampling_note=note,
        dropped=dropped[:DROPPED],
        dropped_count=len(dropped),
    )


Key = tuple[Phase, int]


def _at(points: Sequence[EVPoint]) -> dict[Key, float | None]:
    return {(p.phase, p.step): p.value for p in points}


def _steps(groups: Mapping[Any, Sequence[EVPoint]]) -> list[Key]:
    """Every batch of some groups, in the order in which it ran."""
    seen: dict[Key, None] = {}
    for own in groups.values():
        seen |= dict.fromkeys(_at(own))
    order = (Phase.WARMUP, Phase.CALIBRATE, Phase.JOINT)
    return sorted(seen, key=lambda k: (order.index(k[0]) if k[0] in order else len(order), k[1]))


def _table(caption: str, name: str, groups: Mapping[Any, Sequence[EVPoint]]) -> CurveTable:
    """One row per group: its EV in warm-up, calibration and joint updates (means of the defined), and the last one."""
    rows = []
    for group, points in groups.items():
        means = []
        for phase in (Phase.WARMUP, Phase.CALIBRATE, Phase.JOINT):
            own = [p.value for p in points if p.phase is phase and p.value is not None]
            means.append(formats.signed(sum(own) / len(own) if own else None, 3))
        last = next((p.value for p in reversed(points) if p.value is not None), None)
        rows.append((str(group), str(len(points)), *means, formats.signed(last, 3)))
    columns = (name, "batches", "mean, warm-up", "mean, calibration", "mean, joint", "last")
    return CurveTable(caption=caption, columns=columns, rows=rows)


def _oversampling(store: Store, cycle: m.Cycle, stage: m.Stage) -> tuple[CurveTable | None, str, Sequence[str]]:
    batch = rpr_setting(cycle.config, stage, "global_batch_size")
    if batch is None:
        return None, "", ()
    try:
        report = oversampling(store, stage.id or 0, batch=batch)
    except EvaluationError:
        return None, "", ()
    note = (
        f"{report.kept} of {report.started} attempts of {report.steps} joint steps were kept (batch {batch}); "
        f"{report.masked} had no verdict, {len(report.dropped)} came too late. The surplus of {report.completed} steps was "
        "completed off the training path"
        + (", so the shift is known there." if report.completed else ": what cutting it shifts is not known yet.")
    )
    rows = [
        (
            s.name,
            "",
            formats.number(s.all_mean),
            formats.signed(s.shift, 4),
            f"[{formats.signed(s.interval.low, 4)}, {formats.signed(s.interval.high, 4)}]"
            if s.interval
            else formats.MISSING,
        )
        for s in report.shifts
    ]
    columns = ("quantity", "", "mean of all", "kept − all", "95 %, over steps")
    return CurveTable(caption="What keeping the first has shifted", columns=columns, rows=rows), note, report.dropped
