"""Experiments: arms × seeds and their runs.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _created() -> sa.Column[object]:
    clock = sa.text("clock_timestamp()")
    return sa.Column("created_at", sa.DateTime(timezone=True), server_default=clock, nullable=False)


def upgrade() -> None:
    op.create_table(
        "experiment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("spec", postgresql.JSONB(), nullable=False),
        sa.Column("spec_digest", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment")),
        sa.UniqueConstraint("name", name=op.f("uq_experiment_name")),
    )
    op.create_table(
        "branch",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_branch_cycle_id")),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_branch")),
        sa.UniqueConstraint("cycle_id", name=op.f("uq_branch_cycle_id")),
    )
    op.create_table(
        "experiment_run",
        sa.Column("experiment_id", sa.Integer(), nullable=False),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(), nullable=False),
        _created(),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_experiment_run_cycle_id")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_experiment_run_experiment_id")),
        sa.PrimaryKeyConstraint("experiment_id", "arm", "seed", name=op.f("pk_experiment_run")),
    )
    op.create_index(op.f("ix_experiment_run_cycle_id"), "experiment_run", ["cycle_id"])


def downgrade() -> None:
    for table in ("experiment_run", "branch", "experiment"):
        op.drop_table(table)
