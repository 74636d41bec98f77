"""Which events people are told of, in which words, and who: pure. Written with the event itself (`store/notices.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.models import CycleState, EventKind, NoticeKind, Role

OF_STATE = {
    CycleState.SUSPENDED.value: NoticeKind.GATE_OPENED,
    CycleState.DONE.value: NoticeKind.CYCLE_DONE,
    CycleState.FAILED.value: NoticeKind.CYCLE_FAILED,
}
# Who reads a notice. A lead's notice goes to the lead who launched the cycle, to all of them when no person did.
AUDIENCE = {
    NoticeKind.GATE_OPENED: Role.REVIEWER,
    NoticeKind.CYCLE_DONE: Role.LEAD,
    NoticeKind.CYCLE_FAILED: Role.LEAD,
    NoticeKind.ALARM: Role.LEAD,
}


def notice_kind(event_kind: str, payload: Mapping[str, Any]) -> NoticeKind | None:
    """None for the many events that nobody is told of."""
    if event_kind == EventKind.CYCLE_STATE:
        return OF_STATE.get(payload.get("state", ""))
    return NoticeKind.ALARM if event_kind == EventKind.ALARM else None


def notice_text(kind: NoticeKind, cycle: str, payload: Mapping[str, Any], *, waiting: int = 0) -> str:
    """One sentence. `cycle`: "demo (cycle 3)"; `waiting`: runbooks that wait for people."""
    match kind:
        case NoticeKind.GATE_OPENED:
            books = "1 runbook waits" if waiting == 1 else f"{waiting} runbooks wait"
            return f"{books} for a verdict; {cycle} goes on when the quota is met"
        case NoticeKind.CYCLE_DONE:
            return f"{cycle} is done"
        case NoticeKind.CYCLE_FAILED:
            return f"{cycle} was stopped: {payload.get('error') or 'no reason was recorded'}"
        case NoticeKind.ALARM:
            where = f"{payload.get('stage', '')} {payload.get('phase', '')} step {payload.get('step', '')}"
            return f"Alarm in {cycle}, {where}: {payload.get('text', '')}"
