"""Server-sent events: a signal wakes an element, which fetches its own fragment. Only log lines are pushed as content.

The id of an SSE message is the id of its event row (`120`; with a log tail `120.45`, the second number being the newest
log line), so a reader that lost the connection gets what it missed through `Last-Event-ID`. One `Pulse` asks the database for the newest id on behalf of all open pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from orchestrator import models as m
from orchestrator.store import Store
from stages.errors import StoreError
from webui.access import Action, needs
from webui.pages.parts import Before, QueryId
from webui.rendering import fragment
from webui.sign_in import still_may

PULSE_S = 0.5  # how often the newest id is read while a page is open
KEEP_ALIVE_S = 15.0  # a comment, so that proxies and browsers keep the connection
ASK_AGAIN_S = 15.0  # how long a stream outlives the right to read it
BATCH = 500

# What an event wakes. Several events of a moment become one signal.
SIGNALS = {
    m.EventKind.CYCLE_CREATED: "rsi-cycle",
    m.EventKind.CYCLE_STATE: "rsi-cycle",
    m.EventKind.STAGE_STATE: "rsi-stage",
    m.EventKind.PHASE_STARTED: "rsi-stage",
    m.EventKind.PHASE_DONE: "rsi-stage",
    m.EventKind.PROGRESS: "rsi-progress",
    m.EventKind.ATTEMPTS: "rsi-attempts",
    m.EventKind.SURPLUS_DROPPED: "rsi-attempts",
    m.EventKind.STEP_DONE: "rsi-step",
    m.EventKind.CHECKPOINT_SAVED: "rsi-checkpoint",
    m.EventKind.SELECTED: "rsi-checkpoint",
    m.EventKind.EVALUATION_DONE: "rsi-checkpoint",
    m.EventKind.RUNBOOK_WRITTEN: "rsi-runbook",
    m.EventKind.RUNBOOK_REVIEWED: "rsi-runbook",
    m.EventKind.REPLAY_JUDGED: "rsi-runbook",
    m.EventKind.REVIEWS_CHANGED: "rsi-reviews",
    m.EventKind.LOG: "rsi-log",
}

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])


class Pulse:
    """Wakes every subscriber when the newest event id grows. Asks only while somebody listens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest = 0
        self._listeners = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, after: int, timeout_s: float) -> bool:
        """True once an event above `after` exists; False when `timeout_s` passed without one."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat())
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._newest > after), timeout_s)
            return True
        except TimeoutError:
            return False
        finally:
            self._listeners -= 1

    async def _beat(self) -> None:
        idle = 0
        while self._listeners or idle < 10:
            idle = 0 if self._listeners else idle + 1
            try:
                newest = await run_in_threadpool(self._store.events.last_id)
            except StoreError:
                newest = self._newest  # the database is away: pages show it, the stream waits
            if newest > self._newest:
                async with self._changed:
                    self._newest = newest
                    self._changed.notify_all()
            await asyncio.sleep(PULSE_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def message(event_id: int, name: str = "", data: str = "", *, log_id: int | None = None) -> str:
    """One SSE message. Without a name htmx swaps its data in as content."""
    lines = [f"id: {event_id}" if log_id is None else f"id: {event_id}.{log_id}"]
    if name:
        lines.append(f"event: {name}")
    lines += [f"data: {line}" for line in data.split("\n")]
    return "\n".join(lines) + "\n\n"


def signals(events: Sequence[m.Event]) -> list[tuple[int, str]]:
    """(newest id, name) of each signal that a batch of events gives, in order of that id."""
    newest: dict[str, int] = {}
    for event in events:
        name = SIGNALS.get(m.EventKind(event.kind)) if event.kind in set(m.EventKind) else None
        if name and event.id is not None:
            newest[name] = event.id
    return sorted((i, name) for name, i in newest.items())


@router.get("/events", include_in_schema=False)
async def events(
    request: Request,
    cycle: QueryId = None,
    after: Before = 0,
    log_after: Before = None,
    log_level: Annotated[int, Query(ge=0, le=50)] = 0,
    log_stage: QueryId = None,
    log_q: str = "",
) -> StreamingResponse:
    """`after`: newest event that the page shows. `log_after`: push log lines above this id as list items; `log_…` filter them."""
    event_id, log_id = _position(request.headers.get("Last-Event-ID", ""), after or 0, log_after)
    wanted = {"min_level": log_level, "stage_id": log_stage, "text": log_q}
    stream = _stream(request, cycle, event_id, log_id if cycle is not None else None, wanted)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _position(last_event_id: str, after: int, log_after: int | None) -> tuple[int, int | None]:
    """Where a reader goes on: by its last message, else by the page's address."""
    event, _, line = last_event_id.partition(".")
    if event.isdecimal() and len(event) < 19:
        after = int(event)
        if log_after is not None and line.isdecimal() and len(line) < 19:
            log_after = int(line)
    return after, log_after


async def _stream(
    request: Request, cycle: int | None, last: int, log_id: int | None, wanted: dict[str, Any]
) -> AsyncIterator[str]:
    store: Store = request.app.state.store
    pulse: Pulse = request.app.state.pulse
    yield ": open\n\n"
    idle_s, asked = 0.0, time.monotonic()
    while not await request.is_disconnected():
        if time.monotonic() - asked > ASK_AGAIN_S:
            asked = time.monotonic()
            if not await run_in_threadpool(still_may, request, Action.SEE):
                return  # signed out, disabled or without a role; the page that is read next says so
        if not await pulse.wait(last, PULSE_S * 4):
            idle_s += PULSE_S * 4
            if idle_s >= KEEP_ALIVE_S:
                idle_s = 0.0
                yield ": still here\n\n"
            continue
        idle_s = 0.0
        try:
            found = await run_in_threadpool(store.events.after, last, cycle_id=cycle, limit=BATCH)
            newest = found[-1].id if found else await run_in_threadpool(store.events.last_id)
            last = max(last, newest or 0)
            lines: Sequence[m.LogLine] = ()
            if log_id is not None and cycle is not None and any(e.kind == m.EventKind.LOG for e in found):
                lines = await run_in_threadpool(store.logs.read, cycle, after=log_id, limit=200, **wanted)
        except StoreError:  # the database is away: the page says so when it is next read
            await asyncio.sleep(PULSE_S)
            continue
        for event_id, name in signals(found):
            yield message(event_id, name, "{}", log_id=log_id)
        if lines:
            log_id = lines[-1].id
            yield message(last, "", fragment("cycle.html", "log_lines", log=lines), log_id=log_id)
