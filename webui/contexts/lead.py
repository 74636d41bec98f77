"""What the research lead's pages receive: launch, control, log, configuration, one stage; and everybody's inbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from orchestrator import models as m
from orchestrator.config_diff import Difference
from orchestrator.health import Watched
from orchestrator.store.notices import DeliveryEntry, InboxEntry
from webui.contexts import Choice, Cost, CurveTable, Fact, LiveContext, PageContext
from webui.forms.fields import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext(PageContext):
    template: ClassVar[str] = "launch.html"
    recipes: Sequence[Choice]
    source: str  # "recipe demo" or "cycle 12": what the fields were filled from
    recipe: str
    cloned_from: int | None
    base: str
    base_error: str
    bases: Sequence[tuple[str, str]]  # (reference, what it is) of recent checkpoints
    groups: Sequence[Group]
    advanced: str
    advanced_error: str
    problems: Sequence[tuple[str, str, str]]  # (control, label, what is wrong)
    checked: bool  # the form was sent, and everything that the launch checks was checked
    costs: Sequence[Cost]
    costs_from: str  # where the ranges come from
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelContext(PageContext):
    template: ClassVar[str] = "cancel.html"
    cycle: m.Cycle
    running: str  # what is going on now and stops


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsContext(LiveContext):
    template: ClassVar[str] = "logs.html"
    cycle: m.Cycle
    tabs: Sequence[Choice]
    log: Sequence[m.LogLine]
    levels: Sequence[Choice]
    stages: Sequence[Choice]
    level: int
    stage: str
    query: str
    first_error: m.LogLine | None
    error_href: str  # the page of lines that ends with the first error
    earlier_href: str
    newest_href: str  # empty on the newest page
    stream: str  # address of the live tail; empty where nothing comes any more


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigContext(PageContext):
    template: ClassVar[str] = "config.html"
    cycle: m.Cycle
    tabs: Sequence[Choice]
    formats: Sequence[Choice]
    text: str
    note: str  # why the text is not exact; empty where it is
    against_recipe: Sequence[Difference] | None  # None: the recipe is not shipped any more
    against_parent: Sequence[Difference] | None  # None: no clone


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChart:
    key: str
    title: str
    src: str
    table: CurveTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext(LiveContext):
    template: ClassVar[str] = "stage.html"
    cycle: m.Cycle
    stage: m.Stage
    tabs: Sequence[Choice]
    here: str
    facts: Sequence[Fact]
    phases: Sequence[tuple[m.StagePhase, Sequence[Fact]]]
    charts: Sequence[StageChart]
    smoothing: Sequence[Choice]
    scales: Sequence[Choice]
    health: Sequence[Watched]
    alarms: Sequence[tuple[m.Event, str]]
    certificate: Sequence[Fact]
    certificates: CurveTable
    selections: Sequence[m.Selection]
    empty: str  # what will stand here, while there is no step


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxContext(LiveContext):
    template: ClassVar[str] = "inbox.html"
    entries: Sequence[InboxEntry]
    unread_only: bool
    unread: int
    filters: Sequence[Choice]
    here: str
    next_href: str
    deliveries: Sequence[DeliveryEntry]  # of the webhook, for those who see the audit log
