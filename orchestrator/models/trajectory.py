"""Suites, tasks, trajectories and what is inside them.

A trajectory row carries everything a list shows; texts of turns are rows too; token arrays and raw sampler answers are
in the artifact store. Text columns hold the text as people read it: a NUL byte, which Postgres refuses, is shown as ␀
(the artifact keeps it).
"""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import Split
from stages.domain import CheckRole, CheckStatus, EndReason, Phase, Stratum, Verdict


class Suite(SQLModel, table=True):
    """One version of a pool or benchmark; a changed suite is a new row."""

    __tablename__ = "suite"
    __table_args__ = (sa.UniqueConstraint("name", "digest"),)

    id: int | None = Field(default=None, primary_key=True)
    name: str
    version: str = "1"
    digest: str  # over the digests of its tasks, sorted
    split: Split = Field(sa_type=words(Split))
    n_tasks: int
    path: str = ""
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Task(SQLModel, table=True):
    __tablename__ = "task"

    suite_id: int = Field(foreign_key="suite.id", primary_key=True)
    task_id: str = Field(primary_key=True, index=True)
    family: str = Field(index=True)
    stratum: Stratum = Field(sa_type=words(Stratum))
    instruction: str
    digest: str
    categories: list[str] = Field(default_factory=list, sa_type=JSONB)
    checks: list[dict[str, Any]] = Field(default_factory=list, sa_type=JSONB)  # [{id, role}]
    max_turns: int = 100_000
    nop_progress: int = 0
    path: str = ""


class Trajectory(SQLModel, table=True):
    """One attempt. `id` is that of `stages.domain.Trajectory`, so a repeated attempt replaces itself; `seq` orders pages."""

    __tablename__ = "trajectory"
    __table_args__ = (
        # Every list is one of these with `seq` as the keyset.
        sa.Index("ix_trajectory_cycle", "cycle_id", "seq"),
        sa.Index("ix_trajectory_stage", "stage_id", "phase", "step", "seq"),
        sa.Index("ix_trajectory_task", "suite", "task_id", "seq"),
        sa.Index("ix_trajectory_task_id", "task_id", "seq"),
        sa.Index("ix_trajectory_verdict", "verdict", "seq"),
        sa.Index("ix_trajectory_cycle_verdict", "cycle_id", "verdict", "seq"),
        sa.Index("ix_trajectory_family", "family", "seq"),
        # Filters that fit nothing must not walk a family's every attempt to find that out.
        sa.Index("ix_trajectory_family_verdict", "family", "stratum", "verdict", "end_reason", "seq"),
        sa.Index("ix_trajectory_runbook", "runbook_id", postgresql_where=sa.text("runbook_id IS NOT NULL")),
        sa.Index("ix_trajectory_checkpoint", "checkpoint_id", "suite", "seq"),
        sa.Index("ix_trajectory_end_reason", "end_reason", "seq"),
        sa.Index("ix_trajectory_stratum", "stratum", "seq"),
        sa.Index("ix_trajectory_gate_only", "seq", postgresql_where=sa.text("only_gate_failed")),
        sa.Index(  # the most expensive unsolved attempts
            "ix_trajectory_unsolved", sa.text("n_sampled DESC"), "seq", postgresql_where=sa.text("NOT strict")
        ),
        sa.Index(
            "ix_trajectory_cycle_unsolved",
            "cycle_id",
            sa.text("n_sampled DESC"),
            "seq",
            postgresql_where=sa.text("NOT strict"),
        ),
        sa.Index(
            "ix_trajectory_task_unsolved",
            "suite",
            "task_id",
            sa.text("n_sampled DESC"),
            "seq",
            postgresql_where=sa.text("NOT strict"),
        ),
        sa.Index("ix_trajectory_flagged", "seq", postgresql_where=sa.text("flags <> '[]'::jsonb")),
        sa.Index("ix_trajectory_suspicious", "seq", postgresql_where=sa.text("strict AND flags <> '[]'::jsonb")),
    )

    id: str = Field(primary_key=True)
    seq: int | None = Field(
        default=None, sa_column=sa.Column(sa.BigInteger, sa.Identity(), unique=True, nullable=False)
    )
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id")
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    phase: Phase | None = Field(default=None, sa_type=words(Phase))
    step: int = 0
    checkpoint_id: int | None = Field(default=None, foreign_key="checkpoint.id")  # that acted, if it is a saved one
    suite: str = ""
    task_id: str
    family: str
    stratum: Stratum = Field(sa_type=words(Stratum))
    attempt: int
    seed: int = Field(sa_type=sa.BigInteger)
    verdict: Verdict = Field(sa_type=words(Verdict))
    end_reason: EndReason = Field(sa_type=words(EndReason))
    strict: bool  # S
    progress: int  # P, passed scenario checks
    n_checks: int  # scenario checks reported
    only_gate_failed: bool = False
    nop_progress: int = 0
    n_turns: int
    n_segments: int = 1
    n_tokens: int  # all tokens of policy segments
    n_sampled: int  # tokens inside the loss mask
    reward: float | None = None
    runbook_id: str | None = None
    flags: list[str] = Field(default_factory=list, sa_type=JSONB)
    boundaries: dict[str, int] = Field(default_factory=dict, sa_type=JSONB)
    drift_tokens: int = 0
    weight_version: str = ""
    duration_s: float = 0.0
    sampler_s: float = 0.0
    sandbox_s: float = 0.0
    verifier_log: str = ""
    artifact: str | None = None  # key of the chunk that holds its arrays and answers
    trained_on: str | None = None  # key of the file with its values and advantages, once a step has trained on it
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Turn(SQLModel, table=True):
    """One model response and the observation that followed it."""

    __tablename__ = "turn"

    trajectory_id: str = Field(foreign_key="trajectory.id", ondelete="CASCADE", primary_key=True)
    index: int = Field(primary_key=True)
    action: str
    observation: str
    exit_code: int | None = Field(default=None, sa_type=sa.BigInteger)
    timed_out: bool = False
    segment: int = 0
    start: int = 0  # first sampled token in its segment
    end: int = 0  # one past the last
    duration_s: float = 0.0


class CheckResult(SQLModel, table=True):
    """One assertion's outcome."""

    __tablename__ = "check_result"

    trajectory_id: str = Field(foreign_key="trajectory.id", ondelete="CASCADE", primary_key=True)
    index: int = Field(primary_key=True)
    check_id: str
    role: CheckRole = Field(sa_type=words(CheckRole))
    status: CheckStatus = Field(sa_type=words(CheckStatus))
    message: str = ""


class Segment(SQLModel, table=True):
    """A stretch of tokens with one prompt prefix; its arrays are in the trajectory's artifact."""

    __tablename__ = "segment"

    trajectory_id: str = Field(foreign_key="trajectory.id", ondelete="CASCADE", primary_key=True)
    index: int = Field(primary_key=True)
    kind: str = "policy"
    n_tokens: int
    n_sampled: int
    weight_versions: list[str] = Field(default_factory=list, sa_type=JSONB)
