"""Contexts of the analyst's pages: comparison, tasks, token view, reward audits, analysis of a cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from orchestrator import models as m
from orchestrator.compare_tables import Comparison, Flag, FourSuites, Group, MatrixRow, Optimism, Setting
from orchestrator.store.analysis_queries import AuditLine
from webui.contexts import Choice, CurveTable, Fact, PageContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickable:
    """One line of the picker."""

    checkpoint: m.Checkpoint
    colour: int
    cycle_name: str
    suites: str  # where it was measured
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePickContext(PageContext):
    template: ClassVar[str] = "compare_pick.html"
    rows: Sequence[Pickable]
    named: str  # checkpoints given by name, as typed
    query: str  # words that narrow the list
    error: str
    next_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One compared checkpoint that was measured on the suite; the base is the first."""

    id: int
    label: str
    colour: int
    cycle_id: int | None
    evaluation_id: int
    reference: bool  # another harness than the base's: below the rule, never ranked


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One paired difference with what makes it doubtful."""

    column: Column
    result: Comparison
    flags: Sequence[Flag]  # of the pair; those of one evaluation stand at its score


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    label: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    """The curves tab: what can be drawn, and the table behind."""

    names: Sequence[Choice]
    name: str
    smoothing: Sequence[Choice]
    scale: Sequence[Choice]
    src: str
    table: CurveTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareContext(PageContext):
    template: ClassVar[str] = "compare.html"
    suite: str
    view: str
    views: Sequence[Choice]
    suites: Sequence[Choice]
    bases: Sequence[Choice]
    conventions: Sequence[Choice]
    columns: Sequence[Column]
    unmeasured: Sequence[str]  # asked for, but without an evaluation on this suite
    change_href: str  # back to the picker with these chosen
    chart: str  # address of the figure, "" in views without one
    downloads: Sequence[Download]
    scores: Sequence[Mapping[str, Any]]
    score_flags: Sequence[tuple[str, str]]  # (checkpoint, sentence)
    differences: Sequence[Difference]
    references: Sequence[m.ReferenceRow]
    four: Sequence[tuple[Column, FourSuites]]
    four_names: Sequence[str]
    four_references: Sequence[m.ReferenceRow]
    rows: Sequence[MatrixRow]
    row_count: int  # before paging
    flips_only: Choice | None
    pages: Sequence[Choice]
    groups: Sequence[tuple[str, Sequence[Group]]]
    settings: Sequence[Setting]
    settings_toggle: Choice | None
    costs: Sequence[Mapping[str, Any]]
    curves: CurveView | None
    selections: Sequence[tuple[m.Stage, m.Selection]]
    optimism: Optimism | None
    best: str  # what choosing on this suite would choose


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """One task in one evaluation, with the attempts that are stored for it."""

    evaluation: m.Evaluation
    result: m.EvaluationTask
    name: str
    colour: int
    attempts: Sequence[m.Trajectory]
    wanted: bool  # named in the address
    anchor: str  # `c12` for a checkpoint's first row


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRate:
    """How often one check passed among the newest stored attempts."""

    id: str
    role: str
    passed: int
    failed: int
    not_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(PageContext):
    template: ClassVar[str] = "task.html"
    pool: str
    task: m.Task | None  # None: only its outcomes are stored
    task_id: str
    instruction: str
    facts: Sequence[Fact]
    versions: Sequence[tuple[m.Suite, m.Task]]  # newest first
    outcomes: Sequence[TaskOutcome]  # oldest first
    checks: Sequence[CheckRate]
    check_attempts: int
    attempts: Sequence[m.Trajectory]  # newest first, all phases
    expensive: Sequence[m.Trajectory]
    more_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One sampled token."""

    position: int  # in its segment
    id: int
    text: str
    log_prob: float | None
    learner_log_prob: float | None
    gap: float | None
    value: float | None
    advantage: float | None
    trained: bool  # inside the loss mask
    figure: float | None  # the shown quantity
    heat: int  # 0…4, strength of the shown quantity
    sign: str  # "▲", "▼" or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensContext(PageContext):
    template: ClassVar[str] = "tokens.html"
    trajectory: m.Trajectory
    turn: int
    action: str
    tokens: Sequence[TokenView]
    facts: Sequence[Fact]
    notes: Sequence[str]  # what is not stored, and why
    shades: Sequence[Choice]  # quantity that colours the tokens
    shade: str
    previous_href: str
    next_href: str
    more_href: str  # further tokens of the turn
    rule: str  # what the signs and shades mean


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditsContext(PageContext):
    template: ClassVar[str] = "audits.html"
    jobs: Sequence[m.AuditJob]  # asked for and not there yet
    rows: Sequence[AuditLine]
    same: Mapping[str, int]  # set digest -> how many of the shown audits re-scored it
    cycle: int | None
    next_href: str
    empty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One of an audit's failures."""

    trajectory: str
    family: str
    progress: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditContext(PageContext):
    template: ClassVar[str] = "audit.html"
    audit: m.Audit
    facts: Sequence[Fact]
    overall: Sequence[Mapping[str, Any]]  # one per formula
    families: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]  # family -> one row per formula
    lists: Sequence[tuple[str, str, Sequence[Listed], int]]  # (title, formula, shown, how many there are)
    chart: str
    histogram: CurveTable | None
    scales: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
    calibrations: Sequence[Mapping[str, Any]]
    drift: Sequence[Mapping[str, Any]]
    downloads: Sequence[Download]
    others: Sequence[AuditLine]  # of the same set


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFormContext(PageContext):
    template: ClassVar[str] = "audit_new.html"
    values: Mapping[str, str]  # as typed
    errors: Mapping[str, str]  # field -> what is wrong with it
    refused: str  # why it cannot be made now, though no field is wrong
    phases: Sequence[str]
    formulas: Sequence[tuple[str, str]]
    frozen: Sequence[tuple[str, str]]  # (CYCLE/STAGE, label) of stages with profiled scales
    suites: Sequence[str]
    allowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditJobContext(PageContext):
    template: ClassVar[str] = "audit_job.html"
    job: m.AuditJob
    state: str  # in words
    seconds: float  # since it was asked for
    allowed: bool  # may start it again


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspiciousContext(PageContext):
    template: ClassVar[str] = "suspicious.html"
    rows: Sequence[m.Trajectory]
    evidence: Mapping[str, str]  # trajectory -> the verifier's words
    expensive: Sequence[m.Trajectory]
    cycle: int | None
    next_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnalysis:
    stage: m.Stage
    tables: Sequence[CurveTable]
    alarm: str
    stale: Sequence[str]
    oversampling: CurveTable | None
    oversampling_note: str
    dropped: Sequence[str]  # ids, the first of them
    dropped_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleAnalysisContext(PageContext):
    template: ClassVar[str] = "cycle_analysis.html"
    cycle: m.Cycle
    tabs: Sequence[Choice]
    stages: Sequence[StageAnalysis]
    charts: Sequence[tuple[str, str]]  # (title, address)
