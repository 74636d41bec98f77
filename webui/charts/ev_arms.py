"""EV curves of an experiment's arms as small server-drawn SVGs: one panel per arm, one line per seed, one scale for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.store.metrics import Point
from stages.domain import Phase

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 150, 40, 8, 22
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # seeds differ by dash as well as by colour


@dataclass(frozen=True, slots=True, kw_only=True)
class EVLine:
    seed: int
    index: int  # of the seed: colour and dash
    dash: str
    path: str  # SVG path data; a batch without a value breaks it
    marks: Sequence[tuple[float, float, bool, str]]  # x, y, is it calibration, what a pointer gets


@dataclass(frozen=True, slots=True, kw_only=True)
class EVPanel:
    arm: str
    width: int
    height: int
    zero_y: float
    ticks: Sequence[tuple[float, str]]
    calibration_x: float | None  # where calibration ends; None: there is none
    lines: Sequence[EVLine]


def ev_panels(curves: Mapping[str, Mapping[int, Sequence[Point]]], seeds: Sequence[int]) -> list[EVPanel]:
    """`curves`: arm -> seed -> its points in order, calibration first. Arms without a point are left out."""
    every = [p for by_seed in curves.values() for points in by_seed.values() for p in points]
    values = [p.value for p in every if p.value is not None]
    if not values:
        return []
    low, high = min(0.0, *values), max(0.0, *values)
    span = (high - low) or 1.0
    longest = max(len(points) for by_seed in curves.values() for points in by_seed.values())
    step = (WIDTH - LEFT - 8) / max(1, longest - 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / span * (HEIGHT - TOP - BOTTOM), 2)

    panels = []
    for arm, by_seed in curves.items():
        if not any(by_seed.values()):
            continue
        lines = []
        for i, seed in enumerate(seeds):
            marks, path, pen = [], "", "M"
            for n, p in enumerate(by_seed.get(seed, ())):
                if p.value is None:
                    pen = "M"
                    continue
                at = (round(LEFT + n * step, 2), y(p.value))
                path += f"{pen}{at[0]},{at[1]} "
                pen = "L"
                text = f"{arm}, seed {seed}, {p.phase.value} {p.step}: {p.value:.3f}".replace("-", "−")
                marks.append((*at, p.phase is Phase.CALIBRATE, text))
            lines.append(EVLine(seed=seed, index=i % 5, dash=DASHES[i % 4], path=path.strip(), marks=marks))
        first = next(points for points in by_seed.values() if points)
        calibrated = sum(p.phase is Phase.CALIBRATE for p in first)
        panels.append(
            EVPanel(
                arm=arm,
                width=WIDTH,
                height=HEIGHT,
                zero_y=y(0.0),
                ticks=[(y(v), f"{v:.2f}".replace("-", "−")) for v in dict.fromkeys((low, 0.0, high))],
                calibration_x=round(LEFT + (calibrated - 0.5) * step, 2) if calibrated else None,
                lines=lines,
            )
        )
    return panels
