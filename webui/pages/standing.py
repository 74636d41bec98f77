"""What a cycle's state means right now, who asked for it, and what may be asked next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from orchestrator import models as m
from orchestrator.store import Store
from orchestrator.store.console_queries import ConsoleQueries
from orchestrator.store.logs import WAITS
from orchestrator.transitions import CANCEL, PAUSE, RESUME
from webui import formats, urls
from webui.contexts import Choice, Standing

S = m.CycleState
BOUNDARY = "its process stops after the current wave of attempts, or the current update; every finished record stays"
WORDS = {
    S.QUEUED: "waits for a worker; no process works on it yet",
    S.PAUSING: BOUNDARY,
    S.PAUSED: "no process works on it; resuming continues from the last finished record",
    S.RESUMING: "waits for a worker; no process has taken it up yet",
    S.CANCELLING: f"{BOUNDARY}. This cannot be undone",
    S.CANCELLED: "stopped for good; what it recorded stays",
    S.FAILED: "stopped by an error; resuming continues from the last finished record",
    S.DONE: "every stage is done",
}
ASKED = {
    S.PAUSING: "cycle.pause",
    S.PAUSED: "cycle.pause",
    S.RESUMING: "cycle.resume",
    S.CANCELLING: "cycle.cancel",
    S.CANCELLED: "cycle.cancel",
}
LABELS = (("pause", "Pause", PAUSE), ("resume", "Resume", RESUME), ("cancel", "Cancel…", CANCEL))


def standing(store: Store, cycle: m.Cycle, refused: str = "", *, blind: bool = False) -> Standing:
    """`blind`: for a reviewer, to whom a falling count of real runbooks would betray the planted ones."""
    assert cycle.id is not None
    since = ConsoleQueries(store).state_since(cycle.id)
    return Standing(
        words=_words(store, cycle, since, blind),
        since=cycle.created_at if since is None else since,
        by=_asked_by(store, cycle),
        acts=[(verb, _label(verb, label, cycle.state)) for verb, label, table in LABELS if _moves(verb, cycle, table)],
        refused=refused,
    )


def _moves(verb: str, cycle: m.Cycle, table: object) -> bool:
    """A wish that would change something. A gate opens by verdicts, not by resuming."""
    to = table.get(cycle.state) if isinstance(table, dict) else None
    return to not in (None, cycle.state) and not (verb == "resume" and cycle.state is S.SUSPENDED)


def _label(verb: str, label: str, state: m.CycleState) -> str:
    return "Go on instead" if verb == "resume" and state is S.PAUSING else label


def _words(store: Store, cycle: m.Cycle, since: datetime | None, blind: bool) -> str:
    if cycle.state is S.RUNNING:
        if cycle.heartbeat_at is None:
            return "no sign of life of its process yet"
        return f"its process gave a sign of life {formats.age(cycle.heartbeat_at)}"
    if cycle.state is S.SUSPENDED:
        n = ConsoleQueries(store).waiting([cycle.id or 0]).get(cycle.id or 0, 0)
        books = "runbooks" if blind else "1 runbook" if n == 1 else f"{n} runbooks"
        return f"waits for verdicts on {books}; no process is held, and it goes on by itself when the quota is met"
    if cycle.state in (S.QUEUED, S.RESUMING) and (found := store.logs.newest(cycle.id or 0, WAITS, since=since)):
        return f"{found}; no process works on it yet"
    return WORDS[cycle.state]


def _asked_by(store: Store, cycle: m.Cycle) -> str:
    action = ASKED.get(cycle.state)
    if action is None:
        return ""
    rows = store.audit_trail.list(object_kind="cycle", object_id=cycle.id, limit=20).items
    return next((row.actor for row in rows if row.action == action), "")


def tabs(cycle_id: int, stages: Sequence[m.Stage], active: str) -> list[Choice]:
    """The pages of one cycle; `active` is "cycle", "logs", "config", "analysis" or a stage's name."""
    pages = [("cycle", "Overview", urls.cycle(cycle_id))]
    pages += [(s.name, s.name, urls.stage(cycle_id, s.name)) for s in stages if s.arm == "main"]
    pages += [("logs", "Log", urls.cycle_logs(cycle_id)), ("config", "Configuration", urls.cycle_config(cycle_id))]
    pages.append(("analysis", "Analysis", urls.cycle_analysis(cycle_id)))
    return [Choice(value=key, label=label, href=href, active=key == active) for key, label, href in pages]
