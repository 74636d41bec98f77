"""What each page's template receives: one frozen dataclass per page. A page is this contract plus its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from orchestrator import models as m
from orchestrator.lineage import CriticProof
from orchestrator.store.console_queries import CycleSummary, RunbookInfo, Score
from orchestrator.store.notices import InboxEntry
from webui.charts.dag import Dag
from webui.charts.gantt import Gantt


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """What every page has."""

    template: ClassVar[str]
    title: str
    section: str  # entry of the left rail


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveContext(PageContext):
    """A page that changes while it is open."""

    events_after: int  # the newest event when the page was made: the stream goes on from there


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the nodes of a cycle's strip."""

    index: int  # also the colour, 0…4
    name: str
    state: m.StageState
    phase: str
    done: int
    total: int | None
    text: str
    stage_id: int | None
    checkpoint: m.Checkpoint | None
    score: Score | None  # on the first reported suite
    note: str = ""  # "parent kept", "attempt 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option of a filter."""

    value: str
    label: str
    href: str
    active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    label: str
    value: str
    href: str = ""
    mono: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestCheckpoint:
    """The newest retained checkpoint beside its actor parent, suite by suite."""

    checkpoint: m.Checkpoint
    parent: m.Checkpoint | None
    suites: Sequence[tuple[str, Score, Score | None]]  # (suite, its score, the parent's)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewContext(LiveContext):
    template: ClassVar[str] = "overview.html"
    unread: Sequence[InboxEntry]  # the newest of the viewer's inbox
    gates: Sequence[tuple[CycleSummary, int]]  # suspended cycles, runbooks that wait for people
    failed: Sequence[CycleSummary]
    running: Sequence[CycleSummary]
    strips: Mapping[int, Sequence[Node]]  # cycle id -> nodes
    latest: Sequence[LatestCheckpoint]
    events: Sequence[tuple[m.Event, str]]  # event and what it says
    empty: bool  # nothing was ever launched


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclesContext(LiveContext):
    template: ClassVar[str] = "cycles.html"
    rows: Sequence[CycleSummary]
    strips: Mapping[int, Sequence[Node]]
    states: Sequence[Choice]
    query: str
    state: str
    next_href: str
    empty: bool  # no cycle at all, whatever the filter


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One line of the stage table."""

    node: Node
    stage: m.Stage
    phases: Sequence[m.StagePhase]
    seconds: float | None
    expected_s: float | None
    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One line of a table of checkpoints."""

    checkpoint: m.Checkpoint
    colour: int  # 0…4
    proof: CriticProof
    scores: Sequence[Score | None]  # one per suite of the table
    cycle_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveTable:
    """The table behind a chart."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One line of an estimate, in words; `actual` stands beside it once there is one."""

    label: str
    expected: str
    actual: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a cycle is, in words that are true while a wish takes effect, and what may be asked of it."""

    words: str
    since: datetime | None
    by: str  # who asked for this state, empty when nobody did
    acts: Sequence[tuple[str, str]]  # (verb, label)
    refused: str = ""  # why the last wish was not followed


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleContext(LiveContext):
    template: ClassVar[str] = "cycle.html"
    cycle: m.Cycle
    facts: Sequence[Fact]
    nodes: Sequence[Node]
    stages: Sequence[StageRow]
    gantt: Gantt | None
    suites: Sequence[str]
    suite_flags: Sequence[str]  # why the scores of a column are not comparable; empty where they are
    checkpoints: Sequence[CheckpointRow]
    selections: Sequence[tuple[m.Stage, m.Selection]]
    ev_table: CurveTable
    success_table: CurveTable
    log: Sequence[m.LogLine]  # its end; the whole log is a page of its own
    newest_line: int  # id of the newest log line shown, 0 without any
    first_error: m.LogLine | None
    live: bool  # something may still happen
    tabs: Sequence[Choice]
    standing: Standing
    costs: Sequence[Cost]
    costs_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsContext(LiveContext):
    template: ClassVar[str] = "checkpoints.html"
    rows: Sequence[CheckpointRow]
    suites: Sequence[str]
    suite_flags: Sequence[str]  # why the scores of a column are not comparable; empty where they are
    cycle: m.Cycle | None  # when the list is one cycle's
    candidates: bool
    toggle_href: str
    next_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """One parent edge of a checkpoint."""

    side: str  # "actor" or "critic"
    parent: m.Checkpoint | None
    before: str | None
    after: str | None
    statement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContext(PageContext):
    template: ClassVar[str] = "checkpoint.html"
    checkpoint: m.Checkpoint
    colour: int
    facts: Sequence[Fact]
    parents: Sequence[Parent]
    proof: CriticProof
    children: Sequence[m.Checkpoint]
    scores: Sequence[Score]
    metrics: Sequence[Fact]
    dag: Dag


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageContext(LiveContext):
    template: ClassVar[str] = "lineage.html"
    dag: Dag
    cycles: Sequence[Choice]
    shown: int
    left_out: int
    here: str  # address of this view


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesContext(PageContext):
    template: ClassVar[str] = "trajectories.html"
    rows: Sequence[m.Trajectory]
    filters: Sequence[tuple[str, Sequence[Choice]]]  # (label, options) of the fixed-choice filters
    active: Sequence[Choice]  # what narrows the list now; its link removes it
    hidden: Sequence[tuple[str, str]]  # other parameters that the form carries on
    task: str
    family: str
    flags: Sequence[Choice]
    costly: Sequence[Choice]
    count: int
    count_capped: bool
    next_href: str
    empty: bool  # nothing stored at all


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    index: int
    action: str
    observation: str
    exit_code: int | None
    timed_out: bool
    segment: int
    new_segment: bool
    duration_s: float
    tokens: int
    long: bool  # starts folded
    cited: bool  # a runbook line cites it
    hit: bool  # holds the search words


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryContext(PageContext):
    template: ClassVar[str] = "trajectory.html"
    trajectory: m.Trajectory
    instruction: str
    facts: Sequence[Fact]
    checks: Sequence[m.CheckResult]
    segments: Sequence[m.Segment]
    turns: Sequence[TurnView]
    runbook: RunbookInfo | None  # in its context
    written: Sequence[RunbookInfo]  # runbooks made from it
    replay: m.Replay | None
    boundaries: Sequence[Fact]
    query: str
    hits: Sequence[int]
    hit_links: Sequence[tuple[int, str]]
    first: int
    pages: Sequence[Choice]
    verifier_log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContext(PageContext):
    template: ClassVar[str] = "error.html"
    status: int
    message: str
    advice: str = ""
    details: Sequence[str] = field(default_factory=tuple)
