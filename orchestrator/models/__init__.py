"""Every table. `from orchestrator import models as m`, then `m.Cycle`, `m.CycleState`, …

Rows are plain SQLModel objects without relationships: joins are written out in `orchestrator.store`, the only place
with SQL. Importing this package registers all tables in `models.metadata`.
"""

from sqlmodel import SQLModel

from orchestrator.models.cycle import Arm, Checkpoint, Cycle, Selection, Stage, StagePhase, User
from orchestrator.models.ledger import Artifact, AuditLog, Event, LogLine
from orchestrator.models.measurement import (
    Audit,
    Evaluation,
    EvaluationTask,
    FamilyScale,
    HarnessSetting,
    Profile,
    ReferenceRow,
    ResourceSetting,
    StepMetric,
)
from orchestrator.models.runbook import Finding, Replay, Review, Runbook
from orchestrator.models.states import (
    ArtifactKind,
    CycleState,
    DesiredState,
    EventKind,
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
    "Arm",
    "Artifact",
    "ArtifactKind",
    "Audit",
    "AuditLog",
    "CheckResult",
    "Checkpoint",
    "Cycle",
    "CycleState",
    "DesiredState",
    "Evaluation",
    "EvaluationTask",
    "Event",
    "EventKind",
    "FamilyScale",
    "Finding",
    "HarnessSetting",
    "LogLine",
    "PhaseState",
    "Profile",
    "ReferenceRow",
    "Replay",
    "ResourceSetting",
    "Review",
    "ReviewDecision",
    "Role",
    "Runbook",
    "RunbookState",
    "Segment",
    "Selection",
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
    "metadata",
]
