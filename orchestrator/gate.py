"""The human gate: people's verdicts on runbooks, and the moment when a suspended cycle may go on (spec §2.1).

A cycle with review policy `human` suspends after the automatic checks and holds no process. Every verdict is a new row;
what all of them add up to is `stages.review.gate_decision`. When the quota is met, the cycle is submitted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from orchestrator import models as m
from orchestrator.finished import gate_states
from orchestrator.launch import resume_cycle
from orchestrator.recipes import parse_config
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Decision, Review
from stages.errors import ConfigError
from stages.review import GateState, GateStatus, PolicyMode, ReviewPolicy, quota_met

PERSON = "person:"
_STATES = {GateStatus.APPROVED: m.RunbookState.APPROVED, GateStatus.REJECTED: m.RunbookState.REJECTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateProgress:
    """How far the gate of one stage is."""

    state: GateState  # of the runbook just decided
    waiting: int  # runbooks of the stage that still need people
    open: bool  # True: the cycle waits for further verdicts


def policy_of(store: Store, stage: m.Stage) -> ReviewPolicy:
    """The review policy of a stage's recipe."""
    config = parse_config(store.cycles.get(stage.cycle_id).config, f"cycle {stage.cycle_id}")
    review = config.rsr_of(max(1, stage.round)).review
    return ReviewPolicy(mode=PolicyMode(review.policy), required_reviewers=review.required_reviewers)


def decide(
    store: Store,
    runbook_id: str,
    login: str,
    decision: Decision,
    *,
    reason: str = "",
    settings: Settings | None = None,
) -> GateProgress:
    """Store a person's verdict on the newest revision, and let the cycle go on once its quota is met.

    Raises ConfigError when the runbook is not open for verdicts, when its author decides, or when an approval over
    findings lacks a reason.
    """
    row = store.runbooks.get(runbook_id)
    if row.state not in (m.RunbookState.WAITING, m.RunbookState.APPROVED, m.RunbookState.REJECTED):
        raise ConfigError(
            f"runbook {runbook_id} is {row.state}; verdicts are taken until the replay phase has consumed it"
        )
    if row.stage_id is None:
        raise ConfigError(f"runbook {runbook_id} belongs to no stage, so no gate waits for it")
    if row.author == login:
        raise ConfigError(f"{login} wrote this revision of runbook {runbook_id}; somebody else must decide on it")
    if decision is Decision.APPROVE and not reason.strip() and store.reviews.findings(runbook_id, row.revision):
        raise ConfigError(f"runbook {runbook_id} has findings: approving over them needs a reason (--reason)")
    stage = store.stages.get(row.stage_id)
    policy = policy_of(store, stage)
    with store.transaction():
        store.reviews.add(
            Review(
                runbook_id=runbook_id,
                revision=row.revision,
                reviewer=f"{PERSON}{login}",
                decision=decision,
                reason=reason,
            ),
            key=uuid4().hex,  # each verdict is an act of its own: approve, reject, approve again
        )
        states = gate_states(store, row.stage_id, policy)
        state = states[runbook_id]
        if (settled := _STATES.get(state.status)) is not None:
            store.runbooks.set_state(runbook_id, row.revision, settled)
        store.audit_trail.add(
            login, f"runbook.{decision.value}", object_kind="runbook", object_id=runbook_id, payload={"reason": reason}
        )
    progress = GateProgress(
        state=state,
        waiting=sum(s.status is GateStatus.PENDING for s in states.values()),
        open=not quota_met(states.values(), policy),
    )
    if not progress.open and store.cycles.get(stage.cycle_id).state is m.CycleState.SUSPENDED:
        resume_cycle(store, stage.cycle_id, actor=login, settings=settings)
    return progress


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
            return False
    if waiting:
        resume_cycle(store, cycle_id, actor="gate", settings=settings)
    return bool(waiting)
