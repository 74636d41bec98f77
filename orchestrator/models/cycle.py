"""Cycles, arms, stages, phases, checkpoints and selections."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import CycleState, DesiredState, PhaseState, StageKind, StageState
from stages.domain import Phase


class Cycle(SQLModel, table=True):
    """One run of the loop from Base to the last checkpoint."""

    __tablename__ = "cycle"
    __table_args__ = (
        sa.Index("ix_cycle_state", "state", sa.text("id DESC")),
        sa.Index(  # cycles of an experiment, by the label that they carry
            "ix_cycle_experiment",
            sa.text("(config ->> 'experiment') text_pattern_ops"),
            postgresql_where=sa.text("config ->> 'experiment' IS NOT NULL"),
        ),
    )

    id: int | None = Field(default=None, primary_key=True)
    name: str
    recipe: str  # name of the recipe it came from
    config: dict[str, Any] = Field(sa_type=JSONB)  # full, defaults included
    config_digest: str = Field(index=True)  # SHA-256 of the canonical JSON
    seed: int = Field(sa_type=sa.BigInteger)
    state: CycleState = Field(default=CycleState.QUEUED, sa_type=words(CycleState))
    desired_state: DesiredState = Field(default=DesiredState.RUN, sa_type=words(DesiredState))
    base_checkpoint: str  # model folder or checkpoint name it starts from
    cloned_from_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)
    code_version: str = ""  # package version and commit, if known
    environment: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)  # machine, torch build, threads
    estimate: dict[str, Any] | None = Field(default=None, sa_type=JSONB)
    digest_claim_void: str = ""  # why equal digests are not promised any more (a wall-clock limit fired)
    error: str = ""  # what stopped it, for people
    created_by: str = ""  # login, or "cli"
    flow_run_id: str | None = None  # of Prefect
    heartbeat_at: datetime | None = Field(default=None, sa_type=Timestamp)  # the flow process was alive
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    started_at: datetime | None = Field(default=None, sa_type=Timestamp)
    finished_at: datetime | None = Field(default=None, sa_type=Timestamp)


class Arm(SQLModel, table=True):
    """A branch of a cycle from one parent; one arm is retained."""

    __tablename__ = "arm"
    __table_args__ = (sa.UniqueConstraint("cycle_id", "name"),)

    id: int | None = Field(default=None, primary_key=True)
    cycle_id: int = Field(foreign_key="cycle.id")
    name: str  # "main", "fdr", …
    from_stage: str = ""  # the stage it forks at; empty for the main arm
    overrides: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    retained: bool = False
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Stage(SQLModel, table=True):
    """One stage of one cycle (RSR-1, RPR-1, …)."""

    __tablename__ = "stage"
    __table_args__ = (sa.UniqueConstraint("cycle_id", "index"), sa.UniqueConstraint("cycle_id", "arm", "name"))

    id: int | None = Field(default=None, primary_key=True)
    cycle_id: int = Field(foreign_key="cycle.id")
    index: int  # order in the cycle, from 0
    kind: StageKind = Field(sa_type=words(StageKind))
    round: int = 0  # 0 for Base, then 1, 2, …
    arm: str = "main"
    name: str  # "RSR-1"
    plan: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    state: StageState = Field(default=StageState.PENDING, sa_type=words(StageState))
    phase: Phase | None = Field(default=None, sa_type=words(Phase))  # current or last
    progress_done: int = 0
    progress_total: int | None = None
    progress_text: str = ""
    attempt: int = 0  # how often a process has started it
    actor_parent_id: int | None = Field(  # the checkpoint whose actor enters; set when the stage starts
        default=None, sa_column=sa.Column(sa.ForeignKey("checkpoint.id", use_alter=True))
    )
    critic_parent_id: int | None = Field(  # the checkpoint whose critic enters; None: no critic yet
        default=None, sa_column=sa.Column(sa.ForeignKey("checkpoint.id", use_alter=True))
    )
    expected_s: float | None = None
    flow_run_id: str | None = None
    error: str = ""
    started_at: datetime | None = Field(default=None, sa_type=Timestamp)
    finished_at: datetime | None = Field(default=None, sa_type=Timestamp)


class StagePhase(SQLModel, table=True):
    """One phase of one stage. Resume reads this: a phase that is `done` is not run again, its facts are used."""

    __tablename__ = "stage_phase"

    stage_id: int = Field(foreign_key="stage.id", primary_key=True)
    phase: Phase = Field(sa_type=words(Phase), primary_key=True)
    state: PhaseState = Field(default=PhaseState.RUNNING, sa_type=words(PhaseState))
    total: int | None = None
    facts: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    attempt: int = 1  # the stage attempt that started it last
    started_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    finished_at: datetime | None = Field(default=None, sa_type=Timestamp)


class Checkpoint(SQLModel, table=True):
    """Actor and critic references with both parents (design: invariant 1)."""

    __tablename__ = "checkpoint"
    __table_args__ = (
        sa.UniqueConstraint("cycle_id", "arm", "name", postgresql_nulls_not_distinct=True),
        sa.Index("ix_checkpoint_list", "retained", sa.text("id DESC")),
    )

    id: int | None = Field(default=None, primary_key=True)
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)  # None: imported
    stage_id: int | None = Field(default=None, foreign_key="stage.id", index=True)
    arm: str = "main"
    name: str  # "RSR-1", or "RPR-1 step 3" for a candidate
    step: int | None = None
    path: str = ""  # folder of the weights; empty when imported or deleted
    actor_digest: str = Field(index=True)  # SHA-256 over the weight bytes
    critic_digest: str | None = Field(default=None, index=True)  # None: no critic yet
    actor_parent_id: int | None = Field(default=None, foreign_key="checkpoint.id", index=True)
    critic_parent_id: int | None = Field(default=None, foreign_key="checkpoint.id", index=True)
    retained: bool = False
    parent_kept: bool = False  # the stage's result was discarded; the weights are the parent's
    metrics: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    manifest_digest: str | None = None
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Selection(SQLModel, table=True):
    """Which candidate was kept, on the protected validation suite only (design: invariant 9)."""

    __tablename__ = "selection"
    __table_args__ = (sa.UniqueConstraint("stage_id", "phase"),)

    id: int | None = Field(default=None, primary_key=True)
    stage_id: int = Field(foreign_key="stage.id")
    phase: Phase = Field(sa_type=words(Phase))
    chosen: str
    candidates: list[dict[str, Any]] = Field(sa_type=JSONB)  # [{label, passed, attempts, step}]
    suite: str
    suite_digest: str
    parent_kept: bool = False
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
