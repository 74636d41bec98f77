"""`/`: what needs somebody, what runs, and the newest checkpoint beside its parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from orchestrator import models as m
from orchestrator.review_look import needs as needs_of
from orchestrator.store import Store
from orchestrator.store.console_queries import ConsoleQueries
from orchestrator.store.notices import InboxEntry
from orchestrator.store.review_queue import QueueFilter
from stages.errors import StoreError
from webui import urls
from webui.access import Action, needs, viewer_of
from webui.contexts import LatestCheckpoint, OverviewContext
from webui.pages.parts import LIVE, best_scores, queries_of, store_of, strips
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
UNREAD = 5  # notices; the inbox has all
MOST_WAITING = 100  # runbooks of a gate that are counted


@router.get("/", response_class=HTMLResponse)
def overview(request: Request) -> HTMLResponse:
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    running = queries.summaries(store.cycles.list(states=sorted(LIVE), limit=20).items)
    suspended = queries.summaries(store.cycles.list(states=[m.CycleState.SUSPENDED], limit=20).items)
    failed = queries.summaries(store.cycles.list(states=[m.CycleState.FAILED], limit=5).items)
    waiting = _waiting(request, [s.cycle.id for s in suspended if s.cycle.id is not None])
    context = OverviewContext(
        title="Overview",
        section="overview",
        events_after=after,
        unread=_unread(request, store),
        gates=[(s, waiting.get(s.cycle.id or 0, 0)) for s in suspended],
        failed=failed,
        running=running,
        strips=strips(queries, [*running, *suspended]),
        latest=_latest(store, queries),
        events=[(e, describe(e)) for e in queries.events(TOLD, limit=15)],
        empty=not store.cycles.list(limit=1).items,
    )
    return page(request, context)


def _waiting(request: Request, cycle_ids: Sequence[int]) -> Mapping[int, int]:
    """Cycle id -> runbooks that wait; for reviewers those that wait for them, planted leaks among them.

    A count of the real ones would fall with every verdict on a real one, and so betray the planted ones.
    """
    store, viewer = store_of(request), viewer_of(request)
    if not viewer.blind:
        return queries_of(request).waiting(cycle_ids)
    if not viewer.may(Action.DECIDE):
        return {}
    need = needs_of(store)
    return {
        i: store.review_queue.count(
            QueueFilter(mine=True, cycle_id=i), viewer.login, decider=True, needs=need, cap=MOST_WAITING
        )
        for i in cycle_ids
    }


def _unread(request: Request, store: Store) -> Sequence[InboxEntry]:
    viewer = viewer_of(request)
    if viewer.user_id is None or not viewer.may(Action.OWN_TOKENS):
        return ()
    return store.notices.inbox(viewer.user_id, unread=True, limit=UNREAD).items


TOLD = (
    m.EventKind.CYCLE_CREATED,
    m.EventKind.CYCLE_STATE,
    m.EventKind.STAGE_STATE,
    m.EventKind.CHECKPOINT_SAVED,
    m.EventKind.SELECTED,
    m.EventKind.EVALUATION_DONE,
    m.EventKind.ALARM,
)
"""Events that stand in the feed; the others move bars and curves."""


def describe(event: m.Event) -> str:
    """An event in a few words."""
    p = event.payload
    match event.kind:
        case m.EventKind.CYCLE_CREATED:
            return f"cycle {p.get('name', '')} created"
        case m.EventKind.CYCLE_STATE:
            return f"cycle {p.get('state', '')}"
        case m.EventKind.STAGE_STATE:
            return f"{p.get('stage', 'stage')} {p.get('state', '')}"
        case m.EventKind.CHECKPOINT_SAVED:
            return f"checkpoint {p.get('name', '')} saved"
        case m.EventKind.SELECTED:
            return f"{p.get('chosen', '')} kept"
        case m.EventKind.ALARM:
            return f"alarm in {p.get('stage', '')}, {p.get('phase', '')} step {p.get('step', '')}: {p.get('text', '')}"
        case m.EventKind.EVALUATION_DONE:
            return f"{p.get('checkpoint', '')} on {p.get('suite', '')}: {p.get('passed', '')}/{p.get('verdicts', '')}"
        case _:
            return event.kind.replace(".", " ")


def _latest(store: Store, queries: ConsoleQueries) -> Sequence[LatestCheckpoint]:
    """The newest measured checkpoint and what it came from."""
    rows = queries.latest_checkpoints()
    parents = store.checkpoints.many([r.actor_parent_id for r in rows if r.actor_parent_id is not None])
    ids = [i for r in rows for i in (r.id, r.actor_parent_id) if i is not None]
    scores = best_scores(queries.scores(checkpoint_ids=ids))
    found = []
    for row in rows:
        mine, theirs = scores.get(row.id or 0, {}), scores.get(row.actor_parent_id or 0, {})
        found.append(
            LatestCheckpoint(
                checkpoint=row,
                parent=parents.get(row.actor_parent_id or 0),
                suites=[(suite, score, theirs.get(suite)) for suite, score in mine.items()],
            )
        )
    return found


@router.get("/jump", include_in_schema=False)
def jump(request: Request, q: str = "") -> RedirectResponse:
    """A number is a cycle; `3/RPR-1` a checkpoint of it; hexadecimal digits a trajectory or a digest; else a name."""
    store, queries = store_of(request), queries_of(request)
    text = q.strip()
    number, _, name = text.partition("/")
    if number.isdecimal() and len(number) < 10:
        if name and (found := store.checkpoints.named(int(number), name)):
            return RedirectResponse(urls.checkpoint(found.id), status_code=303)
        if queries.cycle(int(number)):
            return RedirectResponse(urls.cycle(int(number)), status_code=303)
    if text and queries.trajectory(text):
        return RedirectResponse(urls.trajectory(text), status_code=303)
    try:
        found_by_digest = store.checkpoints.with_digest(text.lower())
    except StoreError:
        found_by_digest = []
    if found_by_digest:
        return RedirectResponse(urls.checkpoint(found_by_digest[0].id), status_code=303)
    return RedirectResponse(urls.cycles(q=text), status_code=303)
