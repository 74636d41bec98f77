"""From rows to the points of a cycle's two curves, and to the tables behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator import models as m
from orchestrator.store import Store
from orchestrator.store.metrics import EV, Point
from orchestrator.store.trajectories import Success
from stages.domain import Phase
from webui import formats
from webui.charts.figures import CurvePoint
from webui.contexts import CurveTable

# Attempts of these phases say how well the policy does; a replay has a runbook in its context.
COUNTED = (Phase.EXPLORE, Phase.REPLAY, Phase.PROFILE, Phase.CALIBRATE, Phase.JOINT)


def ev_points(store: Store, cycle_id: int, stages: Mapping[int, m.Stage]) -> list[CurvePoint]:
    points: Sequence[Point] = store.metrics.curve([EV], cycle_id=cycle_id)
    return [
        CurvePoint(
            stage=p.stage if p.arm == "main" else f"{p.stage} ({p.arm})",
            stage_index=stages[p.stage_id].index,
            phase=p.phase,
            step=p.step,
            value=p.value,
        )
        for p in points
        if p.stage_id in stages
    ]


def success_points(store: Store, cycle_id: int, stages: Mapping[int, m.Stage]) -> list[CurvePoint]:
    """Strict passes over verdicts of each step's attempts, over all suites of a step."""
    sums: dict[tuple[int, Phase, int], list[int]] = {}
    rows: Sequence[Success] = store.trajectories.success(cycle_id)
    for row in rows:
        if row.stage_id is not None and row.stage_id in stages and row.phase in COUNTED:
            at = sums.setdefault((row.stage_id, row.phase, row.step), [0, 0])
            at[0] += row.passed
            at[1] += row.verdicts
    return [
        CurvePoint(
            stage=stages[stage_id].name,
            stage_index=stages[stage_id].index,
            phase=phase,
            step=step,
            value=k / n if n else None,
            k=k,
            n=n,
        )
        for (stage_id, phase, step), (k, n) in sorted(
            sums.items(), key=lambda item: (stages[item[0][0]].index, COUNTED.index(item[0][1]), item[0][2])
        )
    ]


def ev_table(points: Sequence[CurvePoint]) -> CurveTable:
    return CurveTable(
        caption="Explained variance of the critic, on values frozen before each update",
        columns=("stage", "phase", "step", "EV"),
        rows=[(p.stage, p.phase.value, str(p.step), formats.signed(p.value, 3)) for p in points],
    )


def success_table(points: Sequence[CurvePoint]) -> CurveTable:
    return CurveTable(
        caption="Strict success of each step's attempts, over attempts with a verdict",
        columns=("stage", "phase", "step", "success", "k/n"),
        rows=[(p.stage, p.phase.value, str(p.step), formats.percent(p.value), f"{p.k}/{p.n}") for p in points],
    )
