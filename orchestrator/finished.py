"""What a stage finished before it was interrupted, read from the database (`stages.loop.Finished`)."""

from __future__ import annotations

from collections import defaultdict

from orchestrator import models as m
from orchestrator.store import Store
from stages.domain import FamilyScale, Phase, Review, Runbook, Trajectory
from stages.loop import NothingFinished
from stages.replay import Demonstration
from stages.review import GateState, GateStatus, ReviewPolicy, gate_decision, quota_met


class StoredPhases(NothingFinished):
    """A phase counts as finished once its `PhaseDone` was stored; otherwise it runs again, with the same seeds."""

    def __init__(self, store: Store, stage: m.Stage, policy: ReviewPolicy) -> None:
        assert stage.id is not None
        self._store, self._stage, self._policy = store, stage.id, policy
        self._cycle, self._attempt = stage.cycle_id, stage.attempt

    @property
    def _done(self) -> set[Phase]:
        """Read each time: phases end, and people decide, while this object lives."""
        return {p for p, row in self._store.stages.phases(self._stage).items() if row.state is m.PhaseState.DONE}

    def trajectories(self, phase: Phase) -> list[Trajectory] | None:
        if phase not in self._done:
            return None
        return list(self._store.trajectories.load(self._stage, phase))

    def runbooks(self) -> list[Runbook] | None:
        return list(self._store.runbooks.load(self._stage)) if Phase.REWRITE in self._done else None

    def approved(self) -> set[str] | None:
        """None while the gate is open; else it closes here, so that no verdict is taken after the count.

        Superseded revisions do not count.
        """
        if Phase.REVIEW not in self._done:
            return None
        with self._store.transaction():
            self._store.cycles.lock(self._cycle)
            states = gate_states(self._store, self._stage, self._policy)
            if not quota_met(states.values(), self._policy):
                return None
            if Phase.REPLAY not in self._store.stages.phases(self._stage):
                self._store.stages.start_phase(self._stage, Phase.REPLAY, None, self._attempt)
            self._store.runbooks.consume(self._stage)
        return {book_id for book_id, state in states.items() if state.status is GateStatus.APPROVED}

    def demonstrations(self) -> list[Demonstration] | None:
        if Phase.REPLAY not in self._done:
            return None
        books = {b.id: b for b in self._store.runbooks.load(self._stage)}
        accepted = self._store.replays.accepted_ids(self._stage)
        replays = self._store.trajectories.load(self._stage, Phase.REPLAY)
        return [
            Demonstration(runbook=books[t.runbook_id], trajectory=t)
            for t in replays
            if t.id in accepted and t.runbook_id
        ]

    def scales(self) -> tuple[FamilyScale, ...] | None:
        return self._store.profiles.load(self._stage, Phase.PROFILE) if Phase.PROFILE in self._done else None

    def selected(self, phase: Phase) -> str | None:
        row = self._store.selections.get(self._stage, phase)
        return row.chosen if row else None


def gate_states(store: Store, stage_id: int, policy: ReviewPolicy) -> dict[str, GateState]:
    """What the verdicts on each runbook of a stage add up to, by runbook id; newest revisions only."""
    verdicts: dict[str, list[Review]] = defaultdict(list)
    for review in store.reviews.load(stage_id):
        verdicts[review.runbook_id].append(review)
    authors = store.runbooks.authors(stage_id)
    return {
        book.id: gate_decision(verdicts[book.id], policy, author=authors[book.id], revision=book.revision)
        for book in store.runbooks.load(stage_id)
    }
