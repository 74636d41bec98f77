"""Step metrics, evaluations, profiles, audits, settings and reference rows."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import AuditJobState
from stages.domain import Phase, Stratum


class StepMetric(SQLModel, table=True):
    """One value of one optimiser step. A missing value is NULL, never 0."""

    __tablename__ = "step_metric"
    __table_args__ = (sa.Index("ix_step_metric_name", "name", "stage_id"),)

    stage_id: int = Field(foreign_key="stage.id", primary_key=True)
    phase: Phase = Field(sa_type=words(Phase), primary_key=True)
    step: int = Field(primary_key=True)
    name: str = Field(primary_key=True)  # "critic/vf_explained_var", "rollout/…", …
    value: float | None = None
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class HarnessSetting(SQLModel, table=True):
    """Harness and sampling settings, once per distinct value."""

    __tablename__ = "harness_setting"

    digest: str = Field(primary_key=True)  # SHA-256 of the canonical JSON
    settings: dict[str, Any] = Field(sa_type=JSONB)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class ResourceSetting(SQLModel, table=True):
    """Sandbox limits and time-outs, once per distinct value."""

    __tablename__ = "resource_setting"

    digest: str = Field(primary_key=True)
    settings: dict[str, Any] = Field(sa_type=JSONB)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Evaluation(SQLModel, table=True):
    """`Mean@k` of one checkpoint on one suite version, as numerator and denominators (spec §8)."""

    __tablename__ = "evaluation"
    __table_args__ = (
        sa.UniqueConstraint(
            "stage_id",
            "checkpoint_id",
            "checkpoint",
            "k",
            "suite",
            "suite_digest",
            "harness_digest",
            name="uq_evaluation_measurement",
            postgresql_nulls_not_distinct=True,
        ),
        sa.Index("ix_evaluation_checkpoint", "checkpoint_id", "suite"),
        sa.Index("ix_evaluation_suite", "suite", "suite_digest"),
    )

    id: int | None = Field(default=None, primary_key=True)
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    checkpoint_id: int | None = Field(default=None, foreign_key="checkpoint.id")
    checkpoint: str  # its name when it was measured
    suite: str
    suite_digest: str
    suite_version: str = ""
    k: int  # attempts per task
    passed: int  # numerator
    attempts: int  # denominator that counts a missing verdict as unsolved
    verdicts: int  # denominator of attempts with a verdict
    turns: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    settings: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    harness_digest: str | None = Field(default=None, foreign_key="harness_setting.digest")
    resource_digest: str | None = Field(default=None, foreign_key="resource_setting.digest")
    reference_only: bool = False  # another harness: shown below the rule, never ranked in
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class EvaluationTask(SQLModel, table=True):
    """One task's attempts in one evaluation, in attempt order."""

    __tablename__ = "evaluation_task"

    evaluation_id: int = Field(foreign_key="evaluation.id", ondelete="CASCADE", primary_key=True)
    task_id: str = Field(primary_key=True, index=True)
    family: str
    stratum: Stratum = Field(sa_type=words(Stratum))
    passed: int
    attempts: int
    verdict_count: int
    verdicts: list[str] = Field(sa_type=JSONB)
    checks_passed: list[int] = Field(sa_type=JSONB)
    checks_total: int


class Profile(SQLModel, table=True):
    """Family scales measured by the actor that enters a phase; frozen for it (spec §4.5)."""

    __tablename__ = "profile"
    __table_args__ = (sa.UniqueConstraint("stage_id", "phase"),)

    id: int | None = Field(default=None, primary_key=True)
    stage_id: int = Field(foreign_key="stage.id")
    phase: Phase = Field(sa_type=words(Phase))
    attempts: int  # profiling attempts over all families
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class FamilyScale(SQLModel, table=True):
    __tablename__ = "family_scale"

    profile_id: int = Field(foreign_key="profile.id", ondelete="CASCADE", primary_key=True)
    family: str = Field(primary_key=True)
    value: float  # D_f or D'_f, in checks
    attempts: int
    multiplier: float = 1.0  # c_f
    floored: bool = False


class Audit(SQLModel, table=True):
    """Re-scoring of a fixed set of trajectories under two formulas (spec §4.4)."""

    __tablename__ = "audit"

    id: int | None = Field(default=None, primary_key=True)
    name: str
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)
    stage_id: int | None = Field(default=None, foreign_key="stage.id", index=True)
    selection: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)  # which trajectories
    set_digest: str = Field(default="", index=True)  # SHA-256 over their sorted ids and outcomes
    formulas: list[dict[str, Any]] = Field(default_factory=list, sa_type=JSONB)
    result: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    artifact: str | None = None
    created_by: str = ""
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class AuditJob(SQLModel, table=True):
    """An audit of a large set that somebody asked for: a process of its own makes it."""

    __tablename__ = "audit_job"
    __table_args__ = (sa.Index("ix_audit_job_not_done", "id", postgresql_where=sa.text("state <> 'done'")),)

    id: int | None = Field(default=None, primary_key=True)
    name: str
    attempts: int  # at least so many
    spec: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)  # `orchestrator.audit_jobs.to_json`
    created_by: str = ""
    state: AuditJobState = Field(default=AuditJobState.WAITING, sa_type=words(AuditJobState))
    starts: int = 0  # processes that have taken it up
    error: str = ""
    audit_id: int | None = Field(default=None, foreign_key="audit.id", index=True)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    started_at: datetime | None = Field(default=None, sa_type=Timestamp)
    finished_at: datetime | None = Field(default=None, sa_type=Timestamp)


class ReferenceRow(SQLModel, table=True):
    """A published number of another harness or paper; reference only."""

    __tablename__ = "reference_row"
    __table_args__ = (sa.UniqueConstraint("source", "label", "suite", "metric"),)

    id: int | None = Field(default=None, primary_key=True)
    source: str
    label: str  # model or checkpoint
    suite: str
    metric: str = "success_percent"
    value: float
    numerator: int | None = None
    denominator: int | None = None
    harness: str = ""
    derived: bool = False
    note: str = ""
