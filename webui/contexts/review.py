"""Contexts of the reviewer's pages: the queue, and one runbook beside its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from orchestrator import models as m
from orchestrator.review_look import Look
from orchestrator.review_statistics import ReviewStatistics
from orchestrator.store.review_queue import QueueRow
from webui.contexts import Choice, Fact, LiveContext, PageContext


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueItem:
    row: QueueRow
    findings: Sequence[tuple[str, str, int]]  # (part, severity, how many)
    claims: Sequence[m.ReviewClaim]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastVerdict:
    """What this person decided a moment ago, to be undone at once."""

    runbook_id: str
    task_id: str
    decision: str
    can_undo: bool
    planted: m.KnownLeak | None  # it was a known-leak item
    found: bool  # and was rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a form over several runbooks held before it came back."""

    ticked: frozenset[str] = frozenset()
    reason: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewsContext(LiveContext):
    template: ClassVar[str] = "reviews.html"
    rows: Sequence[QueueItem]
    filters: Sequence[tuple[str, Sequence[Choice]]]
    active: Sequence[Choice]  # cycle, stage or task that narrow the list; the link drops it
    hidden: Sequence[tuple[str, str]]  # parameters that the task form carries on
    task: str
    count: int
    count_capped: bool
    mine: bool  # only what waits for the viewer
    all_states: bool  # the list mixes states
    start_href: str  # the first that waits for the viewer; empty when nothing does
    next_href: str
    here: str  # address of this list, to come back to
    statistics: ReviewStatistics
    reviewers: Sequence[str]  # logins that can be assigned
    reasons: Sequence[tuple[int, str]]
    last: LastVerdict | None
    problem: str
    sent: Sent
    nothing: bool  # no runbook ever came to people


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of text; `findings` are those whose match it is part of."""

    text: str
    findings: Sequence[int] = ()  # numbers in the findings list, from 1
    hard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineView:
    number: int  # from 1
    spans: Sequence[Span]
    cites: Sequence[int]
    findings: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    number: int  # from 1
    row: m.Finding
    evidence: str  # empty where the viewer may not see it
    seen: bool
    dismissal: str  # what was typed before the form came back


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTurn:
    index: int
    action: str
    observation: str
    exit_code: int | None
    cited_by: Sequence[int]  # line numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRun:
    """Turns that follow each other; those that no line cites are folded away together."""

    cited: bool
    turns: Sequence[SourceTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenFile:
    name: str
    spans: Sequence[Span]
    findings: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewContext(PageContext):
    template: ClassVar[str] = "review.html"
    look: Look
    facts: Sequence[Fact]
    instruction: str
    lines: Sequence[LineView]
    findings: Sequence[FindingView]
    turns: Sequence[TurnRun]
    source_href: str
    cite_hrefs: Mapping[int, str]  # turn -> its place on this page, or on the trajectory's
    more_turns: int  # of the source that are not shown
    hidden_files: Sequence[HiddenFile] | None  # None: not asked for
    hidden_problem: str
    revisions: Sequence[Choice]
    changes: Sequence[tuple[str, str]]  # from the revision before: (sign, line)
    editing: bool
    edit_text: str
    reasons: Sequence[tuple[int, str]]
    reviewers: Sequence[str]
    may_decide: bool
    why_not: str  # what keeps the viewer from deciding
    claimed: bool  # by the viewer, or assigned to the viewer
    previous_href: str
    next_href: str
    place: str  # "3 of 17"
    last: LastVerdict | None
    keys: bool  # single-key shortcuts are on
    errors: Mapping[str, str]  # field -> what is wrong
    reason: str  # what was typed before the form came back
    number: int | None
