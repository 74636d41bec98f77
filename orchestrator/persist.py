"""Records become rows and one event, in one transaction. `Recorder` is what a flow uses; it batches attempts.

with Recorder(store, stage) as recorder:
    for record in stage_generator:
        recorder.record(record)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

from orchestrator import models as m
from orchestrator import trained
from orchestrator.artifacts import ArtifactKind
from orchestrator.store import Store
from stages.domain import Decision, EndReason, Phase, Verdict
from stages.loop import SEED_CRITIC
from stages.records import (
    AttemptFinished,
    BatchReady,
    CheckpointSaved,
    EvaluationDone,
    PhaseDone,
    PhaseStarted,
    Progress,
    Record,
    ReplayJudged,
    RunbookReviewed,
    RunbookWritten,
    ScalesProfiled,
    Selected,
    StepDone,
    SurplusDropped,
)
from stages.tokens import require_no_drift

CHUNK = 240  # attempts per artifact
# Phases in which the checkpoint that entered the stage acts.
ACTED_BY_PARENT = {Phase.EXPLORE, Phase.REPLAY, Phase.PROFILE, Phase.WARMUP, Phase.CALIBRATE}
AUTOMATIC = ("rules", "model:")


def persist(store: Store, stage: m.Stage, record: Record, *, human_review: bool = False) -> None:
    """Store one record. Storing it again, after an interruption, changes nothing else.

    `human_review`: runbooks that pass the automatic reviews wait for people instead of being approved.
    """
    if isinstance(record, AttemptFinished):
        persist_many(store, stage, [record])
        return
    with store.transaction():
        kind, payload = _write(store, stage, record, human_review)
        store.events.append(kind, cycle_id=stage.cycle_id, stage_id=stage.id, payload=payload)


def persist_many(store: Store, stage: m.Stage, attempts: Sequence[AttemptFinished]) -> None:
    """Store a chunk of attempts: one artifact, one transaction, one event per phase.

    The artifact is written first; a crash in between leaves a file that nothing names, never a row without its file.
    """
    if not attempts:
        return
    chunk = store.artifacts.save_trajectories([a.trajectory for a in attempts])
    with store.transaction():
        store.files.register(chunk.files)
        if (reason := next(filter(None, map(_voids_digests, attempts)), None)) is not None:
            store.cycles.void_digest_claim(stage.cycle_id, reason)
        suites = store.suites.suite_of([a.trajectory.task_id for a in attempts if not a.trajectory.suite])
        acted = {v: _acting(store, stage, v) for v in {a.trajectory.weight_version for a in attempts}}
        for phase in dict.fromkeys(a.phase for a in attempts):
            group = [a for a in attempts if a.phase is phase]
            parent = stage.actor_parent_id if phase in ACTED_BY_PARENT else None
            store.trajectories.add(
                [a.trajectory for a in group],
                cycle_id=stage.cycle_id,
                stage_id=stage.id,
                phase=phase,
                steps=[a.step for a in group],
                checkpoint_ids=[acted[a.trajectory.weight_version] or parent for a in group],
                suites=suites,
                artifact=chunk.key,
            )
            payload = {
                "phase": phase,
                "attempts": len(group),
                "verdicts": sum(a.trajectory.verdict.counts for a in group),
                "passed": sum(a.trajectory.strict for a in group),
            }
            store.events.append(m.EventKind.ATTEMPTS, cycle_id=stage.cycle_id, stage_id=stage.id, payload=payload)


def _voids_digests(attempt: AttemptFinished) -> str | None:
    """Why equal digests cannot be promised after this attempt (design: invariant 6): the clock or the machine decided."""
    t = attempt.trajectory
    if t.end_reason is EndReason.TIME_LIMIT:
        what = "ran out of time"
    elif t.verdict is Verdict.INFRA_ERROR:
        what = "failed with its sandbox or sampler"
    elif (turn := next((turn.index for turn in t.turns if turn.timed_out), None)) is not None:
        what = f"had a command that timed out (turn {turn})"
    else:
        return None
    return f"attempt {t.id} of task {t.task_id} ({attempt.phase}) {what}"


@dataclass(slots=True)
class Recorder:
    """Persists the records of one stage in their order. Used by one thread.

    Attempts wait until there are `chunk` of them, `max_wait_s` have passed, or a record of another kind comes; so at most
    that much is repeated after a kill. Progress is shown at most every `progress_s`.
    """

    store: Store
    stage: m.Stage
    human_review: bool = False
    chunk: int = CHUNK
    max_wait_s: float = 5.0
    progress_s: float = 0.5
    _waiting: list[AttemptFinished] = field(default_factory=list)
    _since: float = 0.0
    _shown: float = 0.0

    def record(self, record: Record) -> None:
        """Store a record, or keep it for the next chunk. Raises DriftError for a batch that differs from what is stored."""
        if isinstance(record, AttemptFinished):
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(record)
            if len(self._waiting) >= self.chunk or time.monotonic() - self._since > self.max_wait_s:
                self.flush()
        elif isinstance(record, Progress):
            if record.done == record.total or time.monotonic() - self._shown >= self.progress_s:
                self._shown = time.monotonic()
                persist(self.store, self.stage, record)
        elif isinstance(record, BatchReady):
            self.flush()
            stored = self.store.trajectories.raw_answers([t.id for t in record.trajectories])
            require_no_drift([replace(t, raw_answers=stored[t.id]) for t in record.trajectories])
        else:
            self.flush()
            persist(self.store, self.stage, record, human_review=self.human_review)

    def flush(self) -> None:
        """Store the waiting attempts now."""
        persist_many(self.store, self.stage, self._waiting)
        self._waiting.clear()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Attempts that are finished are stored even when the stage was stopped or failed."""
        self.flush()


# --------------------------------------------------------------------------- one record


def _write(store: Store, stage: m.Stage, record: Record, human_review: bool) -> tuple[m.EventKind, dict[str, Any]]:
    """Rows of a record; returns its event."""
    stage_id = stage.id
    assert stage_id is not None
    match record:
        case PhaseStarted():
            store.stages.start_phase(stage_id, record.phase, record.total, stage.attempt)
            if record.phase is Phase.REPLAY:
                store.runbooks.consume(stage_id)
            return m.EventKind.PHASE_STARTED, {"phase": record.phase, "total": record.total}
        case Progress():
            store.stages.set_progress(stage_id, record.phase, record.done, record.total, record.text)
            return m.EventKind.PROGRESS, asdict(record)
        case SurplusDropped():
            store.trajectories.set_phase(record.trajectory_ids, record.phase.surplus)
            payload = {"phase": record.phase, "step": record.step, "completed": record.completed}
            return m.EventKind.SURPLUS_DROPPED, payload | {"trajectories": list(record.trajectory_ids)}
        case RunbookWritten():
            store.runbooks.write(record.runbook, cycle_id=stage.cycle_id, stage_id=stage_id)
            return m.EventKind.RUNBOOK_WRITTEN, {"runbook": record.runbook.id, "revision": record.runbook.revision}
        case RunbookReviewed():
            return m.EventKind.RUNBOOK_REVIEWED, _review(store, record, human_review)
        case ReplayJudged():
            store.replays.judge([record], stage_id=stage_id)
            return m.EventKind.REPLAY_JUDGED, asdict(record)
        case StepDone():
            store.metrics.add(stage_id, record.phase, record.step, record.metrics)
            if record.trained_on:
                arrays = store.artifacts.put(trained.pack(record.trained_on), ArtifactKind.TOKENS)
                store.files.register([arrays])
                store.trajectories.set_trained({a.trajectory_id: a.reward for a in record.trained_on}, arrays.sha256)
            certificate = {} if record.certificate is None else {"certificate": asdict(record.certificate)}
            return m.EventKind.STEP_DONE, {"phase": record.phase, "step": record.step, **certificate}
        case ScalesProfiled():
            store.profiles.save(stage_id, record.phase, record.scales)
            return m.EventKind.SCALES_PROFILED, {"phase": record.phase, "families": len(record.scales)}
        case CheckpointSaved():
            return m.EventKind.CHECKPOINT_SAVED, _checkpoint(store, stage, record)
        case Selected():
            return m.EventKind.SELECTED, _selection(store, stage_id, record)
        case EvaluationDone():
            return m.EventKind.EVALUATION_DONE, _evaluation(store, stage, record)
        case PhaseDone():
            store.stages.finish_phase(stage_id, record.phase, record.facts)
            return m.EventKind.PHASE_DONE, {"phase": record.phase, "facts": dict(record.facts)}
        case _:
            raise TypeError(f"{type(record).__name__} is no record that can be stored here")


def _review(store: Store, record: RunbookReviewed, human_review: bool) -> dict[str, Any]:
    review = record.review
    store.reviews.add(review)
    if review.reviewer.startswith(AUTOMATIC):  # what people decide is settled by the gate
        passed = m.RunbookState.WAITING if human_review else m.RunbookState.APPROVED
        advice = human_review and review.reviewer != AUTOMATIC[0]  # a model's word: people decide all the same
        decided = m.RunbookState.REJECTED if review.decision is Decision.REJECT and not advice else passed
        store.runbooks.settle(review.runbook_id, review.revision, decided)
    return {
        "runbook": review.runbook_id,
        "revision": review.revision,
        "reviewer": review.reviewer,
        "decision": review.decision,
        "findings": len(review.findings),
    }


def _checkpoint(store: Store, stage: m.Stage, record: CheckpointSaved) -> dict[str, Any]:
    manifest = record.path / "manifest.json"
    row = store.checkpoints.save(
        m.Checkpoint(
            cycle_id=stage.cycle_id,
            stage_id=stage.id,
            arm=stage.arm,
            name=record.name,
            step=record.step,
            path=str(record.path),
            actor_digest=record.actor_digest,
            critic_digest=record.critic_digest,
            actor_parent_id=stage.actor_parent_id,
            # a seed critic comes from no critic; a resumed stage already notes it as the one that enters
            critic_parent_id=None if record.name.endswith(SEED_CRITIC) else stage.critic_parent_id,
            retained=record.retained,
            parent_kept=record.parent_kept,
            manifest_digest=hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None,
        )
    )
    return {"checkpoint": row.id, "name": row.name, "step": row.step, "retained": row.retained}


def _selection(store: Store, stage_id: int, record: Selected) -> dict[str, Any]:
    store.selections.save(
        m.Selection(
            stage_id=stage_id,
            phase=record.phase,
            chosen=record.chosen,
            candidates=[asdict(candidate) for candidate in record.candidates],
            suite=record.suite,
            suite_digest=record.suite_digest,
            parent_kept=record.parent_kept,
        )
    )
    return {"phase": record.phase, "chosen": record.chosen, "parent_kept": record.parent_kept}


def _evaluation(store: Store, stage: m.Stage, record: EvaluationDone) -> dict[str, Any]:
    evaluation_id = store.evaluations.save(
        record,
        cycle_id=stage.cycle_id,
        stage_id=stage.id,
        checkpoint_id=_acting(store, stage, record.checkpoint),
    )
    return {
        "evaluation": evaluation_id,
        "checkpoint": record.checkpoint,
        "suite": record.suite,
        "passed": record.passed,
        "attempts": record.attempts,
        "verdicts": record.verdicts,
    }


def _acting(store: Store, stage: m.Stage, version: str) -> int | None:
    """The saved checkpoint with this name in the stage's arm, or in the main arm it was forked from."""
    for arm in dict.fromkeys((stage.arm, "main")):
        if found := store.checkpoints.named(stage.cycle_id, version, arm):
            return found.id
    return None
