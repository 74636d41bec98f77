"""The lineage graph as positions of a server-drawn SVG: columns by generation, actor and critic edges apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.lineage import Lineage, Side
from orchestrator.models import Checkpoint

GAP, LINE, WIDTH, HEIGHT, MARGIN = 82, 74, 132, 42, 16  # WIDTH: of a box with a short name
LETTER = 7.6  # px, of the widest usual letters at the size of names
_ROUNDS = {"rsr": 1, "rpr": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DagNode:
    id: int
    x: float
    y: float
    name: str
    caption: str  # "cycle 3", "no critic yet"
    colour: int
    current: bool
    retained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DagEdge:
    side: str  # "actor" (solid) or "critic" (dashed)
    path: str  # SVG path data
    unchanged: bool  # equal digests
    label: str  # "Δφ = 0", "Δθ = 0", ""
    label_x: float
    label_y: float
    text: str  # the edge in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    width: int
    height: int
    box_width: int  # of every node: the longest name fits
    nodes: Sequence[DagNode]
    edges: Sequence[DagEdge]


def colour_of(name: str) -> int:
    """Base, RSR-1, RPR-1, RSR-2, RPR-2 -> 0…4, by name, since a graph may join several cycles."""
    kind, _, rest = name.lower().partition("-")
    digits = "".join(c for c in rest.split(" ")[0] if c.isdigit())
    if kind not in _ROUNDS or not digits:
        return 0
    return (2 * (int(digits) - 1) + _ROUNDS[kind] - 1) % 4 + 1


def dag(lineage: Lineage, *, current: int | None = None) -> Dag:
    """Generations run left to right; a node stands right of both its parents."""
    nodes = {c.id: c for c in lineage.checkpoints if c.id is not None}
    depth = _depths(nodes)
    lanes: dict[int, list[int]] = {}
    for i in sorted(nodes, key=lambda n: (depth[n], nodes[n].cycle_id or 0, nodes[n].arm, n)):
        lanes.setdefault(depth[i], []).append(i)
    rows = _rows(lanes, nodes)
    box = max([WIDTH, *(round(24 + LETTER * len(c.name)) for c in nodes.values())])
    column = box + GAP
    place = {i: (MARGIN + depth[i] * column, MARGIN + 12 + rows[i] * LINE) for i in nodes}
    edges = []
    for e in lineage.edges:
        (x0, y0), (x1, y1) = place[e.parent_id], place[e.child_id]
        shift = 12 if e.side is Side.ACTOR else 30
        start, end = (x0 + box, y0 + shift), (x1, y1 + shift)
        middle = (start[0] + end[0]) / 2
        symbol = "Δθ = 0" if e.side is Side.ACTOR else "Δφ = 0"
        parent, child = nodes[e.parent_id].name, nodes[e.child_id].name
        edges.append(
            DagEdge(
                side=e.side.value,
                path=f"M{start[0]},{start[1]} C{middle},{start[1]} {middle},{end[1]} {end[0]},{end[1]}",
                unchanged=e.unchanged,
                label=symbol if e.unchanged else "",
                label_x=middle,
                label_y=(start[1] + end[1]) / 2 + (-5 if e.side is Side.ACTOR else 14),
                text=f"{e.side.value} of {child} from {parent}" + (f": {symbol}" if e.unchanged else ""),
            )
        )
    return Dag(
        width=int(2 * MARGIN + (max(depth.values(), default=0)) * column + box),
        box_width=box,
        height=int(2 * MARGIN + 12 + (max(rows.values(), default=0)) * LINE + HEIGHT),
        nodes=[_node(nodes[i], *place[i], current) for i in sorted(nodes)],
        edges=edges,
    )


def _node(c: Checkpoint, x: float, y: float, current: int | None) -> DagNode:
    caption = f"cycle {c.cycle_id}" if c.cycle_id else "imported"
    if c.critic_digest is None:
        caption += " · no critic"
    return DagNode(
        id=c.id or 0,
        x=x,
        y=y,
        name=c.name,
        caption=caption,
        colour=colour_of(c.name),
        current=c.id == current,
        retained=c.step is None or c.retained,
    )


def _parents(c: Checkpoint) -> list[int]:
    return [p for p in (c.actor_parent_id, c.critic_parent_id) if p is not None]


def _depths(nodes: Mapping[int, Checkpoint]) -> dict[int, int]:
    """Longest way from a root. A parent that is not in the graph does not count; ids of parents are smaller."""
    depth: dict[int, int] = {}
    for i in sorted(nodes):
        depth[i] = max((depth[p] + 1 for p in _parents(nodes[i]) if p in depth), default=0)
    return depth


def _rows(lanes: Mapping[int, Sequence[int]], nodes: Mapping[int, Checkpoint]) -> dict[int, int]:
    """A line for every node: that of its actor's parent where it is free, so that a cycle runs straight."""
    rows: dict[int, int] = {}
    for column in sorted(lanes):
        taken: set[int] = set()
        for i in lanes[column]:
            parent = nodes[i].actor_parent_id
            row = rows.get(parent, 0) if parent is not None else 0
            while row in taken:
                row += 1
            rows[i] = row
            taken.add(row)
    return rows
