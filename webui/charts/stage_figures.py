"""Curves of one stage as pure functions: raw and smoothed, linear or logarithmic, all charts on the same steps.

The raw values answer to the pointer; the smoothed line is drawn over them and does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.store.metrics import Point
from stages.domain import Phase
from webui.charts.figures import MAX_POINTS, Figure, spans

Step = tuple[Phase, int]

ACTOR, CRITIC, THIRD, FOURTH = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # Okabe-Ito; dashes tell them apart, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    metric: str
    label: str
    colour: str = ACTOR
    dash: str = "solid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    curves: Sequence[Curve]
    zero: bool = False  # a line at 0
    share: bool = False  # of 1: the axis shows all of 0 to 100 %


CHARTS: Mapping[str, Chart] = {
    "ev": Chart(title="Explained variance", curves=(Curve(metric="critic/vf_explained_var", label="EV", colour=CRITIC, dash="dash"),), zero=True),
    "reward": Chart(title="Reward", curves=(Curve(metric="rollout/reward_mean", label="mean reward"),)),
    "success": Chart(title="Strict success", curves=(Curve(metric="rollout/success", label="success"),), share=True),
    "ratio": Chart(
        title="Importance ratio",
        curves=(
            Curve(metric="train/ratio_p99", label="99th percentile"),
            Curve(metric="train/ratio_max", label="largest", colour=CRITIC, dash="dot"),
        ),
    ),
    "clip": Chart(
        title="Clipped share",
        curves=(
            Curve(metric="train/clip_low_positive", label="below, A > 0", dash="dash"),
            Curve(metric="train/clip_low_negative", label="below, A < 0", colour=CRITIC, dash="dash"),
            Curve(metric="train/clip_high_positive", label="above, A > 0", colour=THIRD),
            Curve(metric="train/clip_high_negative", label="above, A < 0", colour=FOURTH),
        ),
    ),
    "entropy": Chart(title="Entropy", curves=(Curve(metric="train/entropy", label="entropy"),)),
    "kl": Chart(title="KL (k3)", curves=(Curve(metric="train/ppo_kl", label="KL"),)),
    "gap": Chart(
        title="Gap to the sampler's log-probs",
        curves=(Curve(metric="train/train_rollout_logprob_abs_diff", label="mean |Δ log p|"),),
    ),
    "gradients": Chart(
        title="Gradient norms",
        curves=(
            Curve(metric="actor/grad_norm", label="actor"),
            Curve(metric="critic/grad_norm", label="critic", colour=CRITIC, dash="dash"),
        ),
    ),
    "losses": Chart(
        title="Losses",
        curves=(
            Curve(metric="train/pg_loss", label="policy"),
            Curve(metric="critic/value_loss", label="value", colour=CRITIC, dash="dash"),
            Curve(metric="distil/loss_per_token", label="distillation", colour=THIRD),
        ),
        zero=True,
    ),
    "lengths": Chart(
        title="Tokens an attempt",
        curves=(Curve(metric="rollout/tokens_mean", label="sampled tokens"),),
    ),
    "turns": Chart(title="Turns an attempt", curves=(Curve(metric="rollout/turns_mean", label="turns"),)),
}  # fmt: skip


def steps_of(points: Sequence[Point]) -> list[Step]:
    """Every step of a stage in its order: the common x axis of all its charts."""
    return list(dict.fromkeys((p.phase, p.step) for p in points))


def shown(chart: Chart, points: Sequence[Point]) -> list[Curve]:
    """The curves of a chart that the stage has values for."""
    logged = {p.name for p in points if p.value is not None}
    return [c for c in chart.curves if c.metric in logged]


def smoothed(values: Sequence[float | None], span: int) -> list[float | None]:
    """Exponential mean over about `span` steps, corrected for its start; a missing value stays missing and counts nothing."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    out: list[float | None] = []
    for value in values:
        if value is None:
            out.append(None)
            continue
        total, weight = keep * total + value, keep * weight + 1
        out.append(float(f"{total / weight:.9g}"))  # without noise that a constant would be zoomed into
    return out


def stage_figure(chart: Chart, points: Sequence[Point], *, smooth: int = 0, log: bool = False) -> Figure:
    """One chart over all steps of a stage. `smooth`: span in steps, 0 for raw values only."""
    steps = steps_of(points)
    stride = max(1, -(-len(steps) // MAX_POINTS))
    kept = [i for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1 or s[0] is Phase.CALIBRATE]
    by_metric: dict[str, dict[Step, float | None]] = {}
    for p in points:
        by_metric.setdefault(p.name, {})[(p.phase, p.step)] = p.value
    data: list[dict[str, Any]] = []
    for curve in shown(chart, points):
        column = [by_metric[curve.metric].get(s) for s in steps]
        raw = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": curve.label,
            "legendgroup": curve.metric,
            "x": kept,
            "y": [column[i] for i in kept],
            "connectgaps": False,
            "line": {"color": curve.colour, "width": 1 if smooth else 2, "dash": curve.dash},
            "marker": {
                "color": curve.colour,
                "size": 5,
                "symbol": ["diamond-open" if steps[i][0] is Phase.CALIBRATE else "circle" for i in kept],
            },
            "opacity": 0.45 if smooth else 1,
            "customdata": [f"{steps[i][0].value} {steps[i][1]}" for i in kept],
            "hovertemplate": f"%{{customdata}}<br>{curve.label} %{{y:.4g}}<extra></extra>",
        }
        data.append(raw)
        if smooth:
            line = smoothed(column, smooth)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{curve.label}, smoothed",
                    "legendgroup": curve.metric,
                    "showlegend": False,
                    "x": kept,
                    "y": [line[i] for i in kept],
                    "connectgaps": True,
                    "line": {"color": curve.colour, "width": 2.5, "dash": curve.dash},
                    "hoverinfo": "skip",
                }
            )
    return {"data": data, "layout": _layout(chart, steps, len(kept), len(data) > 1 + bool(smooth), log=log)}


def _layout(chart: Chart, steps: Sequence[Step], kept: int, legend: bool, *, log: bool) -> dict[str, Any]:
    shapes: list[dict[str, Any]] = []
    ticks, words = [], []
    for start, end in spans(steps, lambda s: s[0]):
        ticks.append(start)
        words.append(f"{steps[start][0].value}")
        if steps[start][0] is Phase.CALIBRATE:
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
                }
            )
        elif start:
            rule = {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.6)"}
            at = start - 0.5
            shapes.append(
                {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": rule}
            )
    if chart.zero and not log:
        rule = {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.8)"}
        shapes.append({"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": rule})
    note = "" if kept == len(steps) else f" ({kept} of {len(steps)} points shown)"
    spike = {"showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "dot", "spikesnap": "data"}
    return {
        "uirevision": "keep",
        "margin": {"l": 56, "r": 12, "t": 8, "b": 40},
        "hovermode": "closest",
        "showlegend": legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {
            "title": {"text": f"step{note}"},
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": words,
            "tickangle": 0,
            "zeroline": False,
            "range": [-0.6, max(len(steps) - 0.4, 0.6)],
            **spike,
        },
        "yaxis": {
            "zeroline": False,
            "type": "log" if log else "linear",
            "rangemode": "normal",
            "nticks": 6,
            "exponentformat": "e",
            **({"range": [-0.03, 1.03], "tickformat": ".0%"} if chart.share and not log else {}),
        },
        "shapes": shapes,
    }
