"""Charts as pure functions: rows in, Plotly figure (plain JSON) out.

Only logged values are drawn and only they answer to the pointer; what was thinned out is said in the title's note.
`uirevision` never changes, so zoom and hidden traces survive an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stages.domain import Phase
from webui.charts.palette import COLOURS, colour_index

MAX_POINTS = 2000  # a curve

Figure = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One logged value. Points come in the order of the loop: stage, phase, step."""

    stage: str
    stage_index: int
    phase: Phase
    step: int
    value: float | None  # None: not defined there; the line breaks
    k: int | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None


def thin(points: Sequence[CurvePoint], limit: int = MAX_POINTS) -> list[CurvePoint]:
    """At most `limit` points, ends and calibration updates kept."""
    if len(points) <= limit:
        return list(points)
    stride = -(-len(points) // limit)
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i % stride == 0 or i == last or p.phase is Phase.CALIBRATE]


def ev_figure(points: Sequence[CurvePoint]) -> Figure:
    """Explained variance of the critic by stage, phase and step; calibration updates are marked (spec §3.5)."""
    figure = _steps(points, "explained variance", percent=False)
    figure["layout"]["shapes"].append(_level(0.0))
    return figure


def success_figure(points: Sequence[CurvePoint]) -> Figure:
    """Strict success of the attempts of each step, k/n in the hover, calibration updates marked."""
    figure = _steps(points, "strict success", percent=True)
    figure["layout"]["yaxis"] |= {"tickformat": ".0%", "range": [-0.02, 1.02]}
    return figure


def _steps(points: Sequence[CurvePoint], title: str, *, percent: bool) -> Figure:
    kept = thin(points)
    positions = list(range(len(kept)))
    data: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    named: set[str] = set()
    for start, end in spans(kept, lambda p: (p.stage_index, p.stage, p.phase)):  # a line does not run between phases
        first = kept[start]
        part = kept[start:end]
        colour = COLOURS[colour_index(first.stage_index)]
        calibration = first.phase is Phase.CALIBRATE
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": first.stage,
                "legendgroup": first.stage,
                "showlegend": first.stage not in named,
                "x": positions[start:end],
                "y": [p.value for p in part],
                "connectgaps": False,
                "line": {"color": colour, "width": 2, "dash": "dot" if calibration else "solid"},
                "marker": {
                    "color": colour,
                    "size": 9 if calibration else 6,
                    "symbol": "diamond-open" if calibration else "circle",
                    "line": {"color": colour, "width": 1.5 if calibration else 0},
                },
                "customdata": [[f"{p.stage} · {p.phase.value} {p.step}", _label(p, percent)] for p in part],
                "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            }
        )
        named.add(first.stage)
    for start, end in spans(kept, lambda p: (p.stage_index, p.phase)):
        if kept[start].phase is Phase.CALIBRATE:
            shapes.append(
                {
                    "type": "rect",
                    "xref": "x",
                    "yref": "paper",
                    "x0": start - 0.5,
                    "x1": end - 0.5,
                    "y0": 0,
                    "y1": 1,
                    "fillcolor": "rgba(128,128,128,0.15)",
                    "line": {"width": 0},
                    "layer": "below",
                    "label": {"text": "calibration", "textposition": "top center", "font": {"size": 11}},
                }
            )
    ticks = [start for start, _ in spans(kept, lambda p: (p.stage_index, p.stage))]
    note = "" if len(kept) == len(points) else f" ({len(kept)} of {len(points)} points shown)"
    return {
        "data": data,
        "layout": {
            "uirevision": "keep",
            "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
            "hovermode": "closest",
            "showlegend": len(named) > 1,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {
                "title": {"text": f"step{note}"},
                "tickmode": "array",
                "tickvals": ticks,
                "ticktext": ["<br>" * (n % 2) + kept[i].stage for n, i in enumerate(ticks)],  # two lines: no overlap
                "tickangle": 0,
                "zeroline": False,
            },
            "yaxis": {"title": {"text": title}, "zeroline": False},
            "shapes": shapes,
        },
    }


def _label(point: CurvePoint, percent: bool) -> str:
    if point.value is None:
        return "—"
    value = f"{100 * point.value:.1f} %" if percent else f"{point.value:.3f}"
    value = value.replace("-", "−")
    return value if point.n is None else f"{value} ({point.k}/{point.n})"


def _level(y: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "yref": "y",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.8)"},
        "layer": "below",
    }


def spans(points: Sequence[T], key: Callable[[T], object]) -> list[tuple[int, int]]:
    """[start, end) of every stretch with an equal key."""
    spans: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(points) + 1):
        if i == len(points) or key(points[i]) != key(points[start]):
            spans.append((start, i))
            start = i
    return spans if points else []
