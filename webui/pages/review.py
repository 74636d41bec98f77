"""`/reviews/{id}`: a runbook beside the trajectory that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from orchestrator import review_look, revising
from orchestrator.store import Store
from stages.domain import Severity
from stages.errors import RsiError, StoreError
from webui import formats, urls
from webui.access import Action, Viewer
from webui.contexts import Choice, Fact
from webui.contexts.review import FindingView, HiddenFile, LineView, ReviewContext, SourceTurn, Span, TurnRun
from webui.pages.parts import MAX_ID, missing, queries_of, store_of
from webui.pages.reviews import REASONS, SeeReviews, last_verdict, reviewers
from webui.rendering import page

router = APIRouter()
TURNS = 300  # of the source that stand on the page
NEAR = 2  # turns before the first cited one, where a long source begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """What was typed into a form that could not be taken, and why."""

    errors: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    number: int | None = None
    dismissals: Mapping[int, str] = field(default_factory=dict)
    edit_text: str | None = None


@router.get("/reviews/{runbook_id}", response_class=HTMLResponse)
def review(
    request: Request,
    runbook_id: str,
    viewer: SeeReviews,
    revision: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    hidden: bool = False,
    edit: bool = False,
    last: str = "",
) -> HTMLResponse:
    """`hidden`: with the hidden tests and the reference solution, which is logged. `last`: what was decided just now."""
    if hidden and not viewer.may(Action.SEE_HIDDEN):
        raise HTTPException(404)
    return show(request, runbook_id, viewer, revision=revision, hidden=hidden, edit=edit, last=last)


def show(
    request: Request,
    runbook_id: str,
    viewer: Viewer,
    *,
    revision: int | None = None,
    hidden: bool = False,
    edit: bool = False,
    last: str = "",
    typed: Typed | None = None,
    status: int = 200,
) -> HTMLResponse:
    store, typed, decider = store_of(request), typed or Typed(), viewer.may(Action.DECIDE)
    try:
        look = review_look.look(store, runbook_id, viewer.login, decider=viewer.blind, revision=revision)
    except StoreError as error:
        raise missing(f"runbook {runbook_id[:60]}") from error
    book = look.runbook
    files, problem = _hidden(store, viewer, look) if hidden else (None, "")
    turns, more = _turns(store, book)
    shown = {t.index for t in turns}
    place = _place(store, viewer, runbook_id) if decider else _Place()
    taken = [c for c in look.claims if c.expires_at is not None and c.login != viewer.login]
    full = bool(taken) and len(taken) >= max(1, (look.policy.required_reviewers if look.policy else 1) - look.people)
    row = queries_of(request).trajectory(book.source_trajectory_id)
    context = ReviewContext(
        title=f"Review of {book.task_id}",
        section="reviews",
        look=look,
        facts=_facts(look),
        instruction=queries_of(request).instruction(book.task_id, row.suite if row else ""),
        lines=_lines(book, look.findings),
        findings=[
            FindingView(
                number=i,
                row=f,
                evidence=review_look.evidence(f, hidden=viewer.may(Action.SEE_HIDDEN)),
                seen=f.id in look.seen,
                dismissal=typed.dismissals.get(f.id or 0, ""),
            )
            for i, f in enumerate(look.findings, start=1)
        ],
        turns=[TurnRun(cited=cited, turns=list(run)) for cited, run in groupby(turns, lambda t: bool(t.cited_by))],
        source_href=urls.trajectory(book.source_trajectory_id),
        cite_hrefs={
            t: f"#t{t}" if t in shown else urls.trajectory(book.source_trajectory_id, turn=t, first=t // 500 * 500)
            for line in book.lines
            for t in line["cites"]
        },
        more_turns=more,
        hidden_files=files,
        hidden_problem=problem,
        revisions=_revisions(look),
        changes=_changes(look),
        editing=(edit or typed.edit_text is not None) and viewer.may(Action.REVISE) and not look.closed,
        edit_text=revising.as_text(book.lines) if typed.edit_text is None else typed.edit_text,
        reasons=REASONS,
        reviewers=reviewers(store) if viewer.may(Action.ASSIGN) else [],
        may_decide=decider and not _why_not(look, viewer, full),
        why_not=_why_not(look, viewer, full) if decider else "",
        claimed=any(c.login == viewer.login for c in look.claims),
        previous_href=place.previous,
        next_href=place.next,
        place=place.text,
        last=last_verdict(store, last, viewer) if last else None,
        keys=_keys(store, viewer),
        errors=typed.errors,
        reason=typed.reason,
        number=typed.number,
    )
    answer = page(request, context, status=status)
    if hidden:
        answer.headers["Cache-Control"] = "no-store"
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    previous: str = ""
    next: str = ""
    text: str = ""


def _place(store: Store, viewer: Viewer, runbook_id: str) -> _Place:
    """Where the runbook stands in the viewer's queue. One that is not in it is followed by the queue's first."""
    queue = review_look.queue_of(store, viewer.login)
    if runbook_id not in queue:
        return _Place(next=urls.review(queue[0]) if queue else "")
    at = queue.index(runbook_id)
    return _Place(
        previous=urls.review(queue[at - 1]) if at else "",
        next=urls.review(queue[at + 1]) if at + 1 < len(queue) else "",
        text=f"{at + 1} of {len(queue)}",
    )


def _why_not(look: review_look.Look, viewer: Viewer, full: bool) -> str:
    """What keeps this reviewer from deciding here; empty when nothing does."""
    if not look.current:
        return "This is an older revision; verdicts are given on the newest."
    if look.planted is not None:
        return "This was a known-leak item. Its verdict stays."
    if look.closed:
        return "The replay phase has begun: the gate has taken what was approved, and verdicts stay."
    if look.runbook.author == viewer.login:
        return "You wrote this revision; somebody else must decide on it."
    if full:
        return "Others have claimed the places that are left."
    return ""


def _facts(look: review_look.Look) -> list[Fact]:
    book = look.runbook
    facts = [
        Fact(label="Task", value=book.task_id, mono=True),
        Fact(label="Runbook", value=book.id, mono=True),
        Fact(label="Written by", value=f"{book.author}, after {book.planner}" if book.author else book.planner),
        Fact(label="Waits since", value=formats.when(book.created_at)),
    ]
    if look.stage is not None:
        where = f"cycle {look.stage.cycle_id}, {look.stage.name}"
        facts.insert(1, Fact(label="Gate", value=where, href=urls.cycle(look.stage.cycle_id)))
    if look.policy is not None:
        n = look.policy.required_reviewers
        facts.append(Fact(label="Needs", value=f"{n} reviewer{'' if n == 1 else 's'}"))
    return facts


def _lines(book: m.Runbook, findings: Sequence[m.Finding]) -> list[LineView]:
    views = []
    for i, line in enumerate(book.lines):
        mine = [(n, f) for n, f in enumerate(findings, start=1) if f.line == i]
        marks = [(f.start, f.end, n, f.severity is Severity.HARD) for n, f in mine]
        views.append(
            LineView(number=i + 1, spans=spans(line["text"], marks), cites=line["cites"], findings=[n for n, _ in mine])
        )
    return views


def spans(text: str, marks: Sequence[tuple[int, int, int, bool]]) -> list[Span]:
    """A text cut where marks (start, end, finding, hard) begin and end; overlapping marks share a piece."""
    held = [(a, min(b, len(text)), n, hard) for a, b, n, hard in marks if 0 <= a < min(b, len(text))]
    cuts = sorted({0, len(text), *(c for a, b, _, _ in held for c in (a, b))})
    pieces = []
    for start, end in pairwise(cuts):
        over = [(n, hard) for a, b, n, hard in held if a <= start and end <= b]
        pieces.append(
            Span(
                text=formats.visible(text[start:end]),
                findings=[n for n, _ in over],
                hard=any(hard for _, hard in over),
            )
        )
    return pieces


def _turns(store: Store, book: m.Runbook) -> tuple[list[SourceTurn], int]:
    """The source's turns; how many are left out."""
    cited: dict[int, list[int]] = {}
    for number, line in enumerate(book.lines, start=1):
        for turn in line["cites"]:
            cited.setdefault(turn, []).append(number)
    try:
        row = store.trajectories.get(book.source_trajectory_id)
    except StoreError:
        return [], 0  # imported runbooks have no stored source; the page says so
    first = max(0, min(cited, default=0) - NEAR) if row.n_turns > TURNS else 0
    found = store.trajectories.detail(row.id, first_turn=first, turns=TURNS).turns
    views = [
        SourceTurn(
            index=t.index,
            action=formats.visible(t.action),
            observation=formats.visible(t.observation),
            exit_code=t.exit_code,
            cited_by=cited.get(t.index, []),
        )
        for t in found
    ]
    return views, row.n_turns - len(views)


def _hidden(store: Store, viewer: Viewer, look: review_look.Look) -> tuple[list[HiddenFile] | None, str]:
    """The hidden files with what the findings match in them; the look is logged."""
    try:
        texts = review_look.look_at_hidden(store, look.runbook.id, viewer.login)
    except RsiError as error:
        return None, str(error)
    files = []
    for name, text in texts.items():
        marks = []
        for n, f in enumerate(look.findings, start=1):
            if f.evidence and f.evidence_source.startswith(name) and (at := _matched(text, f)) >= 0:
                marks.append((at, at + len(f.evidence), n, f.severity is Severity.HARD))
        files.append(HiddenFile(name=name, spans=spans(text, marks), findings=[n for _, _, n, _ in marks]))
    return files, ""


def _matched(text: str, finding: m.Finding) -> int:
    """Where the evidence stands in a hidden file, from the line on that the finding names; -1 when it does not."""
    line = finding.evidence_source.rpartition(":")[2]
    start = 0
    if line.isdecimal():
        start = sum(len(row) for row in text.splitlines(keepends=True)[: int(line) - 1])
    return text.lower().find(finding.evidence.lower(), start)


def _revisions(look: review_look.Look) -> list[Choice]:
    return [
        Choice(
            value=str(r.revision),
            label=f"{r.revision} by {r.author or r.planner}",
            href=urls.review(r.id, revision=r.revision),
            active=r.revision == look.runbook.revision,
        )
        for r in look.revisions
    ]


def _changes(look: review_look.Look) -> list[tuple[str, str]]:
    before = [r for r in look.revisions if r.revision < look.runbook.revision]
    return [(s, formats.visible(t)) for s, t in revising.changes(before[-1], look.runbook)] if before else []


def _keys(store: Store, viewer: Viewer) -> bool:
    if viewer.user_id is None:
        return True
    return bool(store.users.get(viewer.user_id).preferences.get("review_keys", True))
