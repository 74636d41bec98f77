"""Every table. `from orchestrator import models as m`, then `m.Cycle`, `m.CycleState`, …

Rows are plain SQLModel objects without relationships: joins are written out in `orchestrator.store`, the only place
with SQL. Importing this package registers all tables in `models.metadata`.
"""

from sqlmodel import SQLModel

from orchestrator.models.cycle import Arm, Checkpoint, Cycle, Selection, Stage, StagePhase
from orchestrator.models.experiment import Branch, Experiment, ExperimentRun
from orchestrator.models.ledger import Artifact, AuditLog, Event, LogLine
from orchestrator.models.measurement import (
    Audit,
    AuditJob,
    Evaluation,
    EvaluationTask,
    FamilyScale,
    HarnessSetting,
    Profile,
    ReferenceRow,
    ResourceSetting,
    StepMetric,
)
from orchestrator.models.notice import InboxItem, Notice, Webhook, WebhookDelivery
from orchestrator.models.people import ApiToken, SignIn, SignInFailure, SignInLink, User
from orchestrator.models.review_queue import KnownLeak, ReviewClaim, ReviewComment, ReviewSeen, ReviewSkip
from orchestrator.models.runbook import Finding, Replay, Review, Runbook
from orchestrator.models.states import (
    ArtifactKind,
    AuditJobState,
    CycleState,
    DeliveryState,
    DesiredState,
    EventKind,
    NoticeKind,
    PhaseState,
    ReviewDecision,
    Role,
    RunbookState,
    Split,
    StageKind,
    StageState,
)
from orchestrator.models.trajectory import CheckResult, Segment, Suite, Task, Trajectory, Turn

metadata = SQLModel.metadata

__all__ = [
    "ApiToken",
    "Arm",
    "Artifact",
    "ArtifactKind",
    "Audit",
    "AuditJob",
    "AuditJobState",
    "AuditLog",
    "Branch",
    "CheckResult",
    "Checkpoint",
    "Cycle",
    "CycleState",
    "DeliveryState",
    "DesiredState",
    "Evaluation",
    "EvaluationTask",
    "Event",
    "EventKind",
    "Experiment",
    "ExperimentRun",
    "FamilyScale",
    "Finding",
    "HarnessSetting",
    "InboxItem",
    "KnownLeak",
    "LogLine",
    "Notice",
    "NoticeKind",
    "PhaseState",
    "Profile",
    "ReferenceRow",
    "Replay",
    "ResourceSetting",
    "Review",
    "ReviewClaim",
    "ReviewComment",
    "ReviewDecision",
    "ReviewSeen",
    "ReviewSkip",
    "Role",
    "Runbook",
    "RunbookState",
    "Segment",
    "Selection",
    "SignIn",
    "SignInFailure",
    "SignInLink",
    "Split",
    "Stage",
    "StageKind",
    "StagePhase",
    "StageState",
    "StepMetric",
    "Suite",
    "Task",
    "Trajectory",
    "Turn",
    "User",
    "Webhook",
    "WebhookDelivery",
    "metadata",
]
