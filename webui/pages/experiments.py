"""`/experiments` and `/experiments/{id}`: arms × seeds, effects with intervals, EV curves, what was shown and what was not."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, PlainTextResponse

from orchestrator import exports
from orchestrator.experiments.export import effect_rows, needed, run_rows, to_document, to_markdown
from orchestrator.experiments.progress import progress_of
from orchestrator.experiments.report import ExperimentReport, OutcomeEffects, amount, between, report_of, summary
from orchestrator.experiments.spec import load_spec, spec_names
from orchestrator.store import Store
from stages.errors import StoreError
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.ev_arms import ev_panels
from webui.charts.forest import forest
from webui.contexts import CurveTable
from webui.contexts.experiments import ArmRow, EffectTable, ExperimentContext, ExperimentsContext, SuiteTable
from webui.pages.parts import Before, RowId, missing, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE = 30
KINDS = {"md": "text/markdown", "csv": "text/csv", "runs.csv": "text/csv", "json": "application/json"}


@router.get("/experiments", response_class=HTMLResponse)
def experiments(request: Request, before: Before = None) -> HTMLResponse:
    store = store_of(request)
    after = store.events.last_id()
    found = store.experiments.list(before=before, limit=PAGE)
    context = ExperimentsContext(
        title="Experiments",
        section="experiments",
        events_after=after,
        rows=list(zip(found.items, progress_of(store, found.items), strict=True)),
        shipped=[(name, load_spec(name).question) for name in spec_names()],
        next_href=urls.experiments(before=found.next) if found.next else "",
    )
    return page(request, context)


@router.get("/experiments/{experiment_id:int}", response_class=HTMLResponse)
def experiment(request: Request, experiment_id: RowId) -> HTMLResponse:
    store = store_of(request)
    after = store.events.last_id()
    report = report_for(store, experiment_id)
    lines = summary(report)
    curves = {arm: {r.seed: r.ev for r in report.of_arm(arm)} for arm, _, _ in report.arms}
    seeds = ",".join(map(str, report.seeds))
    context = ExperimentContext(
        title=f"{report.name} · experiment {experiment_id}",
        section="experiments",
        events_after=after,
        report=report,
        shown=[line.removeprefix("Shown: ") for line in lines if line.startswith("Shown")],
        not_shown=[line.removeprefix("Not shown: ") for line in lines if not line.startswith("Shown")],
        suites=[_suite(report, suite) for suite in report.suites],
        effects=[_effects(report, o) for o in report.outcomes],
        ev=ev_panels(curves, report.seeds),
        ev_table=_ev_table(report),
        command=f"rsi experiment run {report.name} --seeds {seeds}",
        downloads=[
            (label, urls.experiment_file(experiment_id, kind))
            for label, kind in (
                ("Markdown", "md"),
                ("effects, CSV", "csv"),
                ("runs, CSV", "runs.csv"),
                ("JSON", "json"),
            )
        ],
    )
    return page(request, context)


@router.get("/experiments/{experiment_id:int}/report.{kind}", include_in_schema=False)
def experiment_file(request: Request, experiment_id: RowId, kind: str) -> PlainTextResponse:
    """The report as a file; the same as `rsi experiment report` writes."""
    if kind not in KINDS:
        raise missing(f"report.{kind}")
    report = report_for(store_of(request), experiment_id)
    match kind:
        case "md":
            text = to_markdown(report)
        case "csv":
            text = exports.to_csv(effect_rows(report))
        case "runs.csv":
            text = exports.to_csv(run_rows(report))
        case _:
            text = exports.to_json(to_document(report))
    headers = {"Content-Disposition": f'attachment; filename="{report.name}.{kind}"'}
    return PlainTextResponse(text, media_type=f"{KINDS[kind]}; charset=utf-8", headers=headers)


def report_for(store: Store, experiment_id: int) -> ExperimentReport:
    try:
        row = store.experiments.get(experiment_id)
    except StoreError:
        raise missing(f"experiment {experiment_id}") from None
    return report_of(store, row)


def _suite(report: ExperimentReport, suite: str) -> SuiteTable:
    arms = []
    for name, title, changes in report.arms:
        runs = {r.seed: r for r in report.of_arm(name)}
        own = [runs[s] for s in report.seeds if s in runs]
        rates = [k / n for r in own if (cell := r.success.get(suite)) for k, n in [cell] if n]
        arms.append(
            ArmRow(
                name=name,
                title=title,
                changes=changes,
                departures=tuple(dict.fromkeys(d for r in own for d in r.departures)),
                cells=[(r, r.success.get(suite)) for r in own],
                mean=sum(rates) / len(rates) if len(rates) == len(report.seeds) else None,
            )
        )
    return SuiteTable(suite=suite.removeprefix("embedded:"), measured=report.measured[suite], arms=arms)


def _effects(report: ExperimentReport, o: OutcomeEffects) -> EffectTable:
    columns = ["contrast", *(f"seed {s}" for s in report.seeds), "mean", "95 % over seeds", "p", "p (Holm)"]
    columns += ["95 % over tasks, these runs", "seeds needed"]
    rows = [
        [
            e.contrast.name,
            *(formats.minus(amount(e.by_seed.get(s), o.is_rate)) for s in report.seeds),
            formats.minus(amount(e.mean, o.is_rate)),
            formats.minus(between(e.over_seeds, o.is_rate)),
            exports.p_value(e.p_value),
            exports.p_value(e.p_holm),
            formats.minus(between(e.over_tasks, o.is_rate)),
            needed(e),
        ]
        for e in o.effects
    ]
    spoken = [f"{e.contrast.name}: {formats.minus(amount(e.mean, o.is_rate))}" for e in o.effects]
    return EffectTable(
        outcome=o.outcome,
        is_rate=o.is_rate,
        plot=forest(o.effects, spoken, is_rate=o.is_rate),
        columns=columns,
        rows=rows,
    )


def _ev_table(report: ExperimentReport) -> CurveTable | None:
    rows = [
        [r.arm, str(r.seed), p.phase.value, str(p.step), formats.signed(p.value, 3)] for r in report.runs for p in r.ev
    ]
    if not rows:
        return None
    return CurveTable(
        caption="Explained variance of the last stage, each value on a fresh batch before the critic trains on it",
        columns=["arm", "seed", "phase", "step", "EV"],
        rows=rows,
    )
