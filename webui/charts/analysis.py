"""Figures of the analyst's pages: scores with intervals, curves of several checkpoints, histograms of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.domain import Phase
from webui.charts.figures import MAX_POINTS, Figure
from webui.charts.palette import COLOURS

BLUE, ORANGE = "#0072b2", "#d55e00"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One logged value, placed so that the first joint update is 1 and those before it are 0, −1, …"""

    at: int
    stage: str
    phase: Phase
    step: int
    value: float | None


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {
        "uirevision": "keep",
        "margin": {"l": 64, "r": 12, "t": 12, "b": 44},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}, "zeroline": False},
        **more,
    }


def scores_figure(rows: Sequence[Mapping[str, Any]], colours: Sequence[int]) -> Figure:
    """k / verdicts of each checkpoint with its 95 % interval; another harness is an open marker."""
    data = []
    for row, colour in zip(rows, colours, strict=True):
        rate = row["rate_verdicts"]
        if rate is None:
            continue
        own = row["zone"] == "same harness"
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": row["checkpoint"],
                "showlegend": False,
                "x": [row["checkpoint"]],
                "y": [rate],
                "error_y": {
                    "type": "data",
                    "array": [row["verdicts_high"] - rate],
                    "arrayminus": [rate - row["verdicts_low"]],
                    "color": COLOURS[colour],
                    "thickness": 2,
                    "width": 6,
                },
                "marker": {"color": COLOURS[colour], "size": 11, "symbol": "circle" if own else "circle-open"},
                "hovertemplate": f"%{{x}}<br>{row['passed']}/{row['verdicts']}, %{{y:.1%}}<extra></extra>",
            }
        )
    layout = _layout("", "strict success, k / verdicts")
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    layout["xaxis"] |= {"type": "category"}
    return {"data": data, "layout": layout}


def curves_figure(
    curves: Sequence[tuple[str, int, Sequence[Update]]], name: str, *, smooth: int, logarithmic: bool
) -> Figure:
    """One line per checkpoint's stage, raw; with `smooth` the raw line is faint below its centred mean of so many
    updates. Only logged updates answer to the pointer."""
    data: list[dict[str, Any]] = []
    thinned = 0
    used: dict[int, int] = {}
    for label, colour, updates in curves:
        kept = _thin(updates)
        thinned += len(updates) - len(kept)
        dash = DASHES[used.get(colour, 0) % len(DASHES)]  # checkpoints of several cycles share a colour
        used[colour] = used.get(colour, 0) + 1
        x, y = [u.at for u in kept], [u.value for u in kept]
        line = {"color": COLOURS[colour], "width": 2, "dash": dash}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label,
                "legendgroup": f"{label}{len(data)}",
                "x": x,
                "y": y,
                "showlegend": not smooth,
                "connectgaps": False,
                "opacity": 0.35 if smooth else 1,
                "line": line | ({"width": 1} if smooth else {}),
                "marker": {
                    "color": COLOURS[colour],
                    "size": [8 if u.phase is Phase.CALIBRATE else 5 for u in kept],
                    "symbol": ["diamond-open" if u.phase is Phase.CALIBRATE else "circle" for u in kept],
                },
                "customdata": [f"{u.stage} · {u.phase.value} {u.step}" for u in kept],
                "hovertemplate": f"{label}<br>%{{customdata}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
        if smooth:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{label}, mean of {smooth}",
                    "legendgroup": data[-1]["legendgroup"],
                    "showlegend": True,
                    "x": x,
                    "y": smoothed(y, smooth),
                    "connectgaps": False,
                    "line": line,
                    "hoverinfo": "skip",
                }
            )
    note = f" ({thinned} points not drawn)" if thinned else ""
    layout = _layout(f"update; calibration and warm-up up to 0{note}", name)
    if logarithmic:
        layout["yaxis"] |= {"type": "log"}
    elif name.startswith("critic/vf_explained_var"):
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"width": 1, "dash": "dot"}}
        ]
    return {"data": data, "layout": layout}


def smoothed(values: Sequence[float | None], width: int) -> list[float | None]:
    """Centred mean over up to `width` neighbours; a missing value stays missing and is in no mean."""
    half = width // 2
    out: list[float | None] = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - half) : i + half + 1] if v is not None]
        out.append(sum(near) / len(near) if value is not None else None)
    return out


def _thin(updates: Sequence[Update]) -> list[Update]:
    stride = -(-len(updates) // MAX_POINTS)
    last = len(updates) - 1
    return [u for i, u in enumerate(updates) if stride <= 1 or i % stride == 0 or i == last]


def rewards_figure(histograms: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Rewards of passes and failures under each formula, as shares of all attempts; one row per formula.

    Passes are blue and plain, failures orange and hatched; the dotted line is reward 1.
    """
    data = []
    for row, (label, h) in enumerate(histograms.items()):
        edges = np.asarray(h["edges"])
        total = max(1, int(sum(h["passed"]) + sum(h["failed"])))
        for name, colour, hatch in (("passed", BLUE, ""), ("failed", ORANGE, "/")):
            data.append(
                {
                    "type": "bar",
                    "name": f"{label.upper()}, {name}",
                    "x": ((edges[:-1] + edges[1:]) / 2).tolist(),
                    "width": np.diff(edges).tolist(),
                    "y": [n / total for n in h[name]],
                    "customdata": [
                        f"{a:.2f} to {b:.2f}: {n:.0f}" for a, b, n in zip(edges, edges[1:], h[name], strict=False)
                    ],
                    "hovertemplate": f"{label.upper()}, {name}<br>%{{customdata}}<extra></extra>",
                    "xaxis": "x",
                    "yaxis": f"y{row + 1 if row else ''}",
                    "marker": {"color": colour, "pattern": {"shape": hatch}, "line": {"width": 0}},
                }
            )
    rows = max(1, len(histograms))
    layout = _layout("reward", "share of attempts", barmode="stack", bargap=0)
    layout["xaxis"] |= {"anchor": f"y{rows if rows > 1 else ''}"}
    for row, label in enumerate(histograms):
        high = 1 - row / rows
        layout[f"yaxis{row + 1 if row else ''}"] = {
            "title": {"text": label.upper()},
            "tickformat": ".0%",
            "zeroline": False,
            "domain": [high - 1 / rows + 0.06, high],
        }
    layout["shapes"] = [
        {"type": "line", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot"}}
    ]
    return {"data": data, "layout": layout}


def ev_grid(steps: Sequence[str], groups: Sequence[str], values: Sequence[Sequence[float | None]]) -> Figure:
    """EV by group (rows) and update (columns): blue squares above 0, orange open ones below, larger further from it.

    Squares and not a heat map, which sets inline styles that the page's policy forbids. What is not defined stays empty.
    """
    cells = [
        (step, group, value)
        for group, row in zip(groups, values, strict=True)
        for step, value in zip(steps, row, strict=True)
        if value is not None
    ]
    data = []
    for name, colour, symbol, own in (
        ("EV ≥ 0", BLUE, "square", [c for c in cells if c[2] >= 0]),
        ("EV < 0", ORANGE, "square-open", [c for c in cells if c[2] < 0]),
    ):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [c[0] for c in own],
                "y": [c[1] for c in own],
                "marker": {
                    "color": colour,
                    "symbol": symbol,
                    "size": [6 + 12 * min(1.0, abs(c[2])) for c in own],
                    "line": {"color": colour, "width": 2},
                },
                "customdata": [c[2] for c in own],
                "hovertemplate": "turn %{y}<br>%{x}<br>EV %{customdata:.3f}<extra></extra>",
            }
        )
    layout = _layout("update", "turn position")
    layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(steps)}
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(groups)}
    return {"data": data, "layout": layout}
