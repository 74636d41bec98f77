"""Reward audits: stored re-scorings, and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from orchestrator import audits as made
from orchestrator import models as m
from orchestrator.audit_jobs import QueueFull
from orchestrator.store.analysis_queries import AnalysisQueries
from webui.access import Action, Viewer, needs
from webui.api.listing import Body, Kind, Reader, Shape, by_number, export, listing, noun_router, number, table
from webui.pages.audit_new import begin, job_of, read, start_again
from webui.pages.audits import audit_row
from webui.pages.parts import QueryId, RowId, missing, store_of
from webui.problems import problem

router = noun_router("audits")
twins = APIRouter()
See = Depends(needs(Action.SEE))
Word = Annotated[str, Field(max_length=500)]


class Audit(Shape):
    id: int
    name: str
    set_digest: str
    created_by: str
    created_at: datetime
    selection: dict[str, Any]
    labels: list[str]
    verdicts: int
    masked: int = Field(description="attempts without a verdict, left out")


class AuditDetail(Shape):
    id: int
    name: str
    cycle_id: int | None
    stage_id: int | None
    set_digest: str
    selection: dict[str, Any]
    formulas: list[dict[str, Any]]
    result: dict[str, Any]
    created_by: str
    created_at: datetime


class NewAudit(Body):
    """The fields of the form; an empty one does not narrow the set."""

    name: Word = ""
    cycle: Word = Field(default="", description="its number")
    stage: Word = ""
    phase: Word = ""
    checkpoint: Word = ""
    suite: Word = ""
    family: Word = ""
    first: Word = Field(default="fdr", description="fdr, spr, count or binary")
    second: Word = "spr"
    scales: Word = Field(default="fit", description="fit, frozen (with `frozen`: CYCLE/STAGE) or given (with `given`)")
    frozen: Word = ""
    given: Word = ""
    recalibrate: bool = False
    net_of_nop: bool = False


class Started(Shape):
    """`audit`: it is done. `job`: the set is large; /audits/jobs/{job} says when it is."""

    audit: int | None = None
    job: int | None = None


class Job(Shape):
    id: int
    name: str
    attempts: int = Field(description="at least so many")
    state: m.AuditJobState
    audit_id: int | None
    starts: int = Field(description="processes that have taken it up; more than one: those before were gone")
    error: str
    created_by: str
    created_at: datetime


def audits(request: Request, cycle: QueryId = None) -> Reader:
    return lambda cursor, limit: by_number(
        AnalysisQueries(store_of(request)).audit_page(cycle_id=cycle, before=number(cursor), limit=limit)
    )


listing(router, "/audits", Audit, audits, says="Reward audits, newest first", twins=twins)


@router.get("/audits/{audit_id:int}", response_model=AuditDetail, dependencies=[See])
def get_audit(request: Request, audit_id: RowId) -> Any:
    return audit_row(store_of(request), audit_id)


@router.post("/audits", response_model=Started, status_code=201)
def run_audit(
    request: Request, body: NewAudit, viewer: Annotated[Viewer, Depends(needs(Action.AUDIT))]
) -> Response | Started:
    """Re-score a fixed set. Small sets at once, large ones as a job; 429 when too many jobs wait."""
    values = {k: v if isinstance(v, str) else ("1" if v else "") for k, v in body.model_dump().items()}
    spec, errors = read(store_of(request), {k: v.strip() for k, v in values.items()})
    if spec is None:
        return _refused(list(errors.items()))
    try:
        audit, job, wrong = begin(request, viewer, spec)
    except QueueFull as error:
        return problem(429, str(error), request.url.path, headers={"Retry-After": "30"})
    return _refused([wrong]) if wrong else Started(audit=audit, job=job)


@router.get("/audits/jobs", response_model=list[Job], dependencies=[See])
def get_audit_jobs(request: Request) -> Any:
    """The newest jobs that wait, run or have failed."""
    return store_of(request).audit_jobs.not_done()


@router.get("/audits/jobs/{number:int}", response_model=Job, dependencies=[See])
def get_audit_job(request: Request, number: RowId) -> Any:
    return job_of(request, number)


@router.post("/audits/jobs/{number:int}/again", response_model=Job)
def restart_audit_job(request: Request, number: RowId, viewer: Annotated[Viewer, Depends(needs(Action.AUDIT))]) -> Any:
    """A failed job waits once more; another one stays as it is."""
    return start_again(request, viewer, number)


@twins.get("/audits/{audit_id:int}/{name}.{kind}", include_in_schema=False, dependencies=[See])
def audit_file(request: Request, audit_id: RowId, name: str, kind: Kind) -> Response:
    """`figures`: one row per formula and family. `failures`: every listed failure, not only those on the page."""
    store = store_of(request)
    row = audit_row(store, audit_id)
    rows: Sequence[dict[str, Any]]
    if name == "figures":
        rows = row.result["rows"]
    elif name == "failures":
        rows = made.failures(store, row)
    else:
        raise missing(f"table {name[:40]}")
    return export(f"audit-{audit_id}-{name}", kind, table(rows), iter([rows]))


def _refused(errors: Sequence[tuple[str, str]]) -> JSONResponse:
    fields = [(f"body.{name}", what) for name, what in errors]
    return problem(422, "This audit cannot be made", "body", "Correct these fields.", fields=fields)
