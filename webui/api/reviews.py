"""Runbooks under review: the queue, one runbook, verdicts, undo, edits, claims, comments. Blind as the pages are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import Field

from orchestrator import models as m
from orchestrator import review_look, reviewing, revising
from orchestrator.store.review_queue import QueueFilter, QueueRow
from stages.domain import Decision, LeakPart, RunbookLine, Severity
from stages.errors import StoreError
from webui.access import Action, Viewer, needs
from webui.api.listing import Body, Found, Reader, Shape, also, listing, noun_router
from webui.pages.parts import MAX_ID, missing, store_of
from webui.pages.review_forms import known
from webui.pages.reviews import SeeReviews, position, queue_filter

router = noun_router("reviews")
twins = APIRouter()
Decides = Annotated[Viewer, Depends(needs(Action.DECIDE))]
Words = Annotated[str, Field(max_length=10_000)]


class Waiting(Shape):
    """One runbook in the queue, without what others decided."""

    id: str
    revision: int
    task_id: str
    state: m.RunbookState
    author: str
    n_lines: int
    since: datetime
    stage_id: int
    stage: str
    cycle_id: int
    cycle: str
    people: int | None = Field(description="standing verdicts of people; null while you are blind")
    my_verdict: str | None
    claimed: bool = Field(description="by you, or assigned to you")
    claimed_by_others: int
    skipped: bool
    planted: bool = Field(description="a known leak; said after your own verdict only")


class LineOf(Shape):
    text: str
    cites: list[int]


class FindingOf(Shape):
    id: int
    part: LeakPart
    severity: Severity
    rule: str
    message: str
    line: int | None
    start: int
    end: int
    evidence: str
    evidence_source: str
    seen: bool


class ReviewVerdict(Shape):
    reviewer: str
    revision: int
    decision: m.ReviewDecision
    reason: str
    created_at: datetime


class Comment(Shape):
    login: str
    revision: int
    text: str
    created_at: datetime


class Claim(Shape):
    login: str
    assigned_by: str
    expires_at: datetime | None = Field(description="null: assigned, not claimed")


class Planted(Shape):
    kind: str
    line: int
    truth: str


class Runbook(Shape):
    """A runbook as you may see it."""

    id: str
    revision: int
    newest: int
    task_id: str
    state: m.RunbookState
    source_trajectory_id: str
    planner: str
    author: str
    stage_id: int | None
    cycle_id: int | None
    lines: list[LineOf]
    findings: list[FindingOf]
    mine: ReviewVerdict | None
    others: list[ReviewVerdict] = Field(description="empty while you are blind")
    hidden: int = Field(description="verdicts that are hidden until yours")
    comments: list[Comment]
    claims: list[Claim]
    closed: bool = Field(description="the gate has consumed it")
    hard: bool = Field(description="it cannot be approved, only revised")
    planted: Planted | None


class HiddenFile(Shape):
    name: str
    text: str


class Decide(Body):
    decision: Decision
    reason: Words = ""
    number: int | None = Field(default=None, description="reason 1 to 9 of a rejection")
    revision: int | None = Field(default=None, description="what you looked at; a newer one refuses the verdict")
    seen: list[int] = Field(default=[], max_length=1000, description="ids of findings that you have seen")
    dismissals: dict[int, Words] = Field(default={}, description="finding id: why a soft finding may stay")


class DecideOutcome(Shape):
    state: Literal["pending", "approved", "rejected"] | None = Field(
        description="of its gate; null for a known leak, which no gate counts"
    )
    waiting: int = Field(description="runbooks of the stage that still need people")
    open: bool
    planted: Planted | None


class Lines(Body):
    revision: int = Field(ge=1, le=MAX_ID, description="the one that was edited")
    lines: list[LineOf] = Field(max_length=2000)


class Login(Body):
    login: str = Field(default="", max_length=100, description="empty: you")


class Text(Body):
    text: Words


class Many(Body):
    runbooks: list[str] = Field(min_length=1, max_length=500)
    reason: Words = ""
    number: int | None = None


class Rejected(Shape):
    rejected: int


def queue(request: Request, viewer: SeeReviews, where: Annotated[QueueFilter, Depends(queue_filter)]) -> Reader:
    """`mine`: only what waits for you."""
    store, blind = store_of(request), viewer.blind

    def read(cursor: str | None, limit: int) -> Found:
        need = review_look.needs(store)
        after = position(cursor or "")
        rows = store.review_queue.rows(where, viewer.login, decider=blind, needs=need, after=after, limit=limit + 1)
        shown = rows[:limit]
        following = f"{shown[-1].stage_id}.{shown[-1].id}" if len(rows) > limit else None
        return Found(items=[_waiting(row, blind) for row in shown], next=following)

    return read


listing(
    router,
    "/reviews",
    Waiting,
    queue,
    says="The review queue, oldest gate first",
    action=Action.SEE_REVIEWS,
    twins=twins,
)


@router.get("/reviews/{runbook_id}", response_model=Runbook)
def get_runbook(request: Request, runbook_id: str, viewer: SeeReviews) -> Runbook:
    """Its newest revision."""
    return _runbook(request, runbook_id, viewer)


@router.get("/reviews/{runbook_id}/hidden", response_model=list[HiddenFile])
def get_hidden(
    request: Request, runbook_id: str, viewer: Annotated[Viewer, Depends(needs(Action.SEE_HIDDEN))]
) -> list[HiddenFile]:
    """Hidden tests and the reference solution. Every look is logged."""
    texts = review_look.look_at_hidden(known(request, runbook_id), runbook_id, viewer.login)
    return [HiddenFile(name=name, text=text) for name, text in texts.items()]


@router.post("/reviews/{runbook_id}/decide", response_model=DecideOutcome, responses=also(503))
def decide(request: Request, runbook_id: str, viewer: Decides, body: Decide) -> DecideOutcome:
    """Approve or reject, under your name. 422 says which rule refuses it."""
    done = reviewing.decide(
        known(request, runbook_id),
        runbook_id,
        viewer.login,
        body.decision,
        reason=body.reason,
        number=body.number,
        dismissals=body.dismissals,
        seen=body.seen,
        revision=body.revision,
        settings=request.app.state.settings,
    )
    return _outcome(done)


@router.post("/reviews/{runbook_id}/undo", response_model=DecideOutcome)
def undo(request: Request, runbook_id: str, viewer: Decides) -> DecideOutcome:
    """Take your verdict back, until the gate has consumed the runbook."""
    return _outcome(reviewing.undo(known(request, runbook_id), runbook_id, viewer.login))


@router.post("/reviews/{runbook_id}/revise", response_model=Runbook, responses=also(503))
def revise(
    request: Request, runbook_id: str, viewer: Annotated[Viewer, Depends(needs(Action.REVISE))], body: Lines
) -> Runbook:
    """A new revision, re-checked by the rules; verdicts on older ones no longer count."""
    lines = [RunbookLine(text=line.text, cites=tuple(line.cites)) for line in body.lines]
    try:
        revising.revise(
            known(request, runbook_id),
            runbook_id,
            viewer.login,
            lines,
            revision=body.revision,
            settings=request.app.state.settings,
        )
    except StoreError as error:  # its source is not stored
        raise HTTPException(422, str(error)) from error
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/{runbook_id}/claim", response_model=Runbook)
def claim(request: Request, runbook_id: str, viewer: Decides) -> Runbook:
    """Keep others out for 30 minutes."""
    reviewing.claim(known(request, runbook_id), runbook_id, viewer.login)
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/{runbook_id}/release", response_model=Runbook)
def release(
    request: Request, runbook_id: str, viewer: Annotated[Viewer, Depends(needs(Action.ASSIGN))], body: Login
) -> Runbook:
    """End your claim, or an assignment of `login`'s."""
    reviewing.release(known(request, runbook_id), runbook_id, body.login or viewer.login, by=viewer.login)
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/{runbook_id}/assign", response_model=Runbook)
def assign(
    request: Request, runbook_id: str, viewer: Annotated[Viewer, Depends(needs(Action.ASSIGN))], body: Login
) -> Runbook:
    reviewing.assign(known(request, runbook_id), runbook_id, body.login or viewer.login, by=viewer.login)
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/{runbook_id}/skip", response_model=Runbook)
def skip(request: Request, runbook_id: str, viewer: Decides) -> Runbook:
    """Put it at the end of your queue."""
    reviewing.skip(known(request, runbook_id), runbook_id, viewer.login)
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/{runbook_id}/comment", response_model=Runbook)
def comment(request: Request, runbook_id: str, viewer: Decides, body: Text) -> Runbook:
    reviewing.comment(known(request, runbook_id), runbook_id, viewer.login, body.text)
    return _runbook(request, runbook_id, viewer)


@router.post("/reviews/reject", response_model=Rejected, responses=also(503))
def reject_many(request: Request, viewer: Decides, body: Many) -> Rejected:
    """Reject several for one reason, all or none. There is no such thing for approvals."""
    for runbook_id in body.runbooks:
        known(request, runbook_id)
    done = reviewing.reject_many(
        store_of(request),
        body.runbooks,
        viewer.login,
        reason=body.reason,
        number=body.number,
        settings=request.app.state.settings,
    )
    return Rejected(rejected=done)


def _outcome(done: reviewing.Outcome) -> DecideOutcome:
    return DecideOutcome(
        state=done.state.status.value if done.state else None,
        waiting=done.waiting,
        open=done.open,
        planted=Planted.model_validate(done.planted) if done.planted else None,
    )


def _waiting(row: QueueRow, blind: bool) -> Waiting:
    own = {name: getattr(row, name) for name in Waiting.model_fields}
    hidden = blind and row.my_verdict is None
    return Waiting(
        **own | {"people": None if hidden else row.people, "planted": row.planted and row.my_verdict is not None}
    )


def _runbook(request: Request, runbook_id: str, viewer: Viewer) -> Runbook:
    try:
        look = review_look.look(store_of(request), runbook_id, viewer.login, decider=viewer.blind)
    except StoreError as error:
        raise missing(f"runbook {runbook_id[:60]}") from error
    book = look.runbook
    row: dict[str, Any] = {
        n: getattr(book, n) for n in ("id", "revision", "task_id", "state", "source_trajectory_id", "planner", "author")
    }
    told: dict[str, Any] = {n: getattr(look, n) for n in ("newest", "mine", "hidden", "closed", "hard", "planted")}
    lists: dict[str, Sequence[Any]] = {n: list(getattr(look, n)) for n in ("others", "comments", "claims")}
    found = {
        "lines": book.lines,
        "findings": [
            FindingOf(
                **{n: getattr(f, n) for n in FindingOf.model_fields if n not in ("seen", "evidence")},
                evidence=review_look.evidence(f, hidden=viewer.may(Action.SEE_HIDDEN)),
                seen=f.id in look.seen,
            )
            for f in look.findings
        ],
        # of the gate it is shown at, not of its row: a known leak's row belongs to none, and that would betray it
        "stage_id": look.stage.id if look.stage else None,
        "cycle_id": look.stage.cycle_id if look.stage else None,
    }
    return Runbook.model_validate(row | told | lists | found)
