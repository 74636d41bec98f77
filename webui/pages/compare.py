"""`/compare`: any checkpoints across cycles: scores, paired differences, tasks, strata, curves, settings, cost, selection."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from orchestrator import compare_tables as t
from orchestrator import comparison_rows, comparisons
from orchestrator import models as m
from orchestrator.compare_tables import Convention, Flag, FlagKind
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from stages.errors import ConfigError, StoreError
from webui import urls
from webui.access import Action, needs
from webui.charts.analysis import scores_figure
from webui.charts.dag import colour_of
from webui.contexts import Choice
from webui.contexts.analysis import (
    Column,
    CompareContext,
    ComparePickContext,
    Difference,
    Download,
    Pickable,
)
from webui.pages import compare_curves
from webui.pages.parts import Before, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
MOST = 12  # checkpoints in one comparison
TASKS = 500  # on one page of the matrix
PICKS = 60


class View(StrEnum):
    SCORES = "scores"
    MATRIX = "matrix"
    STRATA = "strata"
    CURVES = "curves"
    CONFIG = "config"
    COST = "cost"
    SELECTION = "selection"


TABLES: dict[View, tuple[str, ...]] = {  # files of each view
    View.SCORES: ("scores", "differences"),
    View.MATRIX: ("matrix",),
    View.STRATA: ("strata", "families", "categories"),
    View.CONFIG: ("config",),
    View.COST: ("cost",),
}
Names = Annotated[list[str], Query(alias="c", default_factory=list)]
OF_ONE = {FlagKind.MISSING_VERDICTS, FlagKind.ONE_ATTEMPT, FlagKind.SURPLUS_ATTEMPTS}  # said beside the score


@router.get("/compare", response_class=HTMLResponse)
def compare(
    request: Request,
    names: Names,
    suite: str = "",
    view: View = View.SCORES,
    by: Convention = Convention.VERDICTS,
    flips: bool = False,
    every: bool = False,
    start: Annotated[int, Query(ge=0, le=10**6)] = 0,
    metric: str = compare_curves.EV,
    smooth: compare_curves.Smoothing = 0,
    scale: compare_curves.Scale = "linear",
    q: str = "",
    pick: bool = False,
    before: Before = None,
) -> Response:
    """`names` (`c`): checkpoints, the base first, by number, CYCLE/NAME, digest or an imported one's name. `by`: what tests
    divide by. `flips`: only tasks that changed. `every`: settings that agree, too. `pick`: choose again."""
    store = store_of(request)
    given = list(dict.fromkeys(n.strip() for part in names for n in part.split(",") if n.strip()))
    try:
        rows = [comparisons.checkpoint_named(store, name) for name in given]
        if len(rows) > MOST:
            raise ConfigError(f"{len(rows)} checkpoints are more than one page compares; choose at most {MOST}")
        if given and len({r.id for r in rows}) < 2 and not pick and request.query_params.get("go"):
            raise ConfigError("choose at least two different checkpoints; the first is the base")
    except (ConfigError, StoreError) as error:
        return _picker(request, [], given, str(error), q, before)
    ids = list(dict.fromkeys(r.id for r in rows if r.id is not None))
    if "go" in request.query_params:  # the form: what was typed first, then what was ticked, the oldest first
        typed = len([n for n in names[0].split(",") if n.strip()])
        ids = list(dict.fromkeys([*(r.id for r in rows[:typed] if r.id is not None), *sorted(ids)]))
    if len(ids) < 2 or pick:
        return _picker(request, ids, [], "", q, before)
    if given != [str(i) for i in ids] or len(names) > 1 or "go" in request.query_params:
        kept = {k: v for k, v in request.query_params.items() if k not in ("c", "go", "q", "pick", "before")}
        return RedirectResponse(urls.compare(ids, **kept), status_code=303)
    try:
        report, suites = _report(store, ids, suite, by)
    except ConfigError as error:
        return _picker(request, ids, [], str(error), q, before)
    here = _Here(request=request, ids=ids, suite=report.suite, view=view, by=by)
    matrix = t.matrix(report) if view is View.MATRIX else []
    shown = [row for row in matrix if row.flips or not flips]
    settings = t.settings(store, report) if view is View.CONFIG else []
    columns = _columns(report)
    optimism = t.optimism(report) if view is View.SELECTION else None
    four = t.four_suites(store, ids) if view is View.SCORES else {}
    context = CompareContext(
        title=f"Compare {', '.join(c.label for c in columns)} on {report.suite}",
        section="compare",
        suite=report.suite,
        view=view.value,
        views=[here.choice(v.value, v.value, v is view, view=v) for v in View],
        suites=[here.choice(s, s, s == report.suite, suite=s, start=None) for s in suites],
        bases=[
            Choice(
                value=str(c.id),
                label=c.label,
                href=urls.compare([c.id, *(i for i in ids if i != c.id)], **here.query(start=None)),
                active=c.id == ids[0],
            )
            for c in columns
        ],
        conventions=[here.choice(b.value, f"k / {b.value}", b is by, by=b) for b in Convention],
        columns=columns,
        unmeasured=report.missing,
        change_href=urls.compare(ids, pick=1),
        chart=urls.compare(ids, data="chart.json", suite=report.suite) if view is View.SCORES else "",
        downloads=[
            Download(
                label=f"{name} as CSV", href=urls.compare(ids, data=f"{name}.csv", suite=report.suite, by=by.value)
            )
            for name in TABLES.get(view, ())
        ],
        scores=comparison_rows.score_rows(report) if view is View.SCORES else [],
        score_flags=_score_flags(report),
        differences=_differences(report, columns),
        references=report.references if view is View.SCORES else [],
        four=[(c, four[c.id]) for c in columns if c.id in four],
        four_names=t.FOUR_NAMES,
        four_references=store.references.list(suite="four-suite mean") if four else [],
        rows=shown[start : start + TASKS],
        row_count=len(shown),
        flips_only=here.choice("1", "flips only", flips, flips=None if flips else 1, start=None),
        pages=[
            here.choice(str(at), f"{at + 1}–{min(at + TASKS, len(shown))}", at == start, start=at or None)
            for at in range(0, len(shown), TASKS)
        ]
        if len(shown) > TASKS
        else [],
        groups=[
            ("stratum", t.strata(report)),
            ("category", t.categories(store, report)),
            ("family", t.families(report)),
        ]
        if view is View.STRATA
        else [],
        settings=[s for s in settings if every or s.differs],
        settings_toggle=here.choice("1", "also what agrees", every, every=None if every else 1),
        costs=t.cost_rows(store, report) if view is View.COST else [],
        curves=compare_curves.view(store, report, here.href, metric, smooth, scale) if view is View.CURVES else None,
        selections=t.selections(store, report) if view is View.SELECTION else [],
        optimism=optimism,
        best=report.measured[optimism.best].label if optimism else "",
    )
    return page(request, context)


@router.get("/compare/chart.json", include_in_schema=False)
def chart(request: Request, names: Names, suite: str = "") -> JSONResponse:
    report, _ = asked(request, names, suite)
    figure = scores_figure(comparison_rows.score_rows(report), [c.colour for c in _columns(report)])
    return JSONResponse(figure, headers={"Cache-Control": "no-cache"})


@router.get("/compare/curves.json", include_in_schema=False)
def curves(
    request: Request,
    names: Names,
    suite: str = "",
    metric: str = compare_curves.EV,
    smooth: compare_curves.Smoothing = 0,
    scale: compare_curves.Scale = "linear",
) -> JSONResponse:
    report, _ = asked(request, names, suite)
    figure = compare_curves.figure(store_of(request), report, metric, smooth, scale)
    return JSONResponse(figure, headers={"Cache-Control": "no-cache"})


# ------------------------------------------------------------------------------------------------ parts


class _Here:
    """Addresses of this comparison with some of it changed."""

    def __init__(self, *, request: Request, ids: Sequence[int], suite: str, view: View, by: Convention) -> None:
        self._ids = ids
        self._now = {k: v for k, v in request.query_params.items() if k != "c"}
        self._now |= {"suite": suite, "view": view.value} | ({"by": by.value} if by is Convention.ATTEMPTS else {})

    def query(self, **changes: object) -> dict[str, Any]:
        return self._now | {k: getattr(v, "value", v) for k, v in changes.items()}

    def href(self, *, data: str = "", **changes: object) -> str:
        return urls.compare(self._ids, data=data, **self.query(**changes))

    def choice(self, value: str, label: str, active: bool, **changes: Any) -> Choice:
        return Choice(value=value, label=label, href=self.href(**changes), active=active)


def _report(
    store: Store, ids: Sequence[int], suite: str, by: Convention
) -> tuple[comparisons.SuiteReport, Sequence[str]]:
    """The report on one suite (by default the one that most of them share) and all suites. Raises ConfigError."""
    measured: dict[str, set[int | None]] = {}
    for e in AnalysisQueries(store).evaluation_rows(ids):
        measured.setdefault(e.suite, set()).add(e.checkpoint_id)
    if not measured:
        raise ConfigError("none of these checkpoints was evaluated; `rsi evaluate` or `rsi import harbor` does it")
    wanted = suite or min(measured, key=lambda s: (-len(measured[s]), s))
    found = comparisons.compare_checkpoints(store, [str(i) for i in ids], suite=wanted, convention=by)
    return found.suites[0], sorted(measured)


def asked(
    request: Request, names: Sequence[str], suite: str, by: Convention = Convention.VERDICTS
) -> tuple[comparisons.SuiteReport, Sequence[str]]:
    given = [n for part in names for n in part.split(",") if n]
    if len(given) > MOST or not all(n.isdecimal() and len(n) < 10 for n in given):
        raise HTTPException(422, f"c takes up to {MOST} numbers of checkpoints, separated by commas")
    try:
        return _report(store_of(request), [int(n) for n in given], suite, by)
    except (ConfigError, StoreError) as error:
        raise HTTPException(404, str(error)) from None


def _columns(report: comparisons.SuiteReport) -> list[Column]:
    return [
        Column(
            id=x.checkpoint.id or 0,
            label=x.label,
            colour=colour_of(x.checkpoint.name),
            cycle_id=x.checkpoint.cycle_id,
            evaluation_id=x.stored.id or 0,
            reference=comparison_rows.zone(report, x) == "reference only",
        )
        for x in report.measured
    ]


def _differences(report: comparisons.SuiteReport, columns: Sequence[Column]) -> list[Difference]:
    by_label = {c.label: c for c in columns}

    def of_pair(flag: Flag) -> bool:
        return not flag.text.startswith(("before: ", "after: ")) or flag.kind not in OF_ONE

    return [
        Difference(column=by_label[x.after], result=x, flags=[f for f in x.flags if of_pair(f)])
        for x in report.comparisons
    ]


def _score_flags(report: comparisons.SuiteReport) -> list[tuple[str, str]]:
    """What makes one checkpoint's score doubtful, and what was not used for it."""
    flags = [(x.label, f.text) for x in report.measured for f in x.score.flags]
    more = "{} other evaluation{} of it on this suite stored, and not used"
    return flags + [(x.label, more.format(x.older, "" if x.older == 1 else "s")) for x in report.measured if x.older]


def table_rows(store: Store, report: comparisons.SuiteReport, table: str) -> list[dict[str, Any]]:
    match table:
        case "scores":
            return comparison_rows.score_rows(report)
        case "differences":
            return comparison_rows.comparison_rows(report)
        case "matrix":
            return t.matrix_rows(report, t.matrix(report))
        case "strata":
            return t.group_rows("stratum", report, t.strata(report))
        case "families":
            return t.group_rows("family", report, t.families(report))
        case "categories":
            return t.group_rows("category", report, t.categories(store, report))
        case "config":
            return t.setting_rows(report, t.settings(store, report))
        case _:
            return t.cost_rows(store, report)


def _picker(
    request: Request, ids: Sequence[int], typed: Sequence[str], error: str, q: str, before: int | None
) -> HTMLResponse:
    """The form: checkpoints that were measured, newest first, those already chosen on top."""
    store, queries = store_of(request), queries_of(request)
    analysis = AnalysisQueries(store)
    chosen: dict[int, m.Checkpoint] = dict(store.checkpoints.many(list(ids)))
    found = analysis.measured_checkpoints(words=q, before=before, limit=PICKS)
    rows = [chosen[i] for i in ids if i in chosen] + [row for row in found.items if row.id not in chosen]
    names = queries.cycle_names(sorted({r.cycle_id for r in rows if r.cycle_id is not None}))
    suites = analysis.suites_by_checkpoint([r.id for r in rows if r.id is not None])
    context = ComparePickContext(
        title="Compare checkpoints",
        section="compare",
        rows=[
            Pickable(
                checkpoint=r,
                colour=colour_of(r.name),
                cycle_name=names.get(r.cycle_id or 0, ""),
                suites=", ".join(suites.get(r.id or 0, ())),
                chosen=r.id in chosen,
            )
            for r in rows
        ],
        named=", ".join(typed),
        query=q,
        error=error,
        next_href=urls.compare(ids, pick=1, q=q, before=found.next) if found.next else "",
    )
    return page(request, context, status=422 if error else 200)
