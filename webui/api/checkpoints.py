"""Checkpoints with both parents, and the lineage graph."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from orchestrator import models as m
from orchestrator.lineage import Proof, Side, ancestors
from webui.access import Action, needs
from webui.api.listing import Found, Reader, Shape, by_number, listing, noun_router, number
from webui.pages.lineage import MOST
from webui.pages.parts import QueryId, RowId, best_scores, checkpoint_rows, missing, queries_of, store_of, suites_of

router = noun_router("checkpoints")
twins = APIRouter()


class Score(Shape):
    """k/n on one suite; the interval is 95 %, clustered by task."""

    evaluation_id: int
    suite: str
    suite_digest: str
    k: int = Field(description="attempts per task")
    n_tasks: int
    passed: int
    verdicts: int
    attempts: int
    rate: float | None
    low: float | None
    high: float | None


class Checkpoint(Shape):
    id: int
    cycle_id: int | None = Field(description="null: imported")
    stage_id: int | None
    arm: str
    name: str
    step: int | None
    actor_digest: str
    critic_digest: str | None
    actor_parent_id: int | None
    critic_parent_id: int | None
    retained: bool
    parent_kept: bool
    critic_proof: Proof = Field(description="what the digests say about the inherited critic")
    scores: list[Score] = Field(description="its largest evaluation on each suite")
    metrics: dict[str, Any]
    created_at: datetime


class Edge(Shape):
    parent_id: int
    child_id: int
    side: Side
    unchanged: bool = Field(description="equal digests before and after")


class Graph(Shape):
    checkpoints: list[Checkpoint]
    edges: list[Edge]


def checkpoints(request: Request, cycle: QueryId = None, candidates: bool = False) -> Reader:
    """`candidates`: also those of single steps."""

    def read(cursor: str | None, limit: int) -> Found:
        found = by_number(
            queries_of(request).checkpoint_page(
                cycle_id=cycle, candidates=candidates, before=number(cursor), limit=limit
            )
        )
        return Found(items=_shapes(request, found.items), next=found.next)

    return read


listing(router, "/checkpoints", Checkpoint, checkpoints, says="Checkpoints, newest first", twins=twins)


@router.get("/checkpoints/{checkpoint_id:int}", response_model=Checkpoint, dependencies=[Depends(needs(Action.SEE))])
def get_checkpoint(request: Request, checkpoint_id: RowId) -> Checkpoint:
    if (row := queries_of(request).checkpoint(checkpoint_id)) is None:
        raise missing(f"checkpoint {checkpoint_id}")
    return _shapes(request, [row])[0]


@router.get("/lineage", response_model=Graph, dependencies=[Depends(needs(Action.SEE))])
def get_lineage(request: Request, cycle: QueryId = None, checkpoint: QueryId = None) -> Graph:
    """The newest kept checkpoints, one cycle's, or one checkpoint's, with all their ancestors."""
    store, queries = store_of(request), queries_of(request)
    if checkpoint is not None:
        if queries.checkpoint(checkpoint) is None:
            raise missing(f"checkpoint {checkpoint}")
        graph = ancestors(store, [checkpoint])
    else:
        if cycle is not None and queries.cycle(cycle) is None:
            raise missing(f"cycle {cycle}")
        found = queries.checkpoint_page(cycle_id=cycle, candidates=False, limit=MOST)
        graph = ancestors(store, [c.id for c in found.items if c.id is not None])
    return Graph(
        checkpoints=_shapes(request, graph.checkpoints), edges=[Edge.model_validate(edge) for edge in graph.edges]
    )


def _shapes(request: Request, rows: Any) -> list[Checkpoint]:
    store, ids = store_of(request), [c.id for c in rows if c.id is not None]
    scores = best_scores(queries_of(request).scores(checkpoint_ids=ids))
    shown = checkpoint_rows(store, rows, scores, suites_of(scores))
    return [
        Checkpoint(
            **_columns(x.checkpoint),
            critic_proof=x.proof.proof,
            scores=[Score.model_validate(s) for s in x.scores if s is not None],
        )
        for x in shown
    ]


def _columns(row: m.Checkpoint) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Checkpoint.model_fields.keys() - {"critic_proof", "scores"}}
