"""How reviewers agree, how long runbooks wait for them, and which planted leaks they found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from orchestrator.store import Store
from stages.domain import Decision

NEWEST = 1000  # verdicts; every look at the queue reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewer:
    login: str
    approved: int  # first verdicts
    rejected: int
    withdrawn: int  # verdicts taken back
    leaks_found: int  # planted leaks rejected
    leaks: int  # planted leaks decided
    agreed: int  # pairs of first verdicts on one revision that are equal
    pairs: int
    turnaround_s: float | None  # median time from the revision to the person's first verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewStatistics:
    """Over the newest `limit` verdicts of people. First verdicts count: later ones know what others said."""

    limit: int

    reviewers: Sequence[Reviewer]
    agreed: int
    pairs: int
    leaks_found: int
    leaks: int
    turnaround_s: float | None  # median time to a revision's first verdict


def review_statistics(store: Store, *, limit: int = NEWEST, blind_to: str | None = None) -> ReviewStatistics:
    """Agreement, turnaround, verdicts and known-leak hits.

    `blind_to`: a reviewer, to whom nothing is told of what others decided at gates that still wait, as long as the own
    verdict is missing: a count that grows by one would tell.
    """
    rows = store.review_queue.verdicts(limit=limit, blind_to=blind_to)
    first: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    withdrawn: dict[str, int] = defaultdict(int)
    for row in rows:
        who = row.reviewer.partition(":")[2]
        if row.decision == "withdraw":
            withdrawn[who] += 1
        else:
            first[row.runbook_id, row.revision].setdefault(who, row)
    real = {key: by for key, by in first.items() if not next(iter(by.values())).planted}
    pairs = [
        (a, b, x.decision == y.decision)
        for by in real.values()
        for (a, x), (b, y) in combinations(sorted(by.items()), 2)
    ]
    people = sorted({who for by in first.values() for who in by} | set(withdrawn))
    reviewers = [_reviewer(who, first, real, pairs, withdrawn[who]) for who in people]
    waits = [min(_wait(row) for row in by.values()) for by in real.values()]
    return ReviewStatistics(
        limit=limit,
        reviewers=reviewers,
        agreed=sum(same for _, _, same in pairs),
        pairs=len(pairs),
        leaks_found=sum(r.leaks_found for r in reviewers),
        leaks=sum(r.leaks for r in reviewers),
        turnaround_s=median(waits) if waits else None,
    )


def _reviewer(
    who: str,
    first: dict[tuple[str, int], dict[str, Any]],
    real: dict[tuple[str, int], dict[str, Any]],
    pairs: Sequence[tuple[str, str, bool]],
    withdrawn: int,
) -> Reviewer:
    mine = [by[who] for by in real.values() if who in by]
    planted = [by[who] for key, by in first.items() if key not in real and who in by]
    with_me = [same for a, b, same in pairs if who in (a, b)]
    return Reviewer(
        login=who,
        approved=sum(r.decision == Decision.APPROVE for r in mine),
        rejected=sum(r.decision == Decision.REJECT for r in mine),
        withdrawn=withdrawn,
        leaks_found=sum(r.decision == Decision.REJECT for r in planted),
        leaks=len(planted),
        agreed=sum(with_me),
        pairs=len(with_me),
        turnaround_s=median(map(_wait, mine)) if mine else None,
    )


def _wait(row: Any) -> float:
    """Seconds from the revision to the verdict."""
    return max(0.0, (row.created_at - row.since).total_seconds())
