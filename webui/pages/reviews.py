"""`/reviews`: the queue, what reviewers agree on, and forms over several runbooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Form, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import models as m
from orchestrator import review_look, reviewing
from orchestrator.review_statistics import review_statistics
from orchestrator.store import Store
from orchestrator.store.review_queue import COUNT_CAP, STATES, QueueFilter, QueueRow
from stages.errors import ConfigError, StoreError
from webui import urls
from webui.access import Action, Viewer, needs
from webui.contexts import Choice
from webui.contexts.review import LastVerdict, QueueItem, ReviewsContext, Sent
from webui.pages.parts import QueryId, choices, store_of
from webui.rendering import page
from webui.sign_in import local_path

router = APIRouter()
PAGE = 50
DIGITS = 10  # of a number that a form sends; Python refuses to read thousands of them
LABELS = {
    "open": "open",
    "approved": "approved",
    "rejected": "rejected",
    "consumed": "consumed by a replay",
    "all": "all",
}
REASONS = list(enumerate(reviewing.REASONS, start=1))
SeeReviews = Annotated[Viewer, Depends(needs(Action.SEE_REVIEWS))]
Decide = Annotated[Viewer, Depends(needs(Action.DECIDE))]


def queue_filter(
    viewer: SeeReviews,
    state: str = "open",
    mine: bool = False,
    claimed: bool = False,
    cycle: QueryId = None,
    stage: QueryId = None,
    task: str = "",
) -> QueueFilter:
    """A dependency: what the address narrows the queue to. `mine`: what waits for the viewer. Raises 422."""
    if state not in STATES:
        raise HTTPException(422, f"state cannot be {state[:40]!r}; it is one of {', '.join(STATES)}")
    return QueueFilter(
        state=state,
        mine=mine and viewer.may(Action.DECIDE),
        claimed=claimed,
        cycle_id=cycle,
        stage_id=stage,
        task_id=task.strip(),
    )


@router.get("/reviews", response_class=HTMLResponse)
def reviews(
    request: Request,
    viewer: SeeReviews,
    where: Annotated[QueueFilter, Depends(queue_filter)],
    after: str = "",
    last: str = "",
) -> HTMLResponse:
    """`after`: "stage.runbook" of the last row of the page before."""
    return _page(request, viewer, where, dict(request.query_params), after=after, last=last)


@router.post("/reviews/reject", response_class=HTMLResponse)
def bulk_reject(
    request: Request,
    viewer: Decide,
    runbook: Annotated[list[str] | None, Form()] = None,
    number: Annotated[str, Form(max_length=2)] = "",
    reason: Annotated[str, Form(max_length=2000)] = "",
    back: Annotated[str, Form(max_length=2000)] = "/reviews",
) -> Response:
    """Reject the ticked runbooks for one reason. Approvals go one by one."""
    store, settings = store_of(request), request.app.state.settings

    def reject(ids: Sequence[str]) -> None:
        reviewing.reject_many(store, ids, viewer.login, reason=reason, number=number_of(number), settings=settings)

    return _ticked(request, viewer, runbook or [], back, reject, reason=reason, number=number_of(number))


@router.post("/reviews/assign", response_class=HTMLResponse)
def bulk_assign(
    request: Request,
    viewer: Annotated[Viewer, Depends(needs(Action.ASSIGN))],
    runbook: Annotated[list[str] | None, Form()] = None,
    assignee: Annotated[str, Form(max_length=100)] = "",
    back: Annotated[str, Form(max_length=2000)] = "/reviews",
) -> Response:
    """Put the ticked runbooks into somebody's queue."""
    store = store_of(request)

    def assign(ids: Sequence[str]) -> None:
        with store.transaction():
            for runbook_id in ids:
                reviewing.assign(store, runbook_id, assignee, by=viewer.login)

    return _ticked(request, viewer, runbook or [], back, assign)


def _ticked(
    request: Request,
    viewer: Viewer,
    ids: Sequence[str],
    back: str,
    act: Callable[[Sequence[str]], None],
    *,
    reason: str = "",
    number: int | None = None,
) -> Response:
    """Do something with all ticked runbooks or with none, and go back to the list that they were ticked in.

    A refusal keeps the ticks, the `reason` and its `number`.
    """
    back = _queue_path(back)
    try:
        if not ids:
            raise reviewing.ReviewRefused("Tick some runbooks first")
        act(ids)
    except (ConfigError, StoreError) as error:
        query = {k: v[0] for k, v in parse_qs(urlsplit(back).query).items()}
        sent = Sent(ticked=frozenset(ids), reason=reason, number=number)
        return _page(request, viewer, _where(query), query, problem=str(error), sent=sent, status=422)
    return RedirectResponse(back, 303)


@router.post("/reviews/keys")
def keys(
    request: Request,
    viewer: Annotated[Viewer, Depends(needs(Action.OWN_TOKENS))],
    on: Annotated[bool, Form()],
    back: Annotated[str, Form(max_length=2000)] = "/reviews",
) -> Response:
    """Single-key shortcuts on or off (WCAG 2.1.4); kept with the person."""
    store = store_of(request)
    if viewer.user_id is not None:
        user = store.users.get(viewer.user_id)
        store.users.set_preferences(viewer.user_id, {**user.preferences, "review_keys": on})
        store.audit_trail.add(viewer.login, "preferences.change", object_kind="user", object_id=viewer.user_id)
    return RedirectResponse(local_path(back), 303)


def number_of(text: str) -> int | None:
    """A reason's number; anything else is none, which the rules then refuse with words."""
    return int(text) if text.isdecimal() and len(text) < DIGITS else None


def last_verdict(store: Store, runbook_id: str, viewer: Viewer) -> LastVerdict | None:
    """What the viewer decided on that runbook; None for an address that names no such verdict."""
    try:
        seen = review_look.look(store, runbook_id, viewer.login, decider=viewer.blind)
    except StoreError:
        return None
    if seen.mine is None:
        return None
    return LastVerdict(
        runbook_id=runbook_id,
        task_id=seen.runbook.task_id,
        decision=seen.mine.decision.value,
        can_undo=not seen.closed,
        planted=seen.planted,
        found=seen.mine.decision is m.ReviewDecision.REJECT,
    )


def reviewers(store: Store) -> list[str]:
    return [u.login for u in store.users.list(role=m.Role.REVIEWER)]


def _where(query: dict[str, str]) -> QueueFilter:
    """The filter of a list that a form came from."""

    def number(name: str) -> int | None:
        return number_of(query.get(name, ""))

    return QueueFilter(
        state=query.get("state", "open") if query.get("state", "open") in STATES else "open",
        mine=query.get("mine") == "1",
        claimed=query.get("claimed") == "1",
        cycle_id=number("cycle"),
        stage_id=number("stage"),
        task_id=query.get("task", ""),
    )


def _queue_path(back: str) -> str:
    path = local_path(back)
    return path if urlsplit(path).path == "/reviews" else urls.reviews()


def _page(
    request: Request,
    viewer: Viewer,
    where: QueueFilter,
    query: dict[str, str],
    *,
    after: str = "",
    last: str = "",
    problem: str = "",
    sent: Sent = Sent(),  # noqa: B008  # frozen
    status: int = 200,
) -> HTMLResponse:
    store, decider = store_of(request), viewer.may(Action.DECIDE)
    after_event = store.events.last_id()
    need = review_look.needs(store)
    rows = list(
        store.review_queue.rows(where, viewer.login, decider=decider, needs=need, after=position(after), limit=PAGE + 1)
    )
    count = store.review_queue.count(where, viewer.login, decider=viewer.blind, needs=need, cap=COUNT_CAP)
    shown = rows[:PAGE]
    first = review_look.queue_of(store, viewer.login, limit=1) if decider else []
    query = {k: v for k, v in query.items() if v and k not in ("after", "last")}

    def href(**changes: object) -> str:
        return urls.reviews(**{**query, **changes})

    context = ReviewsContext(
        title="Reviews",
        section="reviews",
        events_after=after_event,
        rows=_items(store, shown),
        filters=[
            (
                "state",
                choices(_states(), "" if where.mine else where.state, lambda v: href(state=v, mine=None), every="")[1:],
            ),
            *([("whose", _whose(where, href))] if decider else []),
        ],
        active=_active(store, where, href),
        hidden=[(k, v) for k, v in query.items() if k != "task"],
        task=where.task_id,
        count=min(count, COUNT_CAP),
        count_capped=count >= COUNT_CAP,
        mine=where.mine,
        all_states=where.state == "all" and not where.mine,
        start_href=urls.review(first[0]) if first else "",
        next_href=href(after=f"{shown[-1].stage_id}.{shown[-1].id}") if len(rows) > PAGE else "",
        here=href(),
        statistics=review_statistics(store, blind_to=viewer.login if viewer.blind else None),
        reviewers=reviewers(store) if viewer.may(Action.ASSIGN) else [],
        reasons=REASONS,
        last=last_verdict(store, last, viewer) if last else None,
        problem=problem,
        sent=sent,
        nothing=not rows and not store.review_queue.any(),
    )
    return page(request, context, status=status)


def _states() -> list[tuple[str, str]]:
    return list(LABELS.items())


def _whose(where: QueueFilter, href: object) -> list[Choice]:
    assert callable(href)
    return [
        Choice(
            value="",
            label="everybody's",
            href=href(mine=None, claimed=None),
            active=not where.mine and not where.claimed,
        ),
        Choice(value="1", label="waits for me", href=href(mine=1, claimed=None, state=None), active=where.mine),
        Choice(value="c", label="claimed by or assigned to me", href=href(claimed=1, mine=None), active=where.claimed),
    ]


def _active(store: Store, where: QueueFilter, href: object) -> Sequence[Choice]:
    assert callable(href)
    shown = [("cycle", where.cycle_id), ("stage", where.stage_id), ("task", where.task_id or None)]
    labels = {"stage": lambda i: _stage_name(store, i)}
    return [
        Choice(value=str(v), label=f"{k} {labels.get(k, str)(v)}", href=href(**{k: None}), active=True)
        for k, v in shown
        if v is not None
    ]


def _stage_name(store: Store, stage_id: object) -> str:
    try:
        stage = store.stages.get(int(str(stage_id)))
    except StoreError:
        return str(stage_id)
    return f"{stage.name} of cycle {stage.cycle_id}"


def _items(store: Store, rows: Sequence[QueueRow]) -> list[QueueItem]:
    findings = store.review_queue.finding_counts([(r.id, r.revision) for r in rows])
    claims = store.review_queue.claims([r.id for r in rows])
    return [QueueItem(row=r, findings=findings.get(r.id, []), claims=claims.get(r.id, [])) for r in rows]


def position(after: str) -> tuple[int, str] | None:
    """The row after which a page of the queue begins. Raises 422."""
    stage, _, runbook = after.partition(".")
    if not after:
        return None
    if not stage.isdecimal() or len(stage) > 9 or not runbook:
        raise HTTPException(422, "after is no position in this list")
    return int(stage), runbook
