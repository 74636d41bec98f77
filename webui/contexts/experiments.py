"""Contexts of the experiments' pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from orchestrator import models as m
from orchestrator.experiments.progress import Progress
from orchestrator.experiments.report import ExperimentReport, RunResult
from webui.charts.ev_arms import EVPanel
from webui.charts.forest import Forest
from webui.contexts import CurveTable, LiveContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentsContext(LiveContext):
    template: ClassVar[str] = "experiments.html"
    rows: Sequence[tuple[m.Experiment, Progress]]
    shipped: Sequence[tuple[str, str]]  # name and question of the specifications that come with the package
    next_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One arm over the seeds, on one suite."""

    name: str
    title: str
    changes: str
    departures: Sequence[str]
    cells: Sequence[tuple[RunResult, tuple[int, int] | None]]  # by seed: the run, and passed / verdicts
    mean: float | None  # over seeds, once all are done


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTable:
    suite: str
    measured: str  # tasks, attempts, settings
    arms: Sequence[ArmRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectTable:
    """One outcome: its plot, and the table behind it."""

    outcome: str
    is_rate: bool
    plot: Forest | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentContext(LiveContext):
    template: ClassVar[str] = "experiment.html"
    report: ExperimentReport
    shown: Sequence[str]
    not_shown: Sequence[str]
    suites: Sequence[SuiteTable]
    effects: Sequence[EffectTable]
    ev: Sequence[EVPanel]
    ev_table: CurveTable | None
    command: str  # that runs it, or goes on with it
    downloads: Sequence[tuple[str, str]]  # label, address
