"""What a stage yields while it works. The flow persists each record in a transaction of its own (design: data flow)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stages.certificate import Certificate
from stages.domain import FamilyScale, Phase, Review, Runbook, Trajectory, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    phase: Phase
    total: int | None = None  # units of `Progress`, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Moves a bar. Not a fact: it is shown, and may be dropped."""

    phase: Phase
    done: int
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinished:
    phase: Phase
    trajectory: Trajectory
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SurplusDropped:
    """Attempts of a step that came too late for its batch: they are no samples and in no denominator (spec §7)."""

    phase: Phase
    step: int
    trajectory_ids: tuple[str, ...]
    completed: bool  # run to their end off the training path; else cancelled once the batch was full


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookWritten:
    runbook: Runbook


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookReviewed:
    review: Review


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJudged:
    """a_x(τ) = V_x(τ) · q_leak(τ) of one replay (spec §2.1)."""

    trajectory_id: str
    runbook_id: str
    accepted: bool
    reason: str = ""
    arm: str = "own"  # "own" runbook, "none", or "other" task's: the last two only measure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReady:
    """The next update would train on these attempts. No fact: whoever stores answers refuses it by raising DriftError when
    what was stored of them says something else (spec §6.1)."""

    phase: Phase
    step: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedOn:
    """What a step trained on in one attempt: its reward and, per segment, what was frozen before the update (spec §5)."""

    trajectory_id: str
    reward: float
    values: tuple[np.ndarray, ...] = ()  # float32 [T] each: v of the prefix before each token
    advantages: tuple[np.ndarray, ...] = ()  # float32 [T] each, 0 outside the loss mask; () where nothing is trained
    log_probs: tuple[np.ndarray, ...] = ()  # float32 [T] each, the learner's before the update; () where not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimiser step and its metrics (spec §5). A missing value is None, never 0."""

    phase: Phase
    step: int  # calibration steps count 1…4, joint steps from 1
    metrics: Mapping[str, float | None]
    trained_on: tuple[TrainedOn, ...] = ()  # empty: not kept
    certificate: Certificate | None = None  # of a local step


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalesProfiled:
    phase: Phase
    scales: tuple[FamilyScale, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A complete checkpoint folder; digests are recomputed from its bytes."""

    name: str  # "RSR-1", or "RPR-1 step 3" for a candidate
    path: Path
    actor_digest: str
    critic_digest: str | None
    step: int | None = None
    retained: bool = False
    parent_kept: bool = False  # the stage's own result was discarded: these are its parent's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One option of a selection and its score on the protected validation suite."""

    label: str
    passed: int
    attempts: int
    verdicts: int
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Which candidate was kept, on the protected validation suite only (spec §2.3)."""

    phase: Phase
    chosen: str
    candidates: tuple[Candidate, ...]
    suite: str
    suite_digest: str
    parent_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """Outcomes of one task's attempts, in attempt order."""

    task_id: str
    family: str
    stratum: str
    verdicts: tuple[Verdict, ...]
    checks_passed: tuple[int, ...]
    checks_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """`Mean@k` on one suite, kept as numerator and denominators (spec §8)."""

    suite: str
    suite_digest: str
    checkpoint: str
    k: int  # attempts per task
    passed: int
    attempts: int
    verdicts: int
    tasks: tuple[TaskScore, ...]
    turns: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    settings: Mapping[str, float | int | str] = field(default_factory=dict)  # harness and sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDone:
    phase: Phase
    facts: Mapping[str, float | int | str | None] = field(default_factory=dict)


Record = (
    PhaseStarted
    | Progress
    | AttemptFinished
    | SurplusDropped
    | RunbookWritten
    | RunbookReviewed
    | ReplayJudged
    | BatchReady
    | StepDone
    | ScalesProfiled
    | CheckpointSaved
    | Selected
    | EvaluationDone
    | PhaseDone
)
