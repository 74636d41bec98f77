"""Columns and indexes that the console's lists need.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trajectory", sa.Column("trained_on", sa.String(), nullable=True))
    op.create_index("ix_audit_set_digest", "audit", ["set_digest"], unique=False)
    op.create_index(
        "ix_trajectory_suspicious",
        "trajectory",
        ["seq"],
        unique=False,
        postgresql_where=sa.text("strict AND flags <> '[]'::jsonb"),
    )
    op.create_index(
        "ix_trajectory_family_verdict",
        "trajectory",
        ["family", "stratum", "verdict", "end_reason", "seq"],
        unique=False,
    )
    op.create_index(
        "ix_trajectory_task_unsolved",
        "trajectory",
        ["suite", "task_id", sa.text("n_sampled DESC"), "seq"],
        unique=False,
        postgresql_where=sa.text("NOT strict"),
    )
    op.create_index(
        "ix_cycle_experiment",
        "cycle",
        [sa.text("(config ->> 'experiment') text_pattern_ops")],
        unique=False,
        postgresql_where=sa.text("config ->> 'experiment' IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_cycle_experiment", table_name="cycle")
    op.drop_index("ix_trajectory_task_unsolved", table_name="trajectory")
    op.drop_index("ix_trajectory_family_verdict", table_name="trajectory")
    op.drop_index("ix_trajectory_suspicious", table_name="trajectory")
    op.drop_index("ix_audit_set_digest", table_name="audit")
    op.drop_column("trajectory", "trained_on")
