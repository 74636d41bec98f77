"""Evaluations of equally named checkpoints, or with another k, are measurements of their own.

Revision ID: 0004
Revises: 0003
Create Date: 2026-11-29 20:00:00
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

OLD = "uq_evaluation_stage_id_checkpoint_suite_suite_digest_harness_digest"
NEW = "uq_evaluation_measurement"


def upgrade() -> None:
    op.drop_constraint(op.f(OLD), "evaluation", type_="unique")
    op.create_unique_constraint(
        NEW,
        "evaluation",
        ["stage_id", "checkpoint_id", "checkpoint", "k", "suite", "suite_digest", "harness_digest"],
        postgresql_nulls_not_distinct=True,
    )


def downgrade() -> None:
    """The narrower key holds the newest of each."""
    op.drop_constraint(NEW, "evaluation", type_="unique")
    op.execute(
        "DELETE FROM evaluation e USING evaluation n WHERE n.id > e.id AND n.stage_id IS NOT DISTINCT FROM e.stage_id "
        "AND n.checkpoint = e.checkpoint AND n.suite = e.suite AND n.suite_digest = e.suite_digest "
        "AND n.harness_digest IS NOT DISTINCT FROM e.harness_digest"
    )
    op.create_unique_constraint(
        op.f(OLD),
        "evaluation",
        ["stage_id", "checkpoint", "suite", "suite_digest", "harness_digest"],
        postgresql_nulls_not_distinct=True,
    )
