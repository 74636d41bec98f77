"""Accounts: sign-ins, one-time links, failed sign-ins, API tokens.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _moment(name: str, *, nullable: bool = False, filled: bool = False) -> sa.Column:
    default = sa.text("clock_timestamp()") if filled else None
    return sa.Column(name, sa.DateTime(timezone=True), server_default=default, nullable=nullable)


def _owner(table: str) -> tuple[sa.Column, sa.ForeignKeyConstraint]:
    key = sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f(f"fk_{table}_user_id"), ondelete="CASCADE")
    return sa.Column("user_id", sa.Integer(), nullable=False), key


def upgrade() -> None:
    op.add_column("users", sa.Column("oidc_subject", sa.String(), nullable=True))
    op.create_unique_constraint(op.f("uq_users_oidc_subject"), "users", ["oidc_subject"])
    op.create_table(
        "sign_in",
        sa.Column("digest", sa.String(), nullable=False),
        *_owner("sign_in"),
        sa.Column("how", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("agent", sa.String(), nullable=False),
        _moment("created_at", filled=True),
        _moment("expires_at"),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sign_in")),
    )
    op.create_table(
        "sign_in_link",
        sa.Column("digest", sa.String(), nullable=False),
        *_owner("sign_in_link"),
        _moment("created_at", filled=True),
        _moment("expires_at"),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sign_in_link")),
    )
    for table in ("sign_in", "sign_in_link"):
        for column in ("user_id", "expires_at"):
            op.create_index(op.f(f"ix_{table}_{column}"), table, [column])
    op.create_table(
        "sign_in_failure",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        _moment("last_at"),
        _moment("paused_until"),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_sign_in_failure")),
    )
    op.create_index(op.f("ix_sign_in_failure_last_at"), "sign_in_failure", ["last_at"])
    op.create_table(
        "api_token",
        sa.Column("id", sa.Integer(), nullable=False),
        *_owner("api_token"),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("hint", sa.String(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.String(length=32)), nullable=False),
        _moment("created_at", filled=True),
        _moment("expires_at", nullable=True),
        _moment("last_used_at", nullable=True),
        _moment("revoked_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_token")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_token_digest")),
    )
    op.create_index(op.f("ix_api_token_user_id"), "api_token", ["user_id"])
    op.create_index("ix_audit_log_action", "audit_log", ["action", "id"])


def downgrade() -> None:
    op.drop_index("ix_audit_log_action", table_name="audit_log")
    for table in ("api_token", "sign_in_failure", "sign_in_link", "sign_in"):
        op.drop_table(table)
    op.drop_constraint(op.f("uq_users_oidc_subject"), "users", type_="unique")
    op.drop_column("users", "oidc_subject")
