"""Append-only rows and artifacts: events, audit log, log lines, artifact index."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import ArtifactKind


class Event(SQLModel, table=True):
    """Append-only fact (a trigger refuses UPDATE and DELETE). `id` is the SSE id: ids become visible in order."""

    __tablename__ = "event"
    __table_args__ = (
        sa.Index("ix_event_cycle", "cycle_id", "id"),
        sa.Index(  # the few that say since when a state holds, and what alarmed
            "ix_event_moves", "cycle_id", "kind", "id", postgresql_where=sa.text("kind IN ('cycle.state', 'alarm')")
        ),
    )

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id")
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    kind: str  # EventKind; text, so that an old reader meets a new kind without failing
    payload: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class AuditLog(SQLModel, table=True):
    """Who changed what. Append-only."""

    __tablename__ = "audit_log"
    __table_args__ = (
        sa.Index("ix_audit_log_actor", "actor", "id"),
        sa.Index("ix_audit_log_action", "action", "id"),
        sa.Index("ix_audit_log_object", "object_kind", "object_id", "id"),
    )

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    actor: str  # login, "cli" or "flow"
    action: str  # "cycle.pause", "runbook.approve", …
    object_kind: str = ""
    object_id: str = ""
    payload: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class LogLine(SQLModel, table=True):
    """One line that a flow logged."""

    __tablename__ = "log_line"
    __table_args__ = (sa.Index("ix_log_line_cycle", "cycle_id", "id"), sa.Index("ix_log_line_stage", "stage_id", "id"))

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    cycle_id: int = Field(foreign_key="cycle.id")
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    level: int  # as in `logging`: 20 info, 30 warning, 40 error
    logger: str = ""
    text: str
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class Artifact(SQLModel, table=True):
    """One content-addressed file in the artifact store."""

    __tablename__ = "artifact"

    sha256: str = Field(primary_key=True)
    kind: ArtifactKind = Field(sa_type=words(ArtifactKind))
    size: int = Field(sa_type=sa.BigInteger)  # bytes
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
