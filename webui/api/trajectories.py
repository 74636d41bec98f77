"""Trajectories: the list, one attempt, its turns and their tokens; attempts that deserve a second look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from orchestrator import models as m
from orchestrator.store import TrajectoryFilter
from orchestrator.store.task_queries import TaskQueries
from orchestrator.token_view import turn_tokens
from stages.domain import CheckRole, CheckStatus, EndReason, Phase, Stratum, Verdict
from stages.errors import StoreError
from webui.access import Action, needs
from webui.api.listing import Cursor, Found, Limit, Reader, Shape, Slice, by_number, listing, noun_router, number
from webui.pages.parts import MAX_ID, QueryId, missing, queries_of, store_of
from webui.pages.trajectories import trajectory_filter

router = noun_router("trajectories")
twins = APIRouter()
See = Depends(needs(Action.SEE))


class Trajectory(Shape):
    id: str
    cycle_id: int | None
    stage_id: int | None
    phase: Phase | None
    step: int
    checkpoint_id: int | None
    suite: str
    task_id: str
    family: str
    stratum: Stratum
    attempt: int
    seed: int
    verdict: Verdict
    end_reason: EndReason
    strict: bool = Field(description="S")
    progress: int = Field(description="P, passed scenario checks")
    n_checks: int
    only_gate_failed: bool
    n_turns: int
    n_segments: int
    n_tokens: int
    n_sampled: int = Field(description="tokens inside the loss mask")
    reward: float | None
    runbook_id: str | None
    flags: list[str]
    drift_tokens: int
    weight_version: str
    duration_s: float
    created_at: datetime


class Check(Shape):
    check_id: str
    role: CheckRole
    status: CheckStatus
    message: str


class Segment(Shape):
    index: int
    kind: str
    n_tokens: int
    n_sampled: int
    weight_versions: list[str]


class TrajectoryDetail(Trajectory):
    instruction: str
    verifier_log: str
    boundaries: dict[str, int]
    checks: list[Check]
    segments: list[Segment]


class Turn(Shape):
    index: int
    action: str
    observation: str
    exit_code: int | None
    timed_out: bool
    segment: int
    start: int
    end: int
    duration_s: float


class SampledToken(Shape):
    position: int
    id: int
    text: str | None
    log_prob: float | None
    learner_log_prob: float | None
    gap: float | None
    value: float | None
    advantage: float | None
    trained: bool


class Tokens(Shape):
    tokens: list[SampledToken]
    segment: int
    new_segment: bool
    arrays: bool = Field(description="false: no token arrays are stored")
    scored: bool
    learner: bool


def trajectories(request: Request, where: Annotated[TrajectoryFilter, Depends(trajectory_filter)]) -> Reader:
    store = store_of(request)
    count = store.trajectories.count(where)
    return lambda cursor, limit: by_number(
        store.trajectories.list(where, before=number(cursor), limit=limit, count=count)
    )


def suspicious(request: Request, cycle: QueryId = None) -> Reader:
    return lambda cursor, limit: by_number(
        TaskQueries(store_of(request)).suspicious(cycle_id=cycle, before=number(cursor), limit=limit)
    )


listing(router, "/trajectories", Trajectory, trajectories, says="Attempts, newest first", twins=twins)
listing(router, "/suspicious", Trajectory, suspicious, says="Attempts that passed although flagged", twins=twins)


@router.get("/trajectories/{trajectory_id}", response_model=TrajectoryDetail, dependencies=[See])
def get_trajectory(request: Request, trajectory_id: str) -> TrajectoryDetail:
    """With checks and segments; its turns have an address of their own."""
    row = _row(request, trajectory_id)
    detail = store_of(request).trajectories.detail(trajectory_id, turns=0)
    own = {name: getattr(row, name) for name in (*Trajectory.model_fields, "verifier_log", "boundaries")}
    return TrajectoryDetail(
        **own,
        instruction=queries_of(request).instruction(row.task_id, row.suite),
        checks=[Check.model_validate(c) for c in detail.checks],
        segments=[Segment.model_validate(s) for s in detail.segments],
    )


@router.get("/trajectories/{trajectory_id}/turns", response_model=Slice[Turn], dependencies=[See])
def list_turns(request: Request, trajectory_id: str, cursor: Cursor = None, limit: Limit = 100) -> Found:
    """In order. The cursor is the index of the next turn."""
    _row(request, trajectory_id)
    start = min(number(cursor) or 0, MAX_ID)
    turns: Sequence[m.Turn] = (
        store_of(request).trajectories.detail(trajectory_id, first_turn=start, turns=limit + 1).turns
    )
    return Found(items=turns[:limit], next=str(turns[limit].index) if len(turns) > limit else None)


@router.get("/trajectories/{trajectory_id}/tokens", response_model=Tokens, dependencies=[See])
def list_tokens(request: Request, trajectory_id: str, turn: Annotated[int, Query(ge=0, le=MAX_ID)] = 0) -> Tokens:
    """The sampled tokens of one turn; missing figures are null."""
    _row(request, trajectory_id)
    try:
        found = turn_tokens(store_of(request), trajectory_id, turn)
    except StoreError as error:
        raise missing(f"turn {turn} of it: {error}") from error
    own = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "tokens"}
    return Tokens(**own, tokens=[SampledToken.model_validate(t) for t in found.tokens])


def _row(request: Request, trajectory_id: str) -> m.Trajectory:
    if (row := queries_of(request).trajectory(trajectory_id)) is None:
        raise missing(f"trajectory {trajectory_id[:60]}")
    return row
