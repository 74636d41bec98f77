"""`/audits/new`: choose a fixed set and the rewards to score it under. Small sets at once, large ones in a process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import models as m
from orchestrator.audit_jobs import AT_ONCE, UNFINISHED, AuditRunner, QueueFull, order
from orchestrator.audits import (
    FIT,
    GIVEN,
    NET_OF_NOP,
    RAW,
    AuditSpec,
    parse_formulas,
    parse_scales,
    run_audit,
    stage_named,
)
from orchestrator.comparisons import checkpoint_named
from orchestrator.store import Store, TrajectoryFilter
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.domain import FamilyScale, Phase
from stages.errors import ConfigError, RewardError, StoreError
from webui import urls
from webui.access import Action, Viewer, needs, viewer_of
from webui.contexts.analysis import AuditFormContext, AuditJobContext
from webui.pages.parts import MAX_ID, RowId, missing, store_of
from webui.rendering import page

router = APIRouter()
PHASES = (Phase.EXPLORE, Phase.REPLAY, Phase.PROFILE, Phase.WARMUP, Phase.CALIBRATE, Phase.JOINT, Phase.EVALUATE)
REWARDS = (
    ("fdr", "FDR: P / D_f"),
    ("spr", "SPR: S + P / (P + D′_f)"),
    ("count", "count: passed / 20"),
    ("binary", "binary: S"),
)
DEFAULTS = {"first": "fdr", "second": "spr", "scales": FIT}
FIELDS = (
    *("name", "cycle", "stage", "phase", "checkpoint", "suite", "family", "first", "second"),
    *("scales", "frozen", "given", "recalibrate", "net_of_nop"),
)
See = Annotated[Viewer, Depends(needs(Action.SEE))]
Auditor = Annotated[Viewer, Depends(needs(Action.AUDIT))]


@router.get("/audits/new", response_class=HTMLResponse)
def form(request: Request, viewer: See) -> HTMLResponse:
    """Any field may be given in the address."""
    values = DEFAULTS | {k: v[:500] for k, v in request.query_params.items() if k in FIELDS}
    return _form(request, values, {})


@router.post("/audits", response_class=HTMLResponse)
async def create(request: Request, viewer: Auditor) -> Response:
    sent = await request.form()
    values = {k: v.strip() for k in FIELDS if isinstance(v := sent.get(k, ""), str)}
    return await run_in_threadpool(_create, request, viewer, values)


def _create(request: Request, viewer: Viewer, values: Mapping[str, str]) -> Response:
    store = store_of(request)
    spec, errors = read(store, values)
    if errors or spec is None:
        return _form(request, values, errors, status=422)
    try:
        audit, job, wrong = begin(request, viewer, spec)
    except QueueFull as error:
        return _form(request, values, {}, refused=str(error), status=429)
    if wrong:
        return _form(request, values, dict([wrong]), status=422)
    return RedirectResponse(urls.audit(audit) if job is None else urls.audit_job(job), status_code=303)


def begin(request: Request, viewer: Viewer, spec: AuditSpec) -> tuple[int | None, int | None, tuple[str, str] | None]:
    """Make an audit: its number, or that of a job where the set is large, or (field, what is wrong). Raises QueueFull."""
    store = store_of(request)
    attempts = store.trajectories.count(spec.where, cap=AT_ONCE)
    note = {"name": spec.name, "formulas": [k.value for k in spec.formulas], "attempts": attempts}
    if attempts > AT_ONCE:
        with store.transaction():
            number = order(store, spec, attempts=attempts, created_by=viewer.login)
            store.audit_trail.add(viewer.login, "audit.run", object_kind="audit job", object_id=number, payload=note)
        runner_of(request).wake()
        return None, number, None
    try:
        with store.transaction():
            row = run_audit(store, spec, created_by=viewer.login)
            store.audit_trail.add(viewer.login, "audit.run", object_kind="audit", object_id=row.id or 0, payload=note)
    except RewardError as error:
        return None, None, ("set", str(error))
    except ConfigError as error:
        return None, None, ("scales", str(error))
    return row.id, None, None


@router.get("/audits/jobs/{number:int}", response_class=HTMLResponse)
def job(request: Request, number: RowId, viewer: See) -> Response:
    """Reloads itself every two seconds, without script, until there is an audit to go to."""
    found = job_of(request, number)
    if found.audit_id is not None:
        return RedirectResponse(urls.audit(found.audit_id), status_code=303)
    context = AuditJobContext(
        title="Audit in the making",
        section="audits",
        job=found,
        state=words(request, found),
        seconds=(datetime.now(UTC) - found.created_at).total_seconds(),
        allowed=viewer.may(Action.AUDIT),
    )
    answer = page(request, context)
    if found.state in UNFINISHED:
        answer.headers["Refresh"] = "2"
    return answer


@router.post("/audits/jobs/{number:int}/again")
def again(request: Request, number: RowId, viewer: Auditor) -> Response:
    start_again(request, viewer, number)
    return RedirectResponse(urls.audit_job(number), status_code=303)


def job_of(request: Request, number: int) -> m.AuditJob:
    """A job; one that still waits is looked after. Raises 404."""
    if (found := store_of(request).audit_jobs.get(number)) is None:
        raise missing(f"audit job {number}")
    if found.state in UNFINISHED:
        runner_of(request).wake()
    return found


def start_again(request: Request, viewer: Viewer, number: int) -> m.AuditJob:
    """A failed job waits once more; one that has not failed stays as it is. Raises 404."""
    store = store_of(request)
    with store.transaction():
        if store.audit_jobs.again(number):
            store.audit_trail.add(viewer.login, "audit.again", object_kind="audit job", object_id=number)
    return job_of(request, number)


def words(request: Request, job: m.AuditJob) -> str:
    """What a job's state means now."""
    match job.state:
        case m.AuditJobState.WAITING:
            told = "waits for the audits before it"
        case m.AuditJobState.RUNNING:
            told = "reads and re-scores the attempts"
        case _:
            return job.error or job.state.value
    told += f", begun {job.starts} times: the process before was gone" if job.starts > 1 else ""
    return ". ".join(filter(None, (told, runner_of(request).problem)))


def runner_of(request: Request) -> AuditRunner:
    runner: AuditRunner = request.app.state.audit_runner
    return runner


def read(store: Store, values: Mapping[str, str]) -> tuple[AuditSpec | None, dict[str, str]]:
    """The form as a specification, or what is wrong with each field."""
    errors: dict[str, str] = {}

    def value(name: str) -> str:
        return values.get(name, "")

    cycle = stage = checkpoint = None
    try:
        if value("cycle"):
            if not (value("cycle").isdecimal() and len(value("cycle")) < 11 and 0 < int(value("cycle")) <= MAX_ID):
                raise ConfigError("give the cycle's number")
            cycle = store.cycles.get(int(value("cycle"))).id
    except (ConfigError, StoreError) as error:
        errors["cycle"] = str(error)
    try:
        if value("stage") and cycle is not None:
            stage = stage_named(store, cycle, value("stage")).id
        elif value("stage") and "cycle" not in errors:
            raise ConfigError("a stage needs its cycle: every cycle has stages of these names")
    except ConfigError as error:
        errors["stage"] = str(error)
    try:
        checkpoint = checkpoint_named(store, value("checkpoint")).id if value("checkpoint") else None
    except StoreError as error:
        errors["checkpoint"] = str(error)
    if value("phase") and value("phase") not in set(Phase):
        errors["phase"] = f"there is no phase {value('phase')[:40]!r}"
    elif value("phase") and not any(value(n) for n in ("cycle", "checkpoint", "suite", "family")):
        errors["phase"] = "a phase narrows a cycle, a checkpoint, a suite or a family; give one of them"
    kinds = [value("first") or "fdr", *([value("second")] if value("second") else [])]
    for name, kind in zip(("first", "second"), kinds, strict=False):
        if kind not in dict(REWARDS):
            errors[name] = f"there is no reward {kind[:40]!r}"
    if not errors and len(set(kinds)) < len(kinds):
        errors["second"] = "choose another reward than the first"
    scales, given = _scales(store, values, errors)
    if errors:
        return None, errors
    chosen = [(n, value(n)) for n in ("cycle", "stage", "phase", "checkpoint", "suite", "family") if value(n)]
    return AuditSpec(
        where=TrajectoryFilter(
            cycle_id=cycle,
            stage_id=stage,
            phase=Phase(value("phase")) if value("phase") else None,
            checkpoint_id=checkpoint,
            suite=value("suite") or None,
            family=value("family") or None,
        ),
        formulas=parse_formulas(",".join(kinds)),
        scales=scales,
        given=given,
        recalibrated=bool(value("recalibrate")),
        progress=NET_OF_NOP if value("net_of_nop") else RAW,
        name=value("name")[:200] or ", ".join(f"{k} {v}" for k, v in chosen) or "every stored trajectory",
    ), {}


def _scales(store: Store, values: Mapping[str, str], errors: dict[str, str]) -> tuple[str, tuple[FamilyScale, ...]]:
    """Where scales come from. Files are for the command line: an address or a form never names one."""
    match values.get("scales") or FIT:
        case "fit":
            return FIT, ()
        case "frozen":
            wanted = values.get("frozen", "")
            if wanted not in {name for name, _ in AnalysisQueries(store).profiled_stages()}:
                errors["frozen"] = "choose a stage that has profiled scales"
            return f"{GIVEN}{wanted}", ()
        case "given":
            try:
                return "given", parse_scales(values.get("given", ""), "the text")
            except ConfigError as error:
                errors["given"] = str(error)
        case other:
            errors["scales"] = f"scales cannot be {other[:40]!r}"
    return FIT, ()


def _form(
    request: Request, values: Mapping[str, str], errors: Mapping[str, str], *, refused: str = "", status: int = 200
) -> HTMLResponse:
    store = store_of(request)
    analysis = AnalysisQueries(store)
    context = AuditFormContext(
        title="New reward audit",
        section="audits",
        values={name: values.get(name, "") for name in FIELDS},
        errors=errors,
        refused=refused,
        phases=[p.value for p in PHASES],
        formulas=REWARDS,
        frozen=analysis.profiled_stages(),
        suites=sorted({s.name for s in store.suites.list()}),
        allowed=viewer_of(request).may(Action.AUDIT),
    )
    return page(request, context, status=status)
