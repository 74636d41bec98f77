"""What reviewers do with runbooks: claim, decide, undo. Used by the command line and the console alike.

Every rule about people stands here, but for what they may see (`orchestrator.review_look`) and an edit
(`orchestrator.revising`). What verdicts add up to is `stages.review.gate_decision`, and when a suspended cycle goes on is
`orchestrator.gate`.

* An approval asks that every finding was seen; a hard one cannot be approved, a soft one needs a reason.
* Everything can be undone until the replay phase begins.
* A planted leak (`orchestrator.known_leaks`) looks like every other item until the own verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import uuid4

from orchestrator import gate
from orchestrator import models as m
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Decision, Review, Severity
from stages.errors import ConfigError
from stages.review import GateState

PERSON = gate.PERSON
REASONS = (
    "copies an output or an answer",
    "gives a value that must be read or computed",
    "betrays the tests, the solution or hidden files",
    "holds a secret",
    "does not fit the harness",
    "does not follow from the trajectory",
    "misses a step of the task",
    "too narrow to be used again",
    "other",
)
"""Reasons 1 to 9 of a rejection; the last needs words."""


class ReviewRefused(ConfigError):
    """Something that the rules about reviews do not allow. `field` is the part of the form that can mend it."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a verdict led to."""

    state: GateState | None  # None: a planted leak, which no gate counts
    waiting: int = 0  # runbooks of the stage that still need people
    open: bool = True  # the cycle waits for further verdicts
    planted: m.KnownLeak | None = None  # revealed now


# --------------------------------------------------------------------------------------------------- claims, comments


def claim(store: Store, runbook_id: str, login: str) -> datetime:
    """Keep others out for 30 minutes; returns when it ends. Raises ReviewRefused when no place is left."""
    with store.transaction():
        row = _locked(store, runbook_id)
        _refuse_author(row, login)
        _refuse_taken(store, row, login)
        until = store.review_queue.claim(runbook_id, login)
        log(store, login, "claim", runbook_id, {"until": until.isoformat(timespec="seconds")})
    return until


def release(store: Store, runbook_id: str, login: str, *, by: str = "") -> None:
    """End the own claim or assignment, or with `by` an assignment that was made for somebody else.

    Raises ReviewRefused for somebody else's claim: that one ends by itself.
    """
    by = by or login
    held = [c for c in store.review_queue.claims([runbook_id]).get(runbook_id, []) if c.login == login]
    if by != login and any(c.expires_at is not None for c in held):
        raise ReviewRefused(f"{login} has claimed it; a claim ends by itself after 30 minutes", "claim")
    if store.review_queue.release(runbook_id, login):
        log(store, by, "release", runbook_id, {"of": login})


def assign(store: Store, runbook_id: str, login: str, *, by: str) -> None:
    """Put it into somebody's queue. It keeps nobody else out. Raises ReviewRefused when that person cannot review it."""
    user = store.users.named(login)
    if user is None or user.disabled_at is not None or m.Role.REVIEWER.value not in user.roles:
        raise ReviewRefused(f"{login or 'nobody'} is no reviewer; choose one of those who are", "assignee")
    _refuse_author(store.runbooks.get(runbook_id), login)
    store.review_queue.assign(runbook_id, login, by)
    log(store, by, "assign", runbook_id, {"to": login})


def skip(store: Store, runbook_id: str, login: str) -> None:
    """Put it at the end of the own queue, and let go of it."""
    store.runbooks.get(runbook_id)
    store.review_queue.skip(runbook_id, login)
    store.review_queue.release(runbook_id, login)
    log(store, login, "skip", runbook_id, {})


def comment(store: Store, runbook_id: str, login: str, text: str) -> None:
    """Raises ReviewRefused for an empty remark."""
    if not text.strip():
        raise ReviewRefused("a comment needs words", "text")
    row = store.runbooks.get(runbook_id)
    store.review_queue.comment(runbook_id, row.revision, login, text.strip()[:10_000])
    log(store, login, "comment", runbook_id, {"revision": row.revision})


# ----------------------------------------------------------------------------------------------------------- verdicts


def decide(
    store: Store,
    runbook_id: str,
    login: str,
    decision: Decision,
    *,
    reason: str = "",
    number: int | None = None,
    dismissals: Mapping[int, str] | None = None,
    seen: Collection[int] = (),
    revision: int | None = None,
    settings: Settings | None = None,
) -> Outcome:
    """A person's verdict on the newest revision.

    `number`: reason 1 to 9 of a rejection. `dismissals`: finding id -> why a soft finding may stay; `reason` speaks for
    those that have none of their own. `seen`: findings that the person has seen just now. `revision`: what the person
    looked at, so that a verdict never lands on a newer one. Raises ReviewRefused (see the module).
    """
    row = store.runbooks.get(runbook_id)
    findings = store.reviews.findings(runbook_id, row.revision)
    store.review_queue.see([f.id for f in findings if f.id in set(seen) and f.id is not None], login)
    if revision is not None and revision != row.revision:
        raise ReviewRefused(f"runbook {runbook_id} has a newer revision, {row.revision}: look at that one", "revision")
    if decision is Decision.APPROVE:
        words = _approval(store, row, login, findings, reason, dismissals or {})
    else:
        words = rejection(reason, number)
    planted = store.review_queue.planted(runbook_id)
    with store.transaction():
        if planted is not None:
            verdict_on_planted(store, planted, login, decision, words)
        else:
            book = gate.open_runbook(store, runbook_id)
            if book.row.revision != row.revision:
                raise ReviewRefused(f"runbook {runbook_id} was revised just now: look at revision {book.row.revision}")
            _refuse_taken(store, book.row, login)
            gate.record(store, book, login, decision, reason=words)
        store.review_queue.release(runbook_id, login)
        store.review_queue.unskip(runbook_id, login)
        if planted is not None:
            return Outcome(state=None, planted=planted)
        state, (waiting, is_open) = gate.state_of(store, book), gate.progress_of(store, book.stage)
    gate.go_on(store, book.stage, login, settings=settings)
    return Outcome(state=state, waiting=waiting, open=is_open)


def reject_many(
    store: Store,
    runbook_ids: Sequence[str],
    login: str,
    *,
    reason: str = "",
    number: int | None = None,
    settings: Settings | None = None,
) -> int:
    """Reject several for one reason, all or none; returns how many. There is no such thing for approvals."""
    words = rejection(reason, number)
    stages: dict[int, m.Stage] = {}
    ids = list(dict.fromkeys(runbook_ids))
    with store.transaction():
        gates = {cycle_id for i in ids if (cycle_id := _cycle_of(store, i)) is not None}
        for cycle_id in sorted(gates):  # always in this order, so that two people never wait for each other
            store.cycles.lock(cycle_id)
        for runbook_id in ids:
            if (planted := store.review_queue.planted(runbook_id)) is not None:
                verdict_on_planted(store, planted, login, Decision.REJECT, words)
            else:
                book = gate.open_runbook(store, runbook_id)
                _refuse_taken(store, book.row, login)
                gate.record(store, book, login, Decision.REJECT, reason=words)
                stages[book.stage.id or 0] = book.stage
            store.review_queue.release(runbook_id, login)
    for stage in stages.values():
        gate.go_on(store, stage, login, settings=settings)
    return len(ids)


def undo(store: Store, runbook_id: str, login: str, *, settings: Settings | None = None) -> Outcome:
    """Take the own verdict back. Raises ReviewRefused when there is none, ConfigError once the gate has consumed it."""
    if store.review_queue.planted(runbook_id) is not None:
        raise ReviewRefused("this was a known-leak item and is revealed; its verdict stays")
    with store.transaction():
        book = gate.open_runbook(store, runbook_id)
        if f"{PERSON}{login}" not in store.reviews.standing(runbook_id, book.row.revision):
            raise ReviewRefused(f"{login} has no verdict on revision {book.row.revision} of runbook {runbook_id}")
        gate.record(store, book, login, None)
        state, (waiting, is_open) = gate.state_of(store, book), gate.progress_of(store, book.stage)
    return Outcome(state=state, waiting=waiting, open=is_open)


def rejection(reason: str, number: int | None = None) -> str:
    """The words of a rejection. Raises ReviewRefused when it has no reason."""
    text = reason.strip()
    if number is not None and not 1 <= number <= len(REASONS):
        raise ReviewRefused(f"reasons go from 1 to {len(REASONS)}", "reason")
    if number in (None, len(REASONS)):
        if not text:
            raise ReviewRefused("a rejection needs a reason: choose one, or write it", "reason")
        return text
    assert number is not None
    return f"{REASONS[number - 1]}: {text}" if text else REASONS[number - 1]


# -------------------------------------------------------------------------------------------------------------- rules


def _approval(
    store: Store,
    row: m.Runbook,
    login: str,
    findings: Sequence[m.Finding],
    reason: str,
    dismissals: Mapping[int, str],
) -> str:
    """The words of an approval, a reason for each soft finding."""
    if hard := next((f for f in findings if f.severity is Severity.HARD), None):
        raise ReviewRefused(f"{hard.rule}: {hard.message}. It cannot be approved; only a new revision cures it", "hard")
    seen = store.review_queue.seen(row.id, row.revision, login)
    if unseen := [f for f in findings if f.id not in seen]:
        raise ReviewRefused(f"{len(unseen)} of {len(findings)} findings were not looked at yet", "seen")
    parts = [reason.strip()] if reason.strip() else []
    for finding in findings:
        own = (dismissals.get(finding.id or 0) or "").strip()
        if not own and not reason.strip():
            raise ReviewRefused(f"say why the finding {finding.rule} may stay", f"dismiss-{finding.id}")
        if own:
            place = f" in line {finding.line + 1}" if finding.line is not None else ""
            parts.append(f"{finding.rule}{place}: {own}")
    return "; ".join(parts)


def verdict_on_planted(store: Store, planted: m.KnownLeak, login: str, decision: Decision, words: str) -> None:
    """Only stored and logged: no gate counts it. Raises as a verdict on a real one would, and for a second one."""
    row = _locked(store, planted.runbook_id)
    if f"{PERSON}{login}" in store.reviews.standing(row.id, row.revision):
        raise ReviewRefused("this was a known-leak item and is revealed; its verdict stays")
    _refuse_taken(store, row, login)
    verdict = Review(
        runbook_id=row.id, revision=row.revision, reviewer=f"{PERSON}{login}", decision=decision, reason=words
    )
    store.reviews.add(verdict, key=uuid4().hex)
    gate.queue_changed(store, store.stages.get(planted.stage_id))
    log(store, login, decision.value, row.id, {"reason": words, "revision": row.revision})


def _locked(store: Store, runbook_id: str) -> m.Runbook:
    """The newest revision; nobody else claims or decides in its stage until the transaction ends."""
    if (planted := store.review_queue.planted(runbook_id)) is None:
        return gate.open_runbook(store, runbook_id).row
    store.cycles.lock(store.stages.get(planted.stage_id).cycle_id)
    row = store.runbooks.get(runbook_id)
    gate.refuse_closed(store, row, planted.stage_id)
    return row


def _cycle_of(store: Store, runbook_id: str) -> int | None:
    planted = store.review_queue.planted(runbook_id)
    return store.stages.get(planted.stage_id).cycle_id if planted else store.runbooks.get(runbook_id).cycle_id


def _refuse_author(row: m.Runbook, login: str) -> None:
    if row.author == login:
        raise ReviewRefused(f"{login} wrote this revision of runbook {row.id}; somebody else must decide on it")


def _refuse_taken(store: Store, row: m.Runbook, login: str) -> None:
    """Raises ReviewRefused when others' claims leave no place."""
    live = store.review_queue.claims([row.id]).get(row.id, [])
    others = [c for c in live if c.login != login and c.expires_at is not None]
    if not others:
        return
    people = [who for who in store.reviews.standing(row.id, row.revision) if who.startswith(PERSON)]
    required = _required(store, row)
    if len(others) >= max(1, required - len(people)):
        first = others[0]
        assert first.expires_at is not None
        raise ReviewRefused(f"{first.login} has claimed it until {first.expires_at:%H:%M} UTC; take another one")


def _required(store: Store, row: m.Runbook) -> int:
    planted = store.review_queue.planted(row.id)
    stage_id = planted.stage_id if planted else row.stage_id
    return gate.policy_of(store, store.stages.get(stage_id)).required_reviewers if stage_id is not None else 1


def log(store: Store, login: str, act: str, runbook_id: str, payload: Mapping[str, object]) -> None:
    """One act on a runbook into the audit log."""
    store.audit_trail.add(login, f"runbook.{act}", object_kind="runbook", object_id=runbook_id, payload=dict(payload))
