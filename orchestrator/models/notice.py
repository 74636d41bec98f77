"""What people are told: notices, inboxes, and webhooks with their deliveries."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now, words
from orchestrator.models.states import DeliveryState


class Notice(SQLModel, table=True):
    """One fact that somebody should know, written in the transaction of its event."""

    __tablename__ = "notice"

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    event_id: int = Field(foreign_key="event.id", unique=True, sa_type=sa.BigInteger)
    kind: str  # NoticeKind; text, so that an old reader meets a new kind without failing
    cycle_id: int | None = Field(default=None, foreign_key="cycle.id", index=True)
    stage_id: int | None = Field(default=None, foreign_key="stage.id")
    text: str  # one sentence for people
    payload: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class InboxItem(SQLModel, table=True):
    """One notice in one person's inbox."""

    __tablename__ = "inbox_item"
    __table_args__ = (
        sa.Index("ix_inbox_item_notice_id", "notice_id"),
        sa.Index("ix_inbox_item_unread", "user_id", postgresql_where=sa.text("read_at IS NULL")),
    )

    user_id: int = Field(foreign_key="users.id", primary_key=True)
    notice_id: int = Field(foreign_key="notice.id", primary_key=True, sa_type=sa.BigInteger)
    read_at: datetime | None = Field(default=None, sa_type=Timestamp)


class Webhook(SQLModel, table=True):
    """An address that notices are sent to. Notices up to `after_notice_id` have their delivery, or are older than it."""

    __tablename__ = "webhook"

    url: str = Field(primary_key=True)
    after_notice_id: int = Field(default=0, sa_type=sa.BigInteger)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class WebhookDelivery(SQLModel, table=True):
    """One notice on its way to one address: how often it was tried, and what was answered."""

    __tablename__ = "webhook_delivery"
    __table_args__ = (
        sa.UniqueConstraint("url", "notice_id"),
        sa.Index("ix_webhook_delivery_due", "next_at", postgresql_where=sa.text("state = 'waiting'")),
        sa.Index("ix_webhook_delivery_notice_id", "notice_id"),
    )

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger)
    url: str = Field(foreign_key="webhook.url")
    notice_id: int = Field(foreign_key="notice.id", sa_type=sa.BigInteger)
    state: DeliveryState = Field(default=DeliveryState.WAITING, sa_type=words(DeliveryState))
    attempts: int = 0
    status: int | None = None  # HTTP status of the last answer; None: no answer
    error: str = ""  # why the last attempt did not count
    next_at: datetime = Field(default_factory=now, sa_type=Timestamp)
    finished_at: datetime | None = Field(default=None, sa_type=Timestamp)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
