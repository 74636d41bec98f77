"""`/audits` and `/audits/{id}`: stored re-scorings of fixed sets under several rewards (spec §4.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse

from orchestrator import models as m
from orchestrator.audit_jobs import UNFINISHED
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.errors import StoreError
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.analysis import rewards_figure
from webui.contexts import CurveTable, Fact
from webui.contexts.analysis import AuditContext, AuditsContext, Download, Listed
from webui.pages.audit_new import runner_of
from webui.pages.parts import Before, QueryId, RowId, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE, LISTED = 50, 100
LISTS = {
    "failures_at_or_above_one": "Failures with reward 1 or more",
    "gate_only_failures": "Failures that passed every executed check but not the gate",
}


@router.get("/audits", response_class=HTMLResponse)
def audits(request: Request, cycle: QueryId = None, before: Before = None) -> HTMLResponse:
    if cycle is not None and queries_of(request).cycle(cycle) is None:
        raise missing(f"cycle {cycle}")
    store = store_of(request)
    found = AnalysisQueries(store).audit_page(cycle_id=cycle, before=before, limit=PAGE)
    jobs = store.audit_jobs.not_done() if cycle is None and before is None else ()
    if any(job.state in UNFINISHED for job in jobs):
        runner_of(request).wake()
    context = AuditsContext(
        title="Reward audits" if cycle is None else f"Reward audits of cycle {cycle}",
        section="audits",
        rows=found.items,
        jobs=jobs,
        same={digest: n for digest, n in Counter(a.set_digest for a in found.items).items() if n > 1},
        cycle=cycle,
        next_href=urls.audits(cycle=cycle, before=found.next) if found.next else "",
        empty=not found.items and cycle is None and before is None,
    )
    return page(request, context)


@router.get("/audits/{audit_id:int}", response_class=HTMLResponse)
def audit(request: Request, audit_id: RowId) -> HTMLResponse:
    store = store_of(request)
    row = audit_row(store, audit_id)
    result = row.result
    overall = [r for r in result["rows"] if not r["family"]]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for r in result["rows"]:
        if r["family"]:
            families.setdefault(r["family"], []).append(r)
    histograms = result.get("histograms", {})
    context = AuditContext(
        title=f"Audit {audit_id}: {row.name}",
        section="audits",
        audit=row,
        facts=_facts(row),
        overall=overall,
        families=sorted(families.items()),
        lists=_lists(row, overall),
        chart=urls.audit(audit_id, "chart.json") if histograms else "",
        histogram=_histogram(histograms) if histograms else None,
        scales=[(f["label"], f["scales"]) for f in row.formulas if f["scales"]],
        calibrations=result.get("calibrations", []),
        drift=result.get("drift", []),
        downloads=[
            Download(label="figures as CSV", href=urls.audit(audit_id, "figures.csv")),
            Download(label="failures as CSV", href=urls.audit(audit_id, "failures.csv")),
        ],
        others=[a for a in AnalysisQueries(store).audit_page(set_digest=row.set_digest).items if a.id != audit_id],
    )
    return page(request, context)


@router.get("/audits/{audit_id:int}/chart.json", include_in_schema=False)
def chart(request: Request, audit_id: RowId) -> JSONResponse:
    row = audit_row(store_of(request), audit_id)
    figure = rewards_figure(row.result.get("histograms", {}))
    return JSONResponse(figure, headers={"Cache-Control": "no-cache"})


def audit_row(store: Store, audit_id: int) -> m.Audit:
    try:
        return store.audits.get(audit_id)
    except StoreError:
        raise missing(f"audit {audit_id}") from None


def _facts(row: m.Audit) -> list[Fact]:
    told = {k: v for k, v in row.selection.items() if k not in ("scales", "recalibrated", "progress")}
    facts = [
        Fact(label="Set", value=", ".join(f"{k.removesuffix('_id')} {v}" for k, v in told.items()) or "everything"),
        Fact(label="Attempts with a verdict", value=formats.number(row.result["verdicts"])),
        Fact(label="Without one, left out", value=formats.number(row.result["masked"])),
        Fact(label="Set digest", value=formats.digest(row.set_digest), mono=True),
        Fact(label="Scales", value=f"{row.selection.get('scales')}" + _words(row.selection)),
        Fact(label="Made", value=f"{formats.when(row.created_at)} by {row.created_by or formats.MISSING}"),
    ]
    if row.cycle_id is not None:
        facts.insert(0, Fact(label="Cycle", value=f"cycle {row.cycle_id}", href=urls.cycle(row.cycle_id)))
    return facts


def _words(selection: Mapping[str, Any]) -> str:
    words = ["recalibrated for SPR"] if selection.get("recalibrated") else []
    words += ["net of doing nothing"] if selection.get("progress") == "net_of_nop" else []
    return "".join(f", {w}" for w in words)


def _lists(row: m.Audit, overall: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Sequence[Listed], int]]:
    counts = {r["formula"]: r for r in overall}
    out: list[tuple[str, str, Sequence[Listed], int]] = []
    for label, both in row.result["lists"].items():
        for which, title in LISTS.items():
            if own := [Listed(**r) for r in both[which][:LISTED]]:
                out.append((title, label, own, counts[label][which]))
    return out


def _histogram(histograms: Mapping[str, Mapping[str, Sequence[float]]]) -> CurveTable:
    """Bins that hold an attempt under some formula."""
    labels = list(histograms)
    edges = histograms[labels[0]]["edges"]
    rows = []
    for i in range(len(edges) - 1):
        counts = [int(histograms[label][kind][i]) for label in labels for kind in ("passed", "failed")]
        if any(counts):
            rows.append((f"{edges[i]:.3f}", f"{edges[i + 1]:.3f}", *(str(n) for n in counts)))
    columns = [f"{label.upper()} {kind}" for label in labels for kind in ("passed", "failed")]
    return CurveTable(caption="Attempts by reward", columns=("from", "to", *columns), rows=rows)
