"""The human gate: people's verdicts on runbooks, and the moment when a suspended cycle may go on (spec §2.1).

A cycle with review policy `human` suspends after the automatic checks and holds no process. Every verdict is a new row;
what all of them add up to is `stages.review.gate_decision`. When the quota is met, the cycle is submitted again.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import lru_cache
from uuid import uuid4

from orchestrator import models as m
from orchestrator.finished import gate_states
from orchestrator.known_leaks import plant
from orchestrator.launch import resume_cycle
from orchestrator.recipes import parse_config
from orchestrator.settings import Settings, get_settings
from orchestrator.store import Store
from orchestrator.store.connection import canonical
from stages.domain import Decision, Phase, Review
from stages.errors import ConfigError, ServiceError
from stages.review import GateState, GateStatus, PolicyMode, ReviewPolicy, gate_decision, quota_met

PERSON = "person:"
OPEN = (m.RunbookState.WAITING, m.RunbookState.APPROVED, m.RunbookState.REJECTED)
_STATES = {
    GateStatus.PENDING: m.RunbookState.WAITING,
    GateStatus.APPROVED: m.RunbookState.APPROVED,
    GateStatus.REJECTED: m.RunbookState.REJECTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRunbook:
    """A runbook whose gate still takes verdicts, with what decides on it."""

    row: m.Runbook
    stage: m.Stage
    policy: ReviewPolicy


def policy_of(store: Store, stage: m.Stage) -> ReviewPolicy:
    """The review policy of a stage's recipe."""
    return _policy(canonical(store.cycles.get(stage.cycle_id).config), stage.cycle_id, max(1, stage.round))


def waiting_policies(store: Store) -> dict[int, ReviewPolicy]:
    """Stage with waiting runbooks -> its review policy.

    Left out where the stored recipe cannot be read any more: such a cycle must not take the whole queue with it.
    """
    found = {}
    for stage_id, round_, cycle_id, config in store.review_queue.waiting_gates():
        with contextlib.suppress(ConfigError):
            found[stage_id] = _policy(canonical(config), cycle_id, max(1, round_))
    return found


@lru_cache(maxsize=256)
def _policy(config: str, cycle_id: int, round_: int) -> ReviewPolicy:
    review = parse_config(json.loads(config), f"cycle {cycle_id}").rsr_of(round_).review
    return ReviewPolicy(mode=PolicyMode(review.policy), required_reviewers=review.required_reviewers)


def closed(store: Store, row: m.Runbook, stage_id: int | None = None) -> bool:
    """True once the replay phase has begun: it has taken what was approved, and nothing is undone any more.

    `stage_id`: the gate at which a planted leak stands, which belongs to no stage itself.
    """
    if row.state is m.RunbookState.CONSUMED:
        return True
    stage_id = row.stage_id if stage_id is None else stage_id
    return stage_id is not None and Phase.REPLAY in store.stages.phases(stage_id)


def refuse_closed(store: Store, row: m.Runbook, stage_id: int | None) -> None:
    """Raises ConfigError when no verdict is taken on a runbook."""
    if row.state not in OPEN or closed(store, row, stage_id):
        raise ConfigError(
            f"runbook {row.id} is {row.state}; verdicts are taken until the replay phase has consumed the gate"
        )


def open_runbook(store: Store, runbook_id: str) -> OpenRunbook:
    """The newest revision, locked with its whole gate until the caller's transaction ends.

    Without the lock two people who decide at the same moment would each count without the other's verdict. Raises
    ConfigError when no verdict is taken on it.
    """
    row = store.runbooks.get(runbook_id)
    if row.stage_id is None:
        raise ConfigError(f"runbook {runbook_id} belongs to no stage, so no gate waits for it")
    stage = store.stages.get(row.stage_id)
    store.cycles.lock(stage.cycle_id)
    row = store.runbooks.get(runbook_id)
    refuse_closed(store, row, row.stage_id)
    return OpenRunbook(row=row, stage=stage, policy=policy_of(store, stage))


def record(store: Store, book: OpenRunbook, login: str, decision: Decision | None, *, reason: str = "") -> None:
    """Store one verdict, or with None its withdrawal, and the state that the runbook is in then. `book` is locked."""
    row = book.row
    if row.author == login:
        raise ConfigError(f"{login} wrote this revision of runbook {row.id}; somebody else must decide on it")
    if decision is Decision.APPROVE and not reason.strip() and store.reviews.findings(row.id, row.revision):
        raise ConfigError(f"runbook {row.id} has findings: approving over them needs a reason (--reason)")
    who, key = f"{PERSON}{login}", uuid4().hex  # each is an act of its own: approve, reject, approve again
    if decision is None:
        store.reviews.withdraw(row.id, row.revision, who, key=key, reason=reason)
    else:
        verdict = Review(runbook_id=row.id, revision=row.revision, reviewer=who, decision=decision, reason=reason)
        store.reviews.add(verdict, key=key)
    store.runbooks.set_state(row.id, row.revision, stored_state(state_of(store, book)))
    queue_changed(store, book.stage)
    act = decision.value if decision else "withdraw"
    store.audit_trail.add(
        login,
        f"runbook.{act}",
        object_kind="runbook",
        object_id=row.id,
        payload={"reason": reason, "revision": row.revision},
    )


def queue_changed(store: Store, stage: m.Stage) -> None:
    """Wakes open queues. The event names no runbook, so that a planted leak's looks like every other."""
    store.events.append(m.EventKind.REVIEWS_CHANGED, cycle_id=stage.cycle_id, stage_id=stage.id)


def state_of(store: Store, book: OpenRunbook) -> GateState:
    """What all verdicts on the newest revision add up to."""
    row = book.row
    return gate_decision(
        store.reviews.of_revision(row.id, row.revision), book.policy, author=row.author, revision=row.revision
    )


def stored_state(state: GateState) -> m.RunbookState:
    """The word in the runbook's row. Two who differ: it is not approved, and waits for a third person."""
    return m.RunbookState.WAITING if state.people_needed else _STATES[state.status]


def progress_of(store: Store, stage: m.Stage) -> tuple[int, bool]:
    """(runbooks that still need people, does the gate wait for further verdicts)."""
    assert stage.id is not None
    policy = policy_of(store, stage)
    states = gate_states(store, stage.id, policy).values()
    return sum(s.people_needed > 0 for s in states), not quota_met(states, policy)


def go_on(store: Store, stage: m.Stage, login: str, *, settings: Settings | None = None) -> None:
    """Submit the cycle again when it is suspended and its quota is met. Call it outside of a transaction."""
    if store.cycles.get(stage.cycle_id).state is m.CycleState.SUSPENDED and not progress_of(store, stage)[1]:
        # Without a Prefect server the cycle is failed, says why, and its lead is told: the verdict is given all the same.
        with contextlib.suppress(ServiceError):
            resume_cycle(store, stage.cycle_id, actor=login, settings=settings)


def wake(store: Store, cycle_id: int, *, settings: Settings | None = None) -> bool:
    """Resume a suspended cycle whose quota is met already; True when it was.

    Called once after a cycle was suspended: the last verdict may have come before the process let go of it.
    """
    if store.cycles.get(cycle_id).state is not m.CycleState.SUSPENDED:
        return False
    waiting = [s for s in store.stages.of_cycle(cycle_id) if s.state is m.StageState.SUSPENDED]
    for stage in waiting:
        assert stage.id is not None
        policy = policy_of(store, stage)
        if not quota_met(gate_states(store, stage.id, policy).values(), policy):
            plant(store, stage, policy, (settings or get_settings()).known_leak_rate)
            return False
    if waiting:
        resume_cycle(store, cycle_id, actor="gate", settings=settings)
    return bool(waiting)
