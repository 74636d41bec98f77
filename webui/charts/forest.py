"""Effects with their intervals as positions of a server-drawn SVG: one line per contrast, zero marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.effects import Effect

WIDTH, LABELS, ROW, TOP, BOTTOM, PAD = 960, 380, 30, 10, 30, 24
LEAST = 0.01  # the frame is never narrower than a point either way


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    y: float
    name: str
    label: str  # what the pointer and a screen reader get
    mean_x: float | None  # None: nothing to draw yet
    seeds_x: tuple[float, float] | None  # interval over seeds, cut at the frame
    tasks_x: tuple[float, float] | None  # interval over tasks, for these runs
    points_x: Sequence[float]  # one per seed
    open_low: bool  # the interval over seeds goes on beyond the frame
    open_high: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    width: int
    height: int
    left: float
    zero_x: float
    ticks: Sequence[tuple[float, str]]
    rows: Sequence[ForestRow]


def forest(effects: Sequence[Effect], labels: Sequence[str], *, is_rate: bool) -> Forest | None:
    """None while no effect has a value. The frame holds every point and interval over tasks; intervals over few seeds may be
    far wider, so they are cut there and drawn open."""
    known = [e for e in effects if e.mean is not None]
    if not known:
        return None
    drawn = [abs(v) for e in known for v in (*e.by_seed.values(), e.mean or 0.0)]
    drawn += [abs(v) for e in known if e.over_tasks for v in (e.over_tasks.low, e.over_tasks.high)]
    limit = _round_up(max([*drawn, LEAST]) * 1.15)
    middle = LABELS + (WIDTH - LABELS - PAD) / 2
    scale = (WIDTH - LABELS - 2 * PAD) / 2 / limit

    def x(value: float) -> float:
        return round(middle + max(-limit, min(limit, value)) * scale, 2)

    rows = []
    for i, (e, label) in enumerate(zip(effects, labels, strict=True)):
        seeds = e.over_seeds
        rows.append(
            ForestRow(
                y=TOP + i * ROW + ROW / 2,
                name=e.contrast.name,
                label=label,
                mean_x=None if e.mean is None else x(e.mean),
                seeds_x=(x(seeds.low), x(seeds.high)) if seeds else None,
                tasks_x=(x(e.over_tasks.low), x(e.over_tasks.high)) if e.over_tasks else None,
                points_x=[x(v) for v in e.by_seed.values()],
                open_low=seeds is not None and seeds.low < -limit,
                open_high=seeds is not None and seeds.high > limit,
            )
        )
    ticks = [(x(v), _tick(v, is_rate)) for v in (-limit, -limit / 2, 0.0, limit / 2, limit)]
    return Forest(
        width=WIDTH, height=TOP + ROW * len(rows) + BOTTOM, left=LABELS, zero_x=x(0.0), ticks=ticks, rows=rows
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 10 × 10^n."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 10) if step * power >= value * (1 - 1e-12))


def _tick(value: float, is_rate: bool) -> str:
    text = f"{100 * value:+g}" if is_rate else f"{value:+g}"
    return "0" if value == 0 else text.replace("-", "−")
