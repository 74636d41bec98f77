"""Evaluations, and comparisons of checkpoints on them (spec §8)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response

from orchestrator import models as m
from orchestrator.compare_tables import Convention
from stages.domain import Stratum
from stages.errors import StoreError
from webui.access import Action, needs
from webui.api.listing import Kind, Reader, Shape, by_number, export, listing, noun_router, number, table
from webui.pages.compare import TABLES, Names, asked, table_rows
from webui.pages.parts import QueryId, RowId, missing, store_of

router = noun_router("evaluations")
twins = APIRouter()
See = Depends(needs(Action.SEE))
Tables = Annotated[list[str] | None, Query(alias="table", max_length=20)]
EVERY = tuple(name for own in TABLES.values() for name in own)


class Evaluation(Shape):
    id: int
    cycle_id: int | None
    stage_id: int | None
    checkpoint_id: int | None
    checkpoint: str
    suite: str
    suite_digest: str
    suite_version: str
    k: int
    passed: int
    attempts: int
    verdicts: int
    turns: int
    tokens: int
    wall_s: float
    settings: dict[str, Any]
    reference_only: bool
    created_at: datetime


class TaskResult(Shape):
    task_id: str
    family: str
    stratum: Stratum
    passed: int
    attempts: int
    verdict_count: int
    verdicts: list[str]
    checks_passed: list[int]
    checks_total: int


class EvaluationDetail(Evaluation):
    tasks: list[TaskResult]


class Comparison(Shape):
    """The compare page's tables by name, each a list of rows."""

    suite: str
    suites: list[str]
    unmeasured: list[str]
    tables: dict[str, list[dict[str, Any]]]


def evaluations(request: Request, cycle: QueryId = None, checkpoint: QueryId = None, suite: str = "") -> Reader:
    return lambda cursor, limit: by_number(
        store_of(request).evaluations.list(
            cycle_id=cycle,
            checkpoint_ids=[checkpoint] if checkpoint else [],
            suite=suite or None,
            before=number(cursor),
            limit=limit,
        )
    )


listing(router, "/evaluations", Evaluation, evaluations, says="Evaluations, newest first")


@router.get("/evaluations/{evaluation_id:int}", response_model=EvaluationDetail, dependencies=[See])
def get_evaluation(request: Request, evaluation_id: RowId) -> EvaluationDetail:
    """With every task's attempts."""
    store = store_of(request)
    try:
        row = store.evaluations.get(evaluation_id)
    except StoreError:
        raise missing(f"evaluation {evaluation_id}") from None
    columns = {name: getattr(row, name) for name in Evaluation.model_fields}
    tasks: Sequence[m.EvaluationTask] = store.evaluations.tasks([evaluation_id])[evaluation_id]
    return EvaluationDetail(**columns, tasks=[TaskResult.model_validate(t) for t in tasks])


@router.get("/compare", response_model=Comparison, dependencies=[See])
def compare(
    request: Request,
    names: Names,
    suite: str = "",
    by: Convention = Convention.VERDICTS,
    wanted: Tables = None,
) -> Comparison:
    """`c`: numbers of checkpoints, the base first. `table`: some of its tables only."""
    if unknown := set(wanted or ()) - set(EVERY):
        raise HTTPException(422, f"There is no table {sorted(unknown)[0][:40]}; there are {', '.join(EVERY)}")
    report, suites = asked(request, names, suite, by)
    tables = {name: table_rows(store_of(request), report, name) for name in wanted or ("scores", "differences")}
    return Comparison(suite=report.suite, suites=list(suites), unmeasured=list(report.missing), tables=tables)


@twins.get("/compare/{name}.{kind}", include_in_schema=False, dependencies=[See])
def compare_file(
    request: Request,
    name: str,
    kind: Kind,
    names: Names,
    suite: str = "",
    by: Convention = Convention.VERDICTS,
) -> Response:
    """One of the compare page's tables, with all rows and every digit."""
    if name not in EVERY:
        raise HTTPException(404, f"There is no table {name[:40]}")
    report, _ = asked(request, names, suite, by)
    rows = table_rows(store_of(request), report, name)
    return export(f"compare-{name}", kind, table(rows), iter([rows]))
