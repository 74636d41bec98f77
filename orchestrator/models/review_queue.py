"""The reviewers' queue: claims, findings that were seen, skips, comments, planted leaks."""

from datetime import datetime

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import Timestamp, created, now


class ReviewClaim(SQLModel, table=True):
    """One person means to decide on one runbook. A claim ends by itself; an assignment stays and keeps nobody out."""

    __tablename__ = "review_claim"

    runbook_id: str = Field(primary_key=True)
    login: str = Field(primary_key=True, index=True)
    assigned_by: str = ""  # empty: claimed by the person
    expires_at: datetime | None = Field(default=None, sa_type=Timestamp)  # None: assigned, not claimed
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class ReviewSeen(SQLModel, table=True):
    """A person has had a finding before the eyes; an approval asks for all of them."""

    __tablename__ = "review_seen"

    finding_id: int = Field(foreign_key="finding.id", primary_key=True, sa_type=sa.BigInteger)
    login: str = Field(primary_key=True)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class ReviewSkip(SQLModel, table=True):
    """Put off by a person: it comes last in that person's queue."""

    __tablename__ = "review_skip"

    runbook_id: str = Field(primary_key=True)
    login: str = Field(primary_key=True)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class ReviewComment(SQLModel, table=True):
    """A remark on a revision. It decides nothing."""

    __tablename__ = "review_comment"
    __table_args__ = (
        sa.ForeignKeyConstraint(["runbook_id", "revision"], ["runbook.id", "runbook.revision"]),
        sa.Index("ix_review_comment_runbook", "runbook_id", "id"),
    )

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    runbook_id: str
    revision: int
    login: str
    text: str
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class KnownLeak(SQLModel, table=True):
    """A copy of a clean runbook with a leak that we planted, to measure reviewers.

    Its runbook row belongs to no stage and no cycle, so that no gate, quota, replay or training can meet it; `stage_id`
    only says in which stage's queue it is shown.
    """

    __tablename__ = "known_leak"

    runbook_id: str = Field(primary_key=True)
    stage_id: int = Field(foreign_key="stage.id", index=True)
    copy_of: str = Field(index=True)  # the clean runbook
    kind: str  # which planting
    line: int  # 0-based
    truth: str  # what a reviewer should have found; shown after the own verdict
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
