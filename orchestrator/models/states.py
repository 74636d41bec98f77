"""The words that a state column may hold. A line per value; the same words stand on the screen."""

from enum import StrEnum


class CycleState(StrEnum):
    """Where a cycle is. Moves are listed in `orchestrator.transitions` and nowhere else."""

    QUEUED = "queued"  # created; no process works on it yet
    RUNNING = "running"  # a flow process works on it
    PAUSING = "pausing"  # asked to pause; the flow stops at the next safe boundary
    PAUSED = "paused"  # no process; resume continues from the last finished record
    SUSPENDED = "suspended"  # waits at a human gate; no process
    RESUMING = "resuming"  # asked to continue; no process has taken it up yet
    CANCELLING = "cancelling"  # asked to stop for good; the flow has not stopped yet
    CANCELLED = "cancelled"  # stopped for good
    FAILED = "failed"  # stopped by an error; `error` says which; may be resumed
    DONE = "done"  # every stage is done


class AuditJobState(StrEnum):
    """An audit that a process of its own makes."""

    WAITING = "waiting"  # no process has taken it up yet
    RUNNING = "running"  # a process holds its row's lock, or held it and is gone: then the next one takes it up
    DONE = "done"  # there is an audit
    FAILED = "failed"  # `error` says why; a person may start it again


class DesiredState(StrEnum):
    """What a person asked for last. The flow compares it with the state at every safe boundary."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class StageKind(StrEnum):
    BASE = "base"  # takes the base checkpoint in, and evaluates it
    RSR = "rsr"  # recursive self-rewrite (spec §2.1)
    RPR = "rpr"  # recursive policy refine (spec §2.3)
    EVALUATE = "evaluate"  # measures checkpoints only
    IMPORT = "import"  # other people's trials


class StageState(StrEnum):
    PENDING = "pending"  # planned
    RUNNING = "running"
    SUSPENDED = "suspended"  # waits for people
    PAUSED = "paused"  # stopped at a safe boundary on request
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"  # the plan no longer needs it


class PhaseState(StrEnum):
    RUNNING = "running"
    DONE = "done"  # its facts are complete; resume goes past it


class RunbookState(StrEnum):
    WRITTEN = "written"  # no verdict yet
    WAITING = "waiting"  # passed the automatic checks; people must decide
    APPROVED = "approved"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"  # a newer revision exists
    CONSUMED = "consumed"  # approved and taken by the replay phase; verdicts can no longer be undone


class ReviewDecision(StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    WITHDRAW = "withdraw"  # a reviewer takes the own verdict back; the old row stays


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"  # protected: selection only
    HELD_OUT = "held_out"  # reported; never tuned on


class ArtifactKind(StrEnum):
    TRAJECTORIES = "trajectories"  # index of a chunk: JSON, gzip
    TOKENS = "tokens"  # token arrays of a chunk: safetensors
    ANSWERS = "answers"  # raw sampler answers of a chunk: JSON lines, gzip
    TEXT = "text"
    FILE = "file"


class NoticeKind(StrEnum):
    """What people are told of."""

    GATE_OPENED = "gate.opened"  # a cycle waits for verdicts: to the reviewers
    CYCLE_DONE = "cycle.done"  # to the lead who launched it
    CYCLE_FAILED = "cycle.failed"  # stopped by an error or an alarm: to the lead who launched it
    ALARM = "alarm"  # a health rule fired and training goes on: to the lead who launched it


class DeliveryState(StrEnum):
    WAITING = "waiting"  # to be tried at `next_at`
    DELIVERED = "delivered"  # the receiver answered 2xx
    GIVEN_UP = "given_up"  # every attempt failed


class Role(StrEnum):
    LEAD = "lead"  # launches and stops cycles
    REVIEWER = "reviewer"  # decides on runbooks
    ANALYST = "analyst"  # reads and compares
    ADMIN = "admin"  # people and tokens


class EventKind(StrEnum):
    """Kind of an event row; its id is the SSE id."""

    CYCLE_CREATED = "cycle.created"
    CYCLE_STATE = "cycle.state"
    STAGE_STATE = "stage.state"
    PHASE_STARTED = "phase.started"
    PHASE_DONE = "phase.done"
    PROGRESS = "progress"  # rate-limited
    ATTEMPTS = "attempts"  # a chunk of attempts
    SURPLUS_DROPPED = "surplus.dropped"  # attempts that came too late for their step's batch
    RUNBOOK_WRITTEN = "runbook.written"
    RUNBOOK_REVIEWED = "runbook.reviewed"
    REPLAY_JUDGED = "replay.judged"
    REVIEWS_CHANGED = "reviews.changed"  # a verdict, an edit or a withdrawal; of whom and which is not said
    STEP_DONE = "step.done"
    SCALES_PROFILED = "scales.profiled"
    CHECKPOINT_SAVED = "checkpoint.saved"
    SELECTED = "selected"
    EVALUATION_DONE = "evaluation.done"
    ALARM = "alarm"  # a health rule fired
    LOG = "log"  # new log lines
