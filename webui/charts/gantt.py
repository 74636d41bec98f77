"""Stages and phases over time, expected against actual, as positions of a server-drawn SVG (no inline style, no script)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator import models as m
from webui.charts.palette import colour_index
from webui.formats import duration

WIDTH, LABELS, ROW, BAR, TOP = 960, 70, 30, 14, 8
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    x: float
    width: float
    y: float
    kind: str  # CSS class: "phase", "phase running", "expected", "again"
    label: str  # what the pointer and a screen reader get


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    y: float
    name: str
    colour: int
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    width: int
    height: int
    rows: Sequence[Row]
    ticks: Sequence[Tick]
    now_x: float | None
    summary: str  # the chart in a sentence


def gantt(
    stages: Sequence[m.Stage], phases: Mapping[int, Sequence[m.StagePhase]], now: datetime, *, live: bool
) -> Gantt | None:
    """None before the first stage has started. Planned stages follow the last one at their expected length."""
    started = [s.started_at for s in stages if s.started_at]
    if not started:
        return None
    origin = min(started)
    ends = [(s.finished_at or now) for s in stages if s.started_at]
    clock = (max(ends) - origin).total_seconds()
    plans: dict[int, tuple[float, float]] = {}
    at = 0.0
    for s in stages:
        if s.started_at:
            begin = (s.started_at - origin).total_seconds()
            actual = ((s.finished_at or now) - s.started_at).total_seconds()
            plans[s.index] = (begin, s.expected_s or 0.0)
            at = begin + (actual if s.finished_at else max(actual, s.expected_s or 0.0))
        elif live and s.state is m.StageState.PENDING:
            plans[s.index] = (at, s.expected_s or 0.0)
            at += s.expected_s or 0.0
    total = max([clock, *(b + e for b, e in plans.values()), 1.0]) * 1.02
    scale = (WIDTH - LABELS) / total

    def x(seconds: float) -> float:
        return round(LABELS + seconds * scale, 2)

    rows = []
    for line, s in enumerate(stages):
        y = TOP + line * ROW
        bars: list[Bar] = []
        if s.index in plans and plans[s.index][1] > 0:
            begin, expected = plans[s.index]
            bars.append(
                Bar(
                    x=x(begin),
                    width=round(expected * scale, 2),
                    y=y + BAR + 2,
                    kind="expected",
                    label=f"{s.name} expected {duration(expected)}",
                )
            )
        for p in phases.get(s.id or 0, ()):
            begin = (p.started_at - origin).total_seconds()
            length = ((p.finished_at or now) - p.started_at).total_seconds()
            kind = "phase" if p.state is m.PhaseState.DONE else "phase running"
            again = f", attempt {p.attempt}" if p.attempt > 1 else ""
            bars.append(
                Bar(
                    x=x(begin),
                    width=max(round(length * scale, 2), 1.5),
                    y=y,
                    kind=kind + (" again" if p.attempt > 1 else ""),
                    label=f"{s.name} {p.phase.value} {duration(length)}{again}",
                )
            )
        rows.append(Row(y=y, name=s.name, colour=colour_index(s.index), bars=bars))
    return Gantt(
        width=WIDTH,
        height=TOP + len(stages) * ROW + 22,
        rows=rows,
        ticks=_ticks(total, x),
        now_x=x((now - origin).total_seconds()) if live else None,
        summary=f"{len(started)} of {len(stages)} stages started, {duration(clock)} so far",
    )


def _ticks(total: float, x: object) -> list[Tick]:
    assert callable(x)
    step = next((s for s in _STEPS_S if total / s <= 8), _STEPS_S[-1])
    return [Tick(x=x(i * step), label=duration(i * step).replace(".0 s", " s")) for i in range(int(total // step) + 1)]
