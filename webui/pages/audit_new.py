"""`/audits/new`: choose a fixed set and the rewards to score it under. Small sets at once, large ones in a process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator.audit_jobs import AT_ONCE, AuditJobs
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
from webui.pages.parts import MAX_ID, RowId, store_of
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
    audit, job, wrong = begin(request, viewer, spec)
    if wrong:
        return _form(request, values, dict([wrong]), status=422)
    return RedirectResponse(urls.audit(audit) if job is None else f"/audits/jobs/{job}", status_code=303)


def begin(request: Request, viewer: Viewer, spec: AuditSpec) -> tuple[int | None, int | None, tuple[str, str] | None]:
    """Make an audit: its number, or that of a job where the set is large, or (field, what is wrong)."""
    store = store_of(request)
    attempts = store.trajectories.count(spec.where, cap=AT_ONCE)
    note = {"name": spec.name, "formulas": [k.value for k in spec.formulas], "attempts": attempts}
    if attempts > AT_ONCE:
        number = jobs_of(request).start(spec, attempts=attempts, created_by=viewer.login)
        store.audit_trail.add(viewer.login, "audit.run", object_kind="audit job", object_id=number, payload=note)
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
    found = jobs_of(request).get(number)
    if found is None:
        raise HTTPException(404, f"There is no audit job {number}: it is long over, or the console was restarted")
    if found.audit_id is not None:
        return RedirectResponse(urls.audit(found.audit_id), status_code=303)
    context = AuditJobContext(
        title="Audit in the making",
        section="audits",
        name=found.name,
        attempts=found.attempts,
        state="failed" if found.error else found.state,
        seconds=time.monotonic() - found.started,
        error=found.error,
    )
    answer = page(request, context)
    if not found.over:
        answer.headers["Refresh"] = "2"
    return answer


def jobs_of(request: Request) -> AuditJobs:
    """The jobs of this console, made when the first is asked for."""
    state = request.app.state
    if not hasattr(state, "audit_jobs"):
        store = store_of(request)
        state.audit_jobs = AuditJobs(store.engine.url.render_as_string(hide_password=False), store.artifacts.url)
    jobs: AuditJobs = state.audit_jobs
    return jobs


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


def _form(request: Request, values: Mapping[str, str], errors: Mapping[str, str], *, status: int = 200) -> HTMLResponse:
    store = store_of(request)
    analysis = AnalysisQueries(store)
    context = AuditFormContext(
        title="New reward audit",
        section="audits",
        values={name: values.get(name, "") for name in FIELDS},
        errors=errors,
        phases=[p.value for p in PHASES],
        formulas=REWARDS,
        frozen=analysis.profiled_stages(),
        suites=sorted({s.name for s in store.suites.list()}),
        allowed=viewer_of(request).may(Action.AUDIT),
    )
    return page(request, context, status=status)
