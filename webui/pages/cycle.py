"""`/cycles/{id}`: one cycle, live while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store import Store
from orchestrator.store.console_queries import CycleSummary
from orchestrator.store.usage import UsageQueries
from webui import formats, urls
from webui.access import Action, needs, viewer_of
from webui.charts.gantt import gantt
from webui.contexts import CycleContext, Fact, Node, StageRow
from webui.pages.costs import cost_rows, costs_from
from webui.pages.curves import ev_points, ev_table, success_points, success_table
from webui.pages.parts import (
    LIVE,
    RowId,
    best_scores,
    checkpoint_rows,
    column_flags,
    missing,
    queries_of,
    store_of,
    strip,
    suites_of,
)
from webui.pages.standing import standing, tabs
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
LOG_LINES = 30


@router.get("/cycles/{cycle_id:int}", response_class=HTMLResponse)
def cycle(request: Request, cycle_id: RowId) -> HTMLResponse:
    return cycle_page(request, cycle_id)


def cycle_page(request: Request, cycle_id: int, *, refused: str = "", status: int = 200) -> HTMLResponse:
    """`refused`: why a wish about it was not followed. Raises 404 when there is no such cycle."""
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    row = queries.cycle(cycle_id)
    if row is None:
        raise missing(f"cycle {cycle_id}")
    stages = store.stages.of_cycle(cycle_id)
    by_id = {s.id: s for s in stages if s.id is not None}
    phases = store.stages.phases_of_cycle(cycle_id)
    checkpoints = store.checkpoints.of_cycle(cycle_id)
    scores = best_scores(queries.scores(cycle_ids=[cycle_id]))
    suites = suites_of({c.id: scores[c.id] for c in checkpoints if c.id in scores})
    nodes = strip(CycleSummary(cycle=row, stages=stages), checkpoints, scores, suites[0] if suites else "")
    live = row.state in LIVE
    ev, success = ev_points(store, cycle_id, by_id), success_points(store, cycle_id, by_id)
    rows = checkpoint_rows(store, checkpoints, scores, suites)
    lines = store.logs.read(cycle_id, limit=LOG_LINES)
    used = UsageQueries(store).of_cycle(cycle_id)
    wall = formats.between(row.started_at, None if live else row.finished_at)
    context = CycleContext(
        title=f"Cycle {cycle_id} · {row.name}",
        section="cycles",
        events_after=after,
        cycle=row,
        facts=_facts(row, live),
        nodes=nodes,
        stages=[_stage_row(store, n, by_id[n.stage_id or 0], phases) for n in nodes],
        gantt=gantt(stages, phases, now(), live=live),
        suites=suites,
        suite_flags=column_flags(rows, suites),
        checkpoints=rows,
        selections=[(by_id[s.stage_id], s) for s in store.selections.of_cycle(cycle_id) if s.stage_id in by_id],
        ev_table=ev_table(ev),
        success_table=success_table(success),
        log=lines,
        newest_line=(lines[-1].id or 0) if lines else 0,
        first_error=store.logs.first_error(cycle_id),
        live=live,
        tabs=tabs(cycle_id, stages, "cycle"),
        standing=standing(store, row, refused, blind=viewer_of(request).blind),
        costs=cost_rows(row.estimate or {}, used, wall),
        costs_from=costs_from(row.estimate or {}),
    )
    return page(request, context, status=status)


def _facts(row: m.Cycle, live: bool) -> list[Fact]:
    took = formats.between(row.started_at, None if live else row.finished_at)
    facts = [
        Fact(label="Recipe", value=row.recipe),
        Fact(label="Seed", value=str(row.seed)),
        Fact(label="Base", value=row.base_checkpoint, mono=True),
        Fact(label="Started", value=formats.when(row.started_at)),
        Fact(label="Running for" if live else "Took", value=formats.duration(took)),
        Fact(label="Launched by", value=row.created_by or "—"),
        Fact(label="Config", value=formats.digest(row.config_digest), href=urls.cycle_config(row.id), mono=True),
        Fact(label="Code", value=row.code_version or "—", mono=True),
    ]
    if row.cloned_from_id:
        facts.append(
            Fact(label="Cloned from", value=f"cycle {row.cloned_from_id}", href=urls.cycle(row.cloned_from_id))
        )
    if row.digest_claim_void:
        facts.append(Fact(label="Digest claim void", value=row.digest_claim_void))
    return facts


def _stage_row(store: Store, node: Node, stage: m.Stage, phases: Mapping[int, Sequence[m.StagePhase]]) -> StageRow:
    mine = phases.get(stage.id or 0, ())
    return StageRow(
        node=node,
        stage=stage,
        phases=mine,
        seconds=formats.between(stage.started_at, stage.finished_at),
        expected_s=stage.expected_s,
        facts=[Fact(label=f"{p.phase.value} {k}", value=_value(v)) for p in mine for k, v in p.facts.items()],
    )


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return formats.MISSING if value is None else str(value).lower()
    return formats.number(value) if isinstance(value, int | float) else str(value)
