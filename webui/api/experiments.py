"""Experiments: arms × seeds, and what was shown."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Request

from orchestrator.experiments.export import to_document
from orchestrator.experiments.progress import progress_of
from webui.access import Action, needs
from webui.api.listing import Found, Reader, Shape, by_number, listing, noun_router, number
from webui.pages.experiments import report_for
from webui.pages.parts import RowId, store_of

router = noun_router("experiments")
twins = APIRouter()


class Experiment(Shape):
    id: int
    name: str
    state: str
    done: int
    of: int
    arms: int
    seeds: list[int]
    created_by: str
    created_at: datetime


class Report(Shape):
    """As `rsi experiment report --format json` writes it."""

    name: str
    question: str
    state: str
    arms: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    effects: list[dict[str, Any]]
    ev: list[dict[str, Any]]
    summary: list[str]
    notes: list[str]
    doubts: list[str]


def experiments(request: Request) -> Reader:
    def read(cursor: str | None, limit: int) -> Found:
        store = store_of(request)
        found = by_number(store.experiments.list(before=number(cursor), limit=limit))
        rows = [
            Experiment(
                **{name: getattr(row, name) for name in ("id", "name", "created_by", "created_at")},
                **{name: getattr(progress, name) for name in ("state", "done", "of", "arms")},
                seeds=list(progress.seeds),
            )
            for row, progress in zip(found.items, progress_of(store, found.items), strict=True)
        ]
        return Found(items=rows, next=found.next)

    return read


listing(router, "/experiments", Experiment, experiments, says="Experiments, newest first", twins=twins)


@router.get("/experiments/{experiment_id:int}", response_model=Report, dependencies=[Depends(needs(Action.SEE))])
def get_experiment(request: Request, experiment_id: RowId) -> dict[str, Any]:
    return to_document(report_for(store_of(request), experiment_id))
