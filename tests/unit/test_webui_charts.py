"""Formats, curves, Gantt and graph: pure functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import models as m
from orchestrator.lineage import Edge, Lineage, Side
from stages.domain import Phase
from webui import formats
from webui.charts.dag import colour_of, dag
from webui.charts.figures import MAX_POINTS, CurvePoint, ev_figure, success_figure, thin
from webui.charts.gantt import gantt
from webui.charts.palette import COLOURS, colour_index

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.percent(50 / 252), "19.8 %"),
        (formats.percent(None), "—"),
        (formats.interval(0.154, 0.252), "[15.4, 25.2]"),
        (formats.points(0.024), "+2.4 pp"),
        (formats.points(-0.024), "−2.4 pp"),
        (formats.signed(-1.15), "−1.15"),
        (formats.signed(None), "—"),
        (formats.number(5e-7), "5e-7"),
        (formats.number(1.5e-5), "1.5e-5"),
        (formats.number(0.3), "0.3"),
        (formats.number(-2), "−2"),
        (formats.number(1234567), "1 234 567"),
        (formats.number(1028.8), "1 029"),
        (formats.number(0), "0"),
        (formats.number(None), "—"),
        (formats.number(float("nan")), "—"),
        (formats.tokens(1_280_000), "1.28 M tok"),
        (formats.tokens(999), "999 tok"),
        (formats.duration(8040), "2 h 14 m"),
        (formats.duration(12.34), "12.3 s"),
        (formats.duration(185), "3 m 05 s"),
        (formats.duration(200_000), "2 d 7 h"),
        (formats.duration(None), "—"),
        (formats.digest("ab" * 32), "abababababab"),
        (formats.digest(None), "—"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert text.replace("\u202f", " ").replace("\u00a0", " ") == expected


@given(st.text())
def test_visible_text_has_no_control_characters(text: str) -> None:
    shown = formats.visible(text)
    assert not [c for c in shown if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) <= 0x9F or 0x202A <= ord(c) <= 0x202E]
    if text.isprintable():
        assert shown == text


points = st.lists(
    st.builds(
        CurvePoint,
        stage=st.sampled_from(["RPR-1", "RPR-2"]),
        stage_index=st.sampled_from([2, 4]),
        phase=st.sampled_from([Phase.CALIBRATE, Phase.JOINT]),
        step=st.integers(1, 20),
        value=st.one_of(st.none(), st.floats(-2, 1)),
        k=st.just(1),
        n=st.just(2),
    ),
    max_size=30,
)


@given(points)
def test_every_logged_value_is_drawn_once_and_in_order(rows: list[CurvePoint]) -> None:
    for figure in (ev_figure(rows), success_figure(rows)):
        go.Figure(figure)
        assert [y for t in figure["data"] for y in t["y"]] == [p.value for p in rows]
        assert [x for t in figure["data"] for x in t["x"]] == list(range(len(rows)))
        assert not any(t["connectgaps"] for t in figure["data"])
        assert {t["marker"]["color"] for t in figure["data"]} <= {COLOURS[2], COLOURS[4]}


@given(st.integers(0, 3 * MAX_POINTS))
def test_thinning_keeps_ends_and_calibration(n: int) -> None:
    rows = [
        CurvePoint(stage="RPR-1", stage_index=2, phase=Phase.CALIBRATE if i < 4 else Phase.JOINT, step=i, value=0.0)
        for i in range(n)
    ]
    kept = thin(rows)
    assert len(kept) <= MAX_POINTS + 6
    assert kept[:4] == rows[:4]
    assert kept[-1:] == rows[-1:]
    if n > MAX_POINTS:
        assert "points shown" in ev_figure(rows)["layout"]["xaxis"]["title"]["text"]


def stage(index: int, start: float | None, end: float | None, expected: float | None = None) -> m.Stage:
    at = [None if t is None else NOW + timedelta(seconds=t) for t in (start, end)]
    state = (
        m.StageState.DONE if end is not None else m.StageState.RUNNING if start is not None else m.StageState.PENDING
    )
    return m.Stage(
        id=index + 1,
        cycle_id=1,
        index=index,
        kind=m.StageKind.RSR,
        name=f"S{index}",
        state=state,
        started_at=at[0],
        finished_at=at[1],
        expected_s=expected,
    )


def test_gantt_before_the_first_stage_is_nothing() -> None:
    assert gantt([stage(0, None, None)], {}, NOW, live=True) is None


def test_gantt_places_bars_in_proportion() -> None:
    stages = [stage(0, 0, 100, 50), stage(1, 100, None, 200), stage(2, None, None, 100)]
    phase = m.StagePhase(
        stage_id=1,
        phase=Phase.EXPLORE,
        state=m.PhaseState.DONE,
        started_at=NOW,
        finished_at=NOW + timedelta(seconds=50),
    )
    again = m.StagePhase(stage_id=2, phase=Phase.JOINT, started_at=NOW + timedelta(seconds=100), attempt=2)
    chart = gantt(stages, {1: [phase], 2: [again]}, NOW + timedelta(seconds=150), live=True)
    assert chart is not None
    first, second, third = chart.rows
    bar = next(b for b in first.bars if b.kind == "phase")
    expected = next(b for b in first.bars if b.kind == "expected")
    assert bar.width == pytest.approx(expected.width)  # 50 s each
    running = next(b for b in second.bars if b.kind.startswith("phase"))
    assert running.kind == "phase running again"
    assert running.x == pytest.approx(bar.x + 2 * bar.width, abs=0.1)
    planned = next(b for b in third.bars if b.kind == "expected")
    assert planned.x == pytest.approx(bar.x + 6 * bar.width, abs=0.1)  # after RPR's expected end at 300 s
    assert all(b.x + b.width <= chart.width for r in chart.rows for b in r.bars)


def checkpoint(i: int, actor: int | None, critic: int | None, name: str = "RSR-1") -> m.Checkpoint:
    return m.Checkpoint(id=i, cycle_id=1, name=name, actor_digest="a", actor_parent_id=actor, critic_parent_id=critic)


@given(st.data())
def test_graph_runs_left_to_right_without_overlap(data: st.DataObject) -> None:
    rows = []
    for i in range(1, data.draw(st.integers(1, 12)) + 1):
        parent = st.one_of(st.none(), st.integers(1, i - 1)) if i > 1 else st.none()
        rows.append(checkpoint(i, data.draw(parent), data.draw(parent)))
    edges = [
        Edge(parent_id=p, child_id=c.id or 0, side=side, unchanged=False)
        for c in rows
        for side, p in ((Side.ACTOR, c.actor_parent_id), (Side.CRITIC, c.critic_parent_id))
        if p is not None
    ]
    graph = dag(Lineage(checkpoints=rows, edges=edges))
    place = {n.id: n for n in graph.nodes}
    assert len(place) == len(rows)
    assert len({(n.x, n.y) for n in graph.nodes}) == len(rows)
    assert len(graph.edges) == len(edges)
    for e in edges:
        assert place[e.child_id].x >= place[e.parent_id].x + graph.box_width
    assert all(n.x + graph.box_width <= graph.width and n.y + 42 <= graph.height for n in graph.nodes)


def test_boxes_fit_long_names() -> None:
    short = dag(Lineage(checkpoints=[checkpoint(1, None, None)], edges=[]))
    long = dag(Lineage(checkpoints=[checkpoint(1, None, None, name="RPR-1 seed critic")], edges=[]))
    assert long.box_width > short.box_width
    assert long.width >= long.box_width


def test_the_five_colours_are_fixed() -> None:
    names = ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
    assert [colour_of(n) for n in names] == [0, 1, 2, 3, 4] == [colour_index(i) for i in range(5)]
    assert colour_of("RPR-1 step 3") == 2
    assert colour_of("RSR-3") == colour_index(5) == 1
