"""The leak gate q(x, b): rules first, then optionally a model, then people (spec §2.1, items 3 and 4).

* *Hard* rule findings (secrets, hidden places, verifier or solution text) are cured by a new revision only.
* *Soft* ones a person may dismiss by approving with a reason.
* A person's decision overrides the model's, never the other way round.
* Two people who differ: a third decides; until then the runbook is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from stages.domain import Decision, Finding, Review, Runbook, Severity, Trajectory
from stages.leaks import SHELL_HARNESS, HarnessRules, ReviewContext, findings
from stages.leaks.replays import trajectory_findings

RULES_REVIEWER = "rules"
_MODEL, _PERSON = "model:", "person:"


class PolicyMode(StrEnum):
    AUTO = "auto"  # no person needed: any finding rejects; people may still decide
    HUMAN = "human"  # soft findings and clean runbooks wait for people


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewPolicy:
    mode: PolicyMode = PolicyMode.AUTO
    required_reviewers: int = 1  # people who must decide on one runbook in mode `human`; 2 is the two-reviewer rule
    quota: float = 1.0  # share of the runbooks that need people which must be decided before the stage goes on


class GateStatus(StrEnum):
    PENDING = "pending"  # waits for rules or people
    APPROVED = "approved"  # may be replayed
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """What the verdicts on one revision add up to."""

    status: GateStatus
    reason: str
    revision: int
    decided_by: tuple[str, ...] = ()  # reviewers whose verdicts made it
    people_needed: int = 0  # further verdicts of people that would settle it
    hard: bool = False  # True: no verdict on this revision can approve it


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicFinding:
    """A finding without its evidence, which may be hidden text."""

    rule: str
    severity: Severity
    message: str
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """All that a model reviewer is given: public text and what the rules said."""

    instruction: str
    runbook: tuple[str, ...]
    findings: tuple[PublicFinding, ...] = ()


class ModelReviewer(Protocol):
    name: str

    async def review(self, question: ModelQuestion) -> tuple[Decision, str]:
        """(decision, reason). Any RsiError that it raises is the caller's to handle: no answer is no verdict."""
        ...


def review_runbook(
    runbook: Runbook, context: ReviewContext, policy: ReviewPolicy | PolicyMode = PolicyMode.AUTO
) -> Review:
    """The rules' verdict. Rejects on a hard finding; in mode `auto` on a soft one as well (in `human` people look at it)."""
    mode = policy.mode if isinstance(policy, ReviewPolicy) else policy
    found = findings(runbook, context)
    hard = [f for f in found if f.severity is Severity.HARD]
    against = found if mode is PolicyMode.AUTO else tuple(hard)
    return Review(
        runbook_id=runbook.id,
        revision=runbook.revision,
        reviewer=RULES_REVIEWER,
        decision=Decision.REJECT if against else Decision.APPROVE,
        reason="; ".join(dict.fromkeys(f"{f.rule}: {f.message}" for f in against)),
        findings=found,
    )


def model_question(runbook: Runbook, context: ReviewContext, rules: Review) -> ModelQuestion:
    """The question to a model reviewer. Holds no evidence, no hidden text and no trajectory."""
    return ModelQuestion(
        instruction=context.task.instruction,
        runbook=tuple(line.text for line in runbook.lines),
        findings=tuple(
            PublicFinding(rule=f.rule, severity=f.severity, message=f.message, line=f.line) for f in rules.findings
        ),
    )


async def review_with_model(
    runbook: Runbook, context: ReviewContext, reviewer: ModelReviewer, rules: Review
) -> Review | None:
    """The model's verdict; None where a hard finding has settled the matter already."""
    if any(f.severity is Severity.HARD for f in rules.findings):
        return None
    decision, reason = await reviewer.review(model_question(runbook, context, rules))
    return Review(
        runbook_id=runbook.id,
        revision=runbook.revision,
        reviewer=f"{_MODEL}{reviewer.name}",
        decision=decision,
        reason=reason,
    )


def gate_decision(
    reviews: Sequence[Review], policy: ReviewPolicy, *, author: str = "", revision: int | None = None
) -> GateState:
    """What all verdicts on a runbook's current revision add up to.

    `reviews` in the order given (append-only): of several verdicts of one reviewer the last counts; verdicts on other
    revisions count nothing. `author` ("login" or "person:login") is whoever edited this revision: that person's verdict
    is not counted. `revision` None: the newest among the reviews. Raises ValueError when the reviews belong to several
    runbooks.
    """
    if len({r.runbook_id for r in reviews}) > 1:
        raise ValueError("gate_decision got verdicts on several runbooks; call it once for each")
    current = max((r.revision for r in reviews), default=1) if revision is None else revision
    here = [r for r in reviews if r.revision == current]
    rules = [r for r in here if r.reviewer == RULES_REVIEWER]
    people = _people(here, author)
    needed = policy.required_reviewers if policy.mode is PolicyMode.HUMAN else 1
    if not rules:
        return GateState(status=GateStatus.PENDING, reason="the rules have not run yet", revision=current)
    found = [f for r in rules for f in r.findings]
    hard = [f for f in found if f.severity is Severity.HARD]
    if hard:
        return GateState(
            status=GateStatus.REJECTED,
            reason=f"{hard[0].rule}: {hard[0].message}; only a new revision cures it",
            revision=current,
            decided_by=(RULES_REVIEWER,),
            hard=True,
        )
    soft = bool(found) or any(r.decision is Decision.REJECT for r in rules)
    valid = [r for r in people if not (soft and r.decision is Decision.APPROVE and not r.reason.strip())]
    if len(valid) >= needed:
        return _by_people(valid, current)
    missing = needed - len(valid)
    if policy.mode is PolicyMode.HUMAN:
        return GateState(
            status=GateStatus.PENDING,
            reason="an approval over findings needs a reason" if len(valid) < len(people) else "waits for people",
            revision=current,
            people_needed=missing,
        )
    return _without_people(rules, here, soft, current)


def quota_met(states: Iterable[GateState], policy: ReviewPolicy) -> bool:
    """May the stage go on? Always in mode `auto`; else once `quota` of the runbooks that need people are settled.

    What is still pending then is not approved, hence not replayed.
    """
    if policy.mode is PolicyMode.AUTO:
        return True
    theirs = [s for s in states if not s.hard]
    settled = sum(s.status is not GateStatus.PENDING and s.people_needed == 0 for s in theirs)
    return settled >= policy.quota * len(theirs) - 1e-9


def q_leak(trajectory: Trajectory, context: ReviewContext) -> tuple[bool, list[Finding]]:
    """q_leak(τ) of a replay by rules: (clean, findings). Hidden places, hidden text, answers that were never seen."""
    found = trajectory_findings(trajectory, context)
    return not found, found


def _people(reviews: Sequence[Review], author: str) -> list[Review]:
    """Each person's last verdict, in the order in which they first spoke; the author's left out."""
    last: dict[str, Review] = {}
    for review in reviews:
        login = review.reviewer.removeprefix(_PERSON)
        if review.reviewer.startswith(_PERSON) and login != author.removeprefix(_PERSON):
            last[login] = review
    return list(last.values())


def _by_people(verdicts: Sequence[Review], revision: int) -> GateState:
    for_it = [r for r in verdicts if r.decision is Decision.APPROVE]
    against = [r for r in verdicts if r.decision is Decision.REJECT]
    if len(for_it) == len(against):
        return GateState(
            status=GateStatus.REJECTED,
            reason=f"{len(for_it)} for, {len(against)} against: another person decides",
            revision=revision,
            decided_by=tuple(r.reviewer for r in verdicts),
            people_needed=1,
        )
    winners = for_it if len(for_it) > len(against) else against
    return GateState(
        status=GateStatus.APPROVED if winners is for_it else GateStatus.REJECTED,
        reason=next((r.reason for r in winners if r.reason), "decided by people"),
        revision=revision,
        decided_by=tuple(r.reviewer for r in winners),
    )


def _without_people(rules: Sequence[Review], here: Sequence[Review], soft: bool, revision: int) -> GateState:
    if soft:
        reason = next((r.reason for r in rules if r.reason), "") or "the rules have findings"
        return GateState(status=GateStatus.REJECTED, reason=reason, revision=revision, decided_by=(RULES_REVIEWER,))
    models = {r.reviewer: r for r in here if r.reviewer.startswith(_MODEL)}
    against = [r for r in models.values() if r.decision is Decision.REJECT]
    if against:
        return GateState(
            status=GateStatus.REJECTED,
            reason=against[0].reason or "rejected by the model reviewer",
            revision=revision,
            decided_by=tuple(r.reviewer for r in against),
        )
    return GateState(
        status=GateStatus.APPROVED,
        reason="no finding",
        revision=revision,
        decided_by=(RULES_REVIEWER, *models),
    )


__all__ = [
    "SHELL_HARNESS",
    "GateState",
    "GateStatus",
    "HarnessRules",
    "ModelQuestion",
    "ModelReviewer",
    "PolicyMode",
    "PublicFinding",
    "ReviewContext",
    "ReviewPolicy",
    "gate_decision",
    "model_question",
    "q_leak",
    "quota_met",
    "review_runbook",
    "review_with_model",
]
