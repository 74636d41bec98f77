"""Runbooks, findings, reviews and replays."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import ReviewDecision, RunbookState
from stages.domain import LeakPart, Severity


class Runbook(SQLModel, table=True):
    """One revision of a runbook. An edit is a new revision; the old row stays."""

    __tablename__ = "runbook"
    __table_args__ = (
        sa.Index("ix_runbook_state", "state", "seq"),
        sa.Index("ix_runbook_cycle", "cycle_id", "state", "seq"),
        sa.Index("ix_runbook_stage", "stage_id", "seq"),
        sa.Index("ix_runbook_queue", "state", "stage_id", "id"),
    )

    id: str = Field(primary_key=True)
    revision: int = Field(primary_key=True)
    seq: int | None = Field(
        default=None, sa_column=sa.Column(sa.BigInteger, sa.Identity(), unique=True, nullable=False)
    )
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id")
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    task_id: str = Field(index=True)
    source_trajectory_id: str = Field(index=True)
    planner: str
    author: str = ""  # login of the person who edited it; empty: the planner
    lines: list[dict[str, Any]] = Field(sa_type=JSONB)  # [{text, cites: [turn]}]
    raw_text: str = ""
    state: RunbookState = Field(default=RunbookState.WRITTEN, sa_type=words(RunbookState))
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Review(SQLModel, table=True):
    """One verdict on one revision. Append-only (a trigger refuses UPDATE and DELETE; design: invariant 8)."""

    __tablename__ = "review"
    __table_args__ = (
        sa.ForeignKeyConstraint(["runbook_id", "revision"], ["runbook.id", "runbook.revision"]),
        sa.Index("ix_review_runbook", "runbook_id", "revision", "id"),
        sa.Index("ix_review_reviewer", "reviewer", "id"),
        sa.Index("ix_review_people", "id", postgresql_where=sa.text("reviewer LIKE 'person:%'")),
    )

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    key: str = Field(unique=True)  # the same verdict given twice is stored once
    runbook_id: str
    revision: int
    reviewer: str  # "rules", "model:<name>", "person:<login>"
    decision: ReviewDecision = Field(sa_type=words(ReviewDecision))
    reason: str = ""
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Finding(SQLModel, table=True):
    """One reason against a runbook, with its evidence."""

    __tablename__ = "finding"
    __table_args__ = (sa.Index("ix_finding_runbook", "runbook_id", "revision"),)

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    review_id: int = Field(foreign_key="review.id", index=True, sa_type=sa.BigInteger)
    runbook_id: str
    revision: int
    part: LeakPart = Field(sa_type=words(LeakPart))
    severity: Severity = Field(sa_type=words(Severity))
    rule: str
    message: str
    line: int | None = None  # 0-based runbook line
    start: int = 0
    end: int = 0
    evidence: str = ""
    evidence_source: str = ""


class Replay(SQLModel, table=True):
    """a_x(τ) of one replay (spec §2.1)."""

    __tablename__ = "replay"

    trajectory_id: str = Field(foreign_key="trajectory.id", ondelete="CASCADE", primary_key=True)
    stage_id: int | None = Field(default=None, foreign_key="stage.id", index=True)
    runbook_id: str = Field(index=True)
    accepted: bool
    reason: str = ""
    arm: str = "own"  # "own", "none" or "other"; the last two only measure
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
