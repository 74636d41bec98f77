"""The curves of a comparison: one logged quantity of the stages that ended in the compared checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Query

from orchestrator.comparisons import SuiteReport
from orchestrator.store import Store
from orchestrator.store.metrics import EV, Point
from stages.domain import Phase
from webui import formats
from webui.charts.analysis import Update, curves_figure
from webui.charts.dag import colour_of
from webui.charts.figures import Figure
from webui.contexts import Choice, CurveTable
from webui.contexts.analysis import CurveView

__all__ = ["EV", "Scale", "Smoothing", "figure", "view"]

Smoothing = Annotated[int, Query(ge=0, le=99)]
Scale = Literal["linear", "log"]
WIDTHS = (0, 3, 7, 15)


def view(
    store: Store, report: SuiteReport, href: Callable[..., str], metric: str, smooth: int, scale: Scale
) -> CurveView:
    names = {n for i in _stages(report) for n in store.metrics.names(i)}
    plain = sorted(n for n in names if "/family/" not in n and "/turn/" not in n)
    curves = _curves(store, report, metric)
    steps = sorted({u.at for _, _, own in curves for u in own})
    values = [{u.at: u.value for u in own} for _, _, own in curves]
    return CurveView(
        names=[Choice(value=n, label=n, href=href(metric=n), active=n == metric) for n in plain],
        name=metric,
        smoothing=[
            Choice(value=str(w), label=f"mean of {w}" if w else "raw", href=href(smooth=w or None), active=w == smooth)
            for w in WIDTHS
        ],
        scale=[
            Choice(value=s, label=s, href=href(scale=None if s == "linear" else s), active=s == scale)
            for s in ("linear", "log")
        ],
        src=href(data="curves.json"),
        table=CurveTable(
            caption=f"{metric}; update 1 is the first joint one, those up to 0 train the critic alone",
            columns=("update", "", *(label for label, _, _ in curves)),
            rows=[(formats.minus(str(at)), "", *(formats.signed(own.get(at), 4) for own in values)) for at in steps],
        ),
    )


def figure(store: Store, report: SuiteReport, metric: str, smooth: int, scale: Scale) -> Figure:
    return curves_figure(_curves(store, report, metric), metric, smooth=smooth, logarithmic=scale == "log")


def _stages(report: SuiteReport) -> list[int]:
    return list(dict.fromkeys(i for x in report.measured if (i := x.checkpoint.stage_id) is not None))


def _curves(store: Store, report: SuiteReport, metric: str) -> list[tuple[str, int, list[Update]]]:
    """(label, colour, updates) of every checkpoint whose stage has logged the quantity."""
    stages = _stages(report)
    points: dict[int, list[Point]] = {}
    for p in store.metrics.curve([metric], stage_ids=stages) if stages else ():
        points.setdefault(p.stage_id, []).append(p)
    return [
        (x.label, colour_of(x.checkpoint.name), _placed(points[i]))
        for x in report.measured
        if (i := x.checkpoint.stage_id) is not None and i in points
    ]


def _placed(points: list[Point]) -> list[Update]:
    """Joint updates from 1 on; what ran before them ends at 0. Without joint updates all count from 1."""
    ahead = sum(p.phase in (Phase.WARMUP, Phase.CALIBRATE) for p in points)
    start = ahead if ahead < len(points) else 0
    return [
        Update(at=n + 1 - start, stage=p.stage, phase=p.phase, step=p.step, value=p.value) for n, p in enumerate(points)
    ]
