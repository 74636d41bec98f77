"""The review queue: claims, seen findings, skips, comments, known-leak items, and an index over people's verdicts.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES = ("known_leak", "review_comment", "review_skip", "review_seen", "review_claim")


def _created() -> sa.Column:
    return sa.Column(
        "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
    )


def upgrade() -> None:
    op.create_table(
        "review_claim",
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("login", sa.String(), nullable=False),
        sa.Column("assigned_by", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        _created(),
        sa.PrimaryKeyConstraint("runbook_id", "login", name="pk_review_claim"),
    )
    op.create_index("ix_review_claim_login", "review_claim", ["login"])
    op.create_table(
        "review_seen",
        sa.Column("finding_id", sa.BigInteger(), nullable=False),
        sa.Column("login", sa.String(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["finding_id"], ["finding.id"], name="fk_review_seen_finding_id"),
        sa.PrimaryKeyConstraint("finding_id", "login", name="pk_review_seen"),
    )
    op.create_table(
        "review_skip",
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("login", sa.String(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("runbook_id", "login", name="pk_review_skip"),
    )
    op.create_table(
        "review_comment",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("login", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(
            ["runbook_id", "revision"], ["runbook.id", "runbook.revision"], name="fk_review_comment_runbook_id_revision"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_review_comment"),
    )
    op.create_index("ix_review_comment_runbook", "review_comment", ["runbook_id", "id"])
    op.create_table(
        "known_leak",
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("stage_id", sa.Integer(), nullable=False),
        sa.Column("copy_of", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("truth", sa.String(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name="fk_known_leak_stage_id"),
        sa.PrimaryKeyConstraint("runbook_id", name="pk_known_leak"),
    )
    op.create_index("ix_known_leak_stage_id", "known_leak", ["stage_id"])
    op.create_index("ix_known_leak_copy_of", "known_leak", ["copy_of"])
    op.create_index("ix_runbook_queue", "runbook", ["state", "stage_id", "id"])
    op.create_index("ix_review_people", "review", ["id"], postgresql_where=sa.text("reviewer LIKE 'person:%'"))


def downgrade() -> None:
    """Planted runbooks leave the open queue with the table that says what they are."""
    op.execute("UPDATE runbook SET state = 'superseded' WHERE id IN (SELECT runbook_id FROM known_leak)")
    op.drop_index("ix_runbook_queue", table_name="runbook")
    op.drop_index("ix_review_people", table_name="review", postgresql_where=sa.text("reviewer LIKE 'person:%'"))
    for table in TABLES:
        op.drop_table(table)
