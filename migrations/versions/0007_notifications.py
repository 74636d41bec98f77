"""Notices, inboxes and webhook deliveries.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _created() -> sa.Column[object]:
    clock = sa.text("clock_timestamp()")
    return sa.Column("created_at", sa.DateTime(timezone=True), server_default=clock, nullable=False)


def upgrade() -> None:
    op.create_table(
        "notice",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_notice_cycle_id")),
        sa.ForeignKeyConstraint(["event_id"], ["event.id"], name=op.f("fk_notice_event_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_notice_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notice")),
        sa.UniqueConstraint("event_id", name=op.f("uq_notice_event_id")),
    )
    op.create_index(op.f("ix_notice_cycle_id"), "notice", ["cycle_id"])
    op.create_table(
        "inbox_item",
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("notice_id", sa.BigInteger(), nullable=False),
        sa.Column("read_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["notice_id"], ["notice.id"], name=op.f("fk_inbox_item_notice_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_inbox_item_user_id")),
        sa.PrimaryKeyConstraint("user_id", "notice_id", name=op.f("pk_inbox_item")),
    )
    op.create_index("ix_inbox_item_notice_id", "inbox_item", ["notice_id"])
    op.create_index("ix_inbox_item_unread", "inbox_item", ["user_id"], postgresql_where=sa.text("read_at IS NULL"))
    op.create_table(
        "webhook",
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("after_notice_id", sa.BigInteger(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("url", name=op.f("pk_webhook")),
    )
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("notice_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        _created(),
        sa.ForeignKeyConstraint(["notice_id"], ["notice.id"], name=op.f("fk_webhook_delivery_notice_id")),
        sa.ForeignKeyConstraint(["url"], ["webhook.url"], name=op.f("fk_webhook_delivery_url")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_delivery")),
        sa.UniqueConstraint("url", "notice_id", name=op.f("uq_webhook_delivery_url_notice_id")),
    )
    due = sa.text("state = 'waiting'")
    op.create_index("ix_webhook_delivery_due", "webhook_delivery", ["next_at"], postgresql_where=due)
    op.create_index("ix_webhook_delivery_notice_id", "webhook_delivery", ["notice_id"])
    moves = sa.text("kind IN ('cycle.state', 'alarm')")
    op.create_index("ix_event_moves", "event", ["cycle_id", "kind", "id"], postgresql_where=moves)


def downgrade() -> None:
    op.drop_index("ix_event_moves", table_name="event")
    for table in ("webhook_delivery", "webhook", "inbox_item", "notice"):
        op.drop_table(table)
