"""Indexes for the lists by end reason, stratum, gate and cost.

Revision ID: 0003
Revises: 0002
Create Date: 2026-11-29 18:28:15.569235
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_trajectory_cycle_unsolved",
        "trajectory",
        ["cycle_id", sa.literal_column("n_sampled DESC"), "seq"],
        unique=False,
        postgresql_where=sa.text("NOT strict"),
    )
    op.create_index("ix_trajectory_end_reason", "trajectory", ["end_reason", "seq"], unique=False)
    op.create_index(
        "ix_trajectory_gate_only", "trajectory", ["seq"], unique=False, postgresql_where=sa.text("only_gate_failed")
    )
    op.create_index("ix_trajectory_stratum", "trajectory", ["stratum", "seq"], unique=False)
    op.create_index(
        "ix_trajectory_unsolved",
        "trajectory",
        [sa.literal_column("n_sampled DESC"), "seq"],
        unique=False,
        postgresql_where=sa.text("NOT strict"),
    )


def downgrade() -> None:
    op.drop_index("ix_trajectory_unsolved", table_name="trajectory", postgresql_where=sa.text("NOT strict"))
    op.drop_index("ix_trajectory_stratum", table_name="trajectory")
    op.drop_index("ix_trajectory_gate_only", table_name="trajectory", postgresql_where=sa.text("only_gate_failed"))
    op.drop_index("ix_trajectory_end_reason", table_name="trajectory")
    op.drop_index("ix_trajectory_cycle_unsolved", table_name="trajectory", postgresql_where=sa.text("NOT strict"))
