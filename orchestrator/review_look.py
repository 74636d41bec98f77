"""What a person may see: the own queue, and a runbook. Blind until the own verdict: no page and no list says more than this.

Nobody who reviews learns what others decided or wrote before the own verdict on the same revision, and a planted leak
(`orchestrator.known_leaks`) looks like every other item until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator import gate
from orchestrator import models as m
from orchestrator.review_sources import hidden_texts
from orchestrator.store import Store
from orchestrator.store.review_queue import COUNT_CAP, QueueFilter
from stages.domain import Severity
from stages.errors import ConfigError
from stages.review import ReviewPolicy

PERSON = gate.PERSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A runbook as one person may see it."""

    runbook: m.Runbook  # the revision asked for
    newest: int  # the newest revision's number
    revisions: Sequence[m.Runbook]
    stage: m.Stage | None
    policy: ReviewPolicy | None
    findings: Sequence[m.Finding]
    seen: Collection[int]  # ids of findings that this person has seen
    mine: m.Review | None  # the own standing verdict on the newest revision
    others: Sequence[m.Review]  # empty while blind
    hidden: int  # people's verdicts that are not shown because the own one is missing
    people: int  # standing verdicts of people on the newest revision
    comments: Sequence[m.ReviewComment]  # only the own ones while blind
    claims: Sequence[m.ReviewClaim]
    closed: bool  # the gate has consumed it
    hard: bool  # it cannot be approved, only revised
    planted: m.KnownLeak | None  # shown after the own verdict only

    @property
    def current(self) -> bool:
        return self.runbook.revision == self.newest

    @property
    def unseen(self) -> Sequence[m.Finding]:
        return [f for f in self.findings if f.id not in self.seen]


def needs(store: Store) -> dict[int, int]:
    """Stage with waiting runbooks -> how many people must decide on each."""
    return {i: policy.required_reviewers for i, policy in gate.waiting_policies(store).items()}


def _policy(store: Store, stage: m.Stage) -> ReviewPolicy | None:
    """None where the stored recipe cannot be read any more."""
    try:
        return gate.policy_of(store, stage)
    except ConfigError:
        return None


def look(store: Store, runbook_id: str, login: str, *, decider: bool, revision: int | None = None) -> Look:
    """`decider`: the person may review, hence is blind until the own verdict. Raises StoreError for an unknown runbook."""
    revisions = store.runbooks.revisions(runbook_id)
    newest = store.runbooks.get(runbook_id)
    row = next((r for r in revisions if r.revision == revision), newest) if revision else newest
    planted = store.review_queue.planted(runbook_id)
    stage_id = planted.stage_id if planted else newest.stage_id
    stage = store.stages.get(stage_id) if stage_id is not None else None
    policy = _policy(store, stage) if stage else None
    standing = store.reviews.standing(runbook_id, newest.revision)
    mine = standing.get(f"{PERSON}{login}")
    blind = decider and mine is None
    shown = standing if row.revision == newest.revision else store.reviews.standing(runbook_id, row.revision)
    others = [r for who, r in shown.items() if who not in ("rules", f"{PERSON}{login}")]
    people = sum(who.startswith(PERSON) for who in standing)
    hidden = sum(r.reviewer.startswith(PERSON) for r in others) if blind else 0
    if planted and blind:  # a real one with more verdicts than that would wait no longer
        people = min(people, (policy.required_reviewers if policy else 1) - 1)
        hidden = min(hidden, people)
    findings = store.reviews.findings(runbook_id, row.revision)
    comments = store.review_queue.comments(runbook_id)
    return Look(
        runbook=row,
        newest=newest.revision,
        revisions=revisions,
        stage=stage,
        policy=policy,
        findings=findings,
        seen=store.review_queue.seen(runbook_id, row.revision, login),
        mine=mine,
        others=[] if blind else others,
        hidden=hidden,
        people=people,
        comments=[c for c in comments if c.login == login or not blind],
        claims=store.review_queue.claims([runbook_id]).get(runbook_id, []),
        closed=gate.closed(store, newest, stage_id) or (planted is not None and mine is not None),
        hard=any(f.severity is Severity.HARD for f in findings),
        planted=planted if mine is not None else None,
    )


def readable(store: Store, runbook_id: str, login: str) -> bool:
    """May somebody who reviews read, outside of the queue, that this runbook exists and what became of it?

    Not before the own verdict or the end of its gate: a list of real runbooks would tell which ones are planted.
    """
    row = store.runbooks.get(runbook_id)
    return gate.closed(store, row) or f"{PERSON}{login}" in store.reviews.standing(row.id, row.revision)


def evidence(finding: m.Finding, *, hidden: bool) -> str:
    """What a finding matches; empty where that is hidden text and the person may not see it (`hidden`)."""
    theirs = finding.evidence_source.startswith(("tests", "solution"))
    return "" if theirs and not hidden else finding.evidence


def look_at_hidden(store: Store, runbook_id: str, login: str) -> Mapping[str, str]:
    """Hidden tests and reference solution; the look is logged. Raises TaskError where this machine lacks them."""
    texts = hidden_texts(store, store.runbooks.get(runbook_id))
    store.audit_trail.add(
        login, "runbook.see-hidden", object_kind="runbook", object_id=runbook_id, payload={"files": sorted(texts)}
    )
    return texts


def waiting_for(store: Store, login: str, *, cap: int = COUNT_CAP) -> int:
    """How many runbooks wait for this reviewer, up to `cap`."""
    return store.review_queue.count(QueueFilter(mine=True), login, decider=True, needs=needs(store), cap=cap)


def queue_of(store: Store, login: str, *, limit: int = COUNT_CAP) -> list[str]:
    """Ids of what waits for this reviewer, in order; what was put off comes last."""
    need, found = needs(store), list[str]()
    for skipped in (False, True):
        if len(found) < limit:
            where = QueueFilter(mine=True, skipped=skipped)
            rows = store.review_queue.rows(where, login, decider=True, needs=need, limit=limit - len(found))
            found += [row.id for row in rows]
    return found
