"""Cycles: list, read, launch, pause, resume, cancel; their stages, metrics and log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from orchestrator import models as m
from orchestrator.costs import predict
from orchestrator.launch import NotStarted, cancel_cycle, launch_config, pause_cycle, resume_cycle
from stages.domain import Phase
from stages.errors import ConfigError
from webui.access import Action, needs, viewer_of
from webui.api.listing import (
    Body,
    Cursor,
    Found,
    Limit,
    Reader,
    Shape,
    Slice,
    also,
    by_number,
    listing,
    noun_router,
    number,
)
from webui.forms.launch import change
from webui.pages.cycles import GROUPS
from webui.pages.launch import base_model, checked, source_config
from webui.pages.parts import MAX_ID, RowId, missing, queries_of, store_of
from webui.problems import problem

router = noun_router("cycles")
twins = APIRouter()
See = Depends(needs(Action.SEE))
Control = Depends(needs(Action.CONTROL))


class Cycle(Shape):
    id: int
    name: str
    recipe: str
    state: m.CycleState
    desired_state: m.DesiredState
    seed: int
    base_checkpoint: str
    cloned_from_id: int | None
    config_digest: str
    code_version: str
    digest_claim_void: str = Field(description="why equal digests are not promised; empty: they are")
    error: str
    created_by: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class CycleDetail(Cycle):
    config: dict[str, Any]
    environment: dict[str, Any]
    estimate: dict[str, Any] | None = Field(description="predicted cost, as ranges")


class Stage(Shape):
    id: int
    cycle_id: int
    index: int
    name: str
    kind: m.StageKind
    round: int
    arm: str
    state: m.StageState
    phase: Phase | None
    progress_done: int
    progress_total: int | None
    progress_text: str
    attempt: int
    actor_parent_id: int | None
    critic_parent_id: int | None
    expected_s: float | None
    error: str
    started_at: datetime | None
    finished_at: datetime | None


class Value(Shape):
    stage_id: int
    stage: str
    arm: str
    phase: Phase
    step: int
    name: str
    value: float | None


class Line(Shape):
    id: int
    stage_id: int | None
    level: int
    logger: str
    text: str
    created_at: datetime


class Launch(Body):
    """A new cycle: from a recipe or a cycle, with changes."""

    recipe: str = Field(default="", max_length=200, description="a recipe's name; empty: the demo's")
    cloned_from: int | None = Field(default=None, ge=1, le=MAX_ID, description="the cycle whose configuration is taken")
    base: str | None = Field(
        default=None, max_length=500, description='"shipped", CYCLE/NAME, a checkpoint or a folder'
    )
    set: dict[str, Any] = Field(default={}, max_length=200, description='changes by path: {"rounds": 1, "seed": 7}')


class Launched(Shape):
    id: int
    state: m.CycleState


class Estimate(Shape):
    """What a launch would cost and run; nothing is stored."""

    estimate: dict[str, Any]
    config: dict[str, Any]


def cycles(request: Request, state: str = "", q: str = "") -> Reader:
    """`state`: live, waiting, done, failed or cancelled. `q`: a part of the name."""
    store = store_of(request)
    if state and state not in GROUPS:
        raise HTTPException(422, f"state cannot be {state[:40]!r}; it is one of {', '.join(GROUPS)}")
    return lambda cursor, limit: by_number(
        store.cycles.list(states=GROUPS.get(state, ()), text=q, before=number(cursor), limit=limit)
    )


listing(router, "/cycles", Cycle, cycles, says="Cycles, newest first", twins=twins)


@router.get("/cycles/{cycle_id:int}", response_model=CycleDetail, dependencies=[See])
def get_cycle(request: Request, cycle_id: RowId) -> m.Cycle:
    return _cycle(request, cycle_id)


@router.post(
    "/cycles",
    response_model=Launched,
    status_code=201,
    responses=also(503),
    dependencies=[Depends(needs(Action.LAUNCH))],
)
def launch_cycle(request: Request, body: Launch) -> Response | Launched:
    """Check, store and start a cycle. 422 names every field that cannot be used, and nothing is stored.

    503: it was stored, and no Prefect server took it; `where` names it, and it can be resumed.
    """
    draft = _draft(request, body)
    if draft.config is None:
        return _refused(draft.errors)
    store, settings = store_of(request), request.app.state.settings
    actor = viewer_of(request).login
    try:
        cycle_id = launch_config(store, draft.config, actor=actor, settings=settings, cloned_from=body.cloned_from)
    except NotStarted as error:
        return problem(503, str(error), f"/api/v1/cycles/{error.cycle_id}", "Start it with /resume once Prefect runs.")
    return Launched(id=cycle_id, state=store.cycles.get(cycle_id).state)


@router.post("/cycles/estimate", response_model=Estimate, dependencies=[Depends(needs(Action.LAUNCH))])
def estimate_cycle(request: Request, body: Launch) -> Response | Estimate:
    """The checks and the estimate of a launch, without its suites. Stores nothing."""
    draft = _draft(request, body, suites=False)
    if draft.config is None:
        return _refused(draft.errors)
    predicted = predict(store_of(request), draft.config, like=body.cloned_from)
    return Estimate(estimate=predicted.values(), config=draft.config.model_dump(mode="json", by_alias=True))


@router.post("/cycles/{cycle_id:int}/{verb}", response_model=Launched, responses=also(409, 503), dependencies=[Control])
def control_cycle(request: Request, cycle_id: RowId, verb: Literal["pause", "resume", "cancel"]) -> Response | Launched:
    """409 when its state does not allow it, 503 when it needs Prefect and none answers."""
    store, actor, settings = store_of(request), viewer_of(request).login, request.app.state.settings
    _cycle(request, cycle_id)
    try:
        if verb == "pause":
            state = pause_cycle(store, cycle_id, actor=actor)
        elif verb == "resume":
            state = resume_cycle(store, cycle_id, actor=actor, settings=settings)
        else:
            state = cancel_cycle(store, cycle_id, actor=actor, settings=settings)
    except ConfigError as error:
        return problem(409, str(error), request.url.path)
    return Launched(id=cycle_id, state=state)


@router.get("/cycles/{cycle_id:int}/stages", response_model=list[Stage], dependencies=[See])
def list_stages(request: Request, cycle_id: RowId) -> Sequence[m.Stage]:
    """In the order of the loop, every arm."""
    _cycle(request, cycle_id)
    return store_of(request).stages.of_cycle(cycle_id)


@router.get("/cycles/{cycle_id:int}/stages/{name}/metrics", response_model=list[Value], dependencies=[See])
def list_metrics(
    request: Request, cycle_id: RowId, name: str, metric: Annotated[list[str] | None, Query(max_length=100)] = None
) -> Sequence[object]:
    """Logged values of a stage in order. `metric`: only these names; a value that was not measured is null, never 0."""
    store = store_of(request)
    stage = store.stages.named(cycle_id, name) if queries_of(request).cycle(cycle_id) else None
    if stage is None or stage.id is None:
        raise missing(f"stage {name[:40]} in cycle {cycle_id}")
    return store.metrics.curve(metric or store.metrics.names(stage.id), stage_ids=[stage.id])


@router.get("/cycles/{cycle_id:int}/logs", response_model=Slice[Line], dependencies=[See])
def list_log(
    request: Request,
    cycle_id: RowId,
    cursor: Cursor = None,
    limit: Limit = 200,
    level: Annotated[int, Query(ge=0, le=50)] = 0,
    stage: str = "",
    q: str = "",
) -> Found:
    """The newest lines first. `level`: the lowest, as in Python's `logging`. `q`: a part of the text."""
    store = store_of(request)
    _cycle(request, cycle_id)
    chosen = store.stages.named(cycle_id, stage) if stage else None
    if stage and chosen is None:
        raise missing(f"stage {stage[:40]} in cycle {cycle_id}")
    before = number(cursor)
    lines = store.logs.read(
        cycle_id, stage_id=chosen.id if chosen else None, min_level=level, text=q, before=before, limit=limit + 1
    )[::-1]
    return Found(items=lines[:limit], next=str(lines[limit - 1].id) if len(lines) > limit else None)


def _cycle(request: Request, cycle_id: int) -> m.Cycle:
    if (row := queries_of(request).cycle(cycle_id)) is None:
        raise missing(f"cycle {cycle_id}")
    return row


def _draft(request: Request, body: Launch, *, suites: bool = True) -> Any:
    config, _ = source_config(request, body.cloned_from, body.recipe)
    model, wrong = base_model(request, config, body.base)
    draft = change(config, body.set, model, wrong)
    checked(request, draft, suites=suites)
    return draft


def _refused(errors: dict[str, str]) -> JSONResponse:
    fields = [
        (f"body.set.{name}" if name not in ("base", "set") else f"body.{name}", what) for name, what in errors.items()
    ]
    return problem(422, "This configuration cannot be launched", "body", "Correct these fields.", fields=fields)
