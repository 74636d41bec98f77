"""The nouns of the method: tasks, turns, trajectories, checks, runbooks and their states.

Frozen and slotted: a stage returns values and changes none. Shapes: T tokens of one segment, U turns of one trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np


class EndReason(StrEnum):
    """Why an attempt stopped (spec §7)."""

    DONE = "done"  # the agent said so
    TURN_CAP = "turn_cap"  # the last allowed turn was used
    TOKEN_CAP = "token_cap"  # the last allowed output token was used
    CONTEXT_OVERFLOW = "context_overflow"  # the next prompt would not fit
    TIME_LIMIT = "time_limit"  # the wall clock ran out; voids a digest claim
    CANCELLED = "cancelled"  # oversampling cut, or a person
    ERROR = "error"  # image, daemon or sampler failed


class Verdict(StrEnum):
    """What the verifier said. Only `passed` and `failed` are verdicts; the others are masked from training and counted."""

    PASSED = "passed"  # every required check, gate included, ran and passed
    FAILED = "failed"  # a required check failed or did not run
    VERIFIER_ERROR = "verifier_error"  # the verifier gives no verdict on a pristine image either
    INFRA_ERROR = "infra_error"  # sandbox, image or sampler failed
    NONE = "none"  # never verified (cancelled)

    @property
    def counts(self) -> bool:
        """True when the attempt has a verdict (spec §7)."""
        return self in (Verdict.PASSED, Verdict.FAILED)


class CheckRole(StrEnum):
    SCENARIO = "scenario"  # counts towards progress P
    GATE = "gate"  # must pass for strict success, never counts towards P


class CheckStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"  # missing or skipped: is not passed


class Stratum(StrEnum):
    """Difficulty band (spec §8)."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    EXTREME = "extreme"


class Phase(StrEnum):
    """A part of a stage. Its name is the same in code, database and console."""

    EXPLORE = "explore"
    REWRITE = "rewrite"
    REVIEW = "review"
    REPLAY = "replay"
    DISTIL = "distil"
    PROFILE = "profile"
    WARMUP = "warm-up"
    CALIBRATE = "calibrate"
    JOINT = "joint"
    CALIBRATE_SURPLUS = "calibrate-surplus"  # attempts that came too late for a calibration batch (spec §7)
    JOINT_SURPLUS = "joint-surplus"  # the same of a joint step: in no batch, rate or denominator
    VALIDATE = "validate"
    EVALUATE = "evaluate"

    @property
    def surplus(self) -> Phase:
        """Where the attempts go that this phase's batches had no room for; the phase itself where it has no batches."""
        return {Phase.CALIBRATE: Phase.CALIBRATE_SURPLUS, Phase.JOINT: Phase.JOINT_SURPLUS}.get(self, self)

    @property
    def paid_by(self) -> Phase:
        """The phase that the tokens of an attempt were spent in."""
        return {Phase.CALIBRATE_SURPLUS: Phase.CALIBRATE, Phase.JOINT_SURPLUS: Phase.JOINT}.get(self, self)


class Boundary(StrEnum):
    """How the next prompt was made to extend what was sampled, in the order in which it is tried (spec §6.1)."""

    STRICT_PREFIX = "strict_prefix"
    TRIMMED = "trimmed_normalisation"
    RETOKENISED = "retokenised_boundary"
    NEW_CHUNK = "new_chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpec:
    """One assertion that a verifier must report (the test-id manifest)."""

    id: str
    role: CheckRole = CheckRole.SCENARIO


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One assertion's outcome."""

    id: str
    role: CheckRole
    status: CheckStatus
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources of one sandbox."""

    memory_mb: int = 256
    storage_mb: int = 16  # size of the writable tmpfs
    inodes: int = 4096
    pids: int = 64
    cpus: float = 1.0
    command_timeout_s: float = 10.0
    output_bytes: int = 65536  # kept per command, head and tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, read from a Harbor folder.

    `root` holds `instruction.md`, `task.toml`, `environment/`, `tests/`, `solution/`. Only `instruction` and `files` may
    reach an agent; tests and solution stay in `root` until the agent is dead.
    """

    id: str
    suite: str  # pool or suite it came from
    family: str  # tasks sharing a reward scale D_f
    stratum: Stratum
    instruction: str
    root: Path
    digest: str  # SHA-256 over every file of the folder
    files: Mapping[str, bytes] = field(default_factory=dict)  # initial workspace, relative path -> content
    workdir: str = "/app"
    checks: tuple[CheckSpec, ...] = ()  # empty: whatever the verifier reports
    max_turns: int = 100_000  # spec §7; embedded tasks have their own
    limits: Limits = field(default_factory=Limits)
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 60.0
    nop_progress: int = 0  # scenario checks that pass when nothing is done
    categories: tuple[str, ...] = ()
    env: Mapping[str, str] = field(
        default_factory=dict
    )  # of the agent's shell, and of the scripts where it is harmless
    verifier_env: Mapping[str, str] = field(default_factory=dict)  # of tests/test.sh only
    solution_env: Mapping[str, str] = field(default_factory=dict)  # of solution/solve.sh only
    needs_docker: tuple[str, ...] = ()  # why the bubblewrap backend cannot run it as it is meant
    rootfs: str = ""  # the prepared root filesystem that it runs on, by name; empty: the backend's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model response and the observation that followed it."""

    index: int
    action: str
    observation: str
    exit_code: int | None  # None: the shell ended, or no command was run
    timed_out: bool = False
    segment: int = 0
    start: int = 0  # first sampled token in its segment
    end: int = 0  # one past the last
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A stretch of tokens with one prompt prefix (spec §3.4). Arrays share length T.

    `loss_mask[j]` is True iff token j was sampled by the policy and is trained on; `rollout_log_probs[j]` is then the
    sampler's log-probability of it (0 elsewhere) and `turn_ids[j]` its turn (-1 elsewhere).
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    rollout_log_probs: np.ndarray  # float32 [T]
    turn_ids: np.ndarray  # int32 [T]
    kind: str = "policy"  # "policy", or the sub-call: "summary", "questions", "answers"
    rollout_routed_experts: np.ndarray | None = None  # int32 [T-1, L, K], MoE samplers only
    weight_versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One attempt at a task in one fresh sandbox.

    `id` is a pure function of (stage seed, phase, step, task, attempt), so a repeated attempt replaces itself.
    """

    id: str
    task_id: str
    family: str
    stratum: Stratum
    attempt: int
    seed: int
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    checks: tuple[CheckResult, ...]
    end_reason: EndReason
    verdict: Verdict
    weight_version: str
    runbook_id: str | None = None  # the runbook in its context, if any
    boundaries: Mapping[Boundary, int] = field(default_factory=dict)
    drift_tokens: int = 0
    flags: tuple[str, ...] = ()  # e.g. "broke_verifier"
    duration_s: float = 0.0
    sampler_s: float = 0.0
    sandbox_s: float = 0.0
    nop_progress: int = 0
    raw_answers: tuple[str, ...] = ()  # the sampler's own answers, JSON, for the drift proof
    verifier_log: str = ""
    suite: str = ""  # pool or suite of the task (Task.suite)

    @property
    def strict(self) -> bool:
        """S: the strict outcome V_x(τ) (spec §1)."""
        return self.verdict is Verdict.PASSED

    @property
    def progress(self) -> int:
        """P: passed scenario checks (spec §1)."""
        return sum(c.status is CheckStatus.PASSED and c.role is CheckRole.SCENARIO for c in self.checks)

    @property
    def has_report(self) -> bool:
        """False when the verifier gave no per-check report; then P = S in family `f/binary` (spec §4.2)."""
        return any(c.role is CheckRole.SCENARIO for c in self.checks)

    @property
    def only_gate_failed(self) -> bool:
        """Passed every executed scenario check but not the gate (spec §4.4)."""
        ran = [c for c in self.checks if c.role is CheckRole.SCENARIO and c.status is not CheckStatus.NOT_RUN]
        return not self.strict and bool(ran) and all(c.status is CheckStatus.PASSED for c in ran)

    @property
    def sampled_tokens(self) -> int:
        return int(sum(s.loss_mask.sum() for s in self.segments))


class LeakPart(StrEnum):
    """The three parts of the leak gate (spec §2.1)."""

    PATTERN = "pattern"
    ARTIFACT = "artifact"
    COMPATIBILITY = "compatibility"


class Severity(StrEnum):
    HARD = "hard"  # only a new revision cures it
    SOFT = "soft"  # a person may dismiss it with a reason


class Decision(StrEnum):
    APPROVE = "approve"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunbookLine:
    """One step of a runbook and the source turns that it restates."""

    text: str
    cites: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runbook:
    """A reusable procedure written by a planner from a public task and a sanitised successful trajectory (spec §2.1)."""

    id: str
    task_id: str
    source_trajectory_id: str
    planner: str  # checkpoint or model that wrote it
    lines: tuple[RunbookLine, ...]
    revision: int = 1
    raw_text: str = ""

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason against a runbook, with its evidence."""

    part: LeakPart
    severity: Severity
    rule: str  # short rule id, e.g. "pattern.hidden-path"
    message: str
    line: int | None = None  # 0-based runbook line
    start: int = 0  # span in that line
    end: int = 0
    evidence: str = ""  # the text that it matches
    evidence_source: str = ""  # "instruction", "turn 3", "tests/test.sh:12", …


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """One reviewer's verdict on one revision."""

    runbook_id: str
    revision: int
    reviewer: str  # "rules", "model:<name>", "person:<login>"
    decision: Decision
    reason: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScale:
    """D_f of one family, frozen for a phase (spec §4.2, §4.5)."""

    family: str
    value: float  # D_f or D'_f, in checks
    attempts: int  # profiling attempts behind it
    multiplier: float = 1.0  # c_f
    floored: bool = False
    borrowed_from: str | None = None  # too few attempts of its own: whose quantile it took, e.g. "stratum hard"
