"""Every table of the first version.

Revision ID: 0001
Revises:
Create Date: 2026-11-29 18:12:41.918659
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "artifact",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifact")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("object_kind", sa.String(), nullable=False),
        sa.Column("object_id", sa.String(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_actor", "audit_log", ["actor", "id"], unique=False)
    op.create_index("ix_audit_log_object", "audit_log", ["object_kind", "object_id", "id"], unique=False)
    op.create_table(
        "cycle",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("recipe", sa.String(), nullable=False),
        sa.Column("config", postgresql.JSONB(), nullable=False),
        sa.Column("config_digest", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("desired_state", sa.String(32), nullable=False),
        sa.Column("base_checkpoint", sa.String(), nullable=False),
        sa.Column("cloned_from_id", sa.Integer(), nullable=True),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("environment", postgresql.JSONB(), nullable=False),
        sa.Column("estimate", postgresql.JSONB(), nullable=True),
        sa.Column("digest_claim_void", sa.String(), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["cloned_from_id"], ["cycle.id"], name=op.f("fk_cycle_cloned_from_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cycle")),
    )
    op.create_index(op.f("ix_cycle_cloned_from_id"), "cycle", ["cloned_from_id"], unique=False)
    op.create_index(op.f("ix_cycle_config_digest"), "cycle", ["config_digest"], unique=False)
    op.create_index("ix_cycle_state", "cycle", ["state", sa.literal_column("id DESC")], unique=False)
    op.create_table(
        "harness_setting",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("settings", postgresql.JSONB(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_harness_setting")),
    )
    op.create_table(
        "reference_row",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("numerator", sa.Integer(), nullable=True),
        sa.Column("denominator", sa.Integer(), nullable=True),
        sa.Column("harness", sa.String(), nullable=False),
        sa.Column("derived", sa.Boolean(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reference_row")),
        sa.UniqueConstraint(
            "source", "label", "suite", "metric", name=op.f("uq_reference_row_source_label_suite_metric")
        ),
    )
    op.create_table(
        "resource_setting",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("settings", postgresql.JSONB(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_resource_setting")),
    )
    op.create_table(
        "suite",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("split", sa.String(32), nullable=False),
        sa.Column("n_tasks", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_suite")),
        sa.UniqueConstraint("name", "digest", name=op.f("uq_suite_name_digest")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("login", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("email", sa.String(), nullable=False),
        sa.Column("roles", postgresql.ARRAY(sa.String(length=32)), nullable=False),
        sa.Column("password_hash", sa.String(), nullable=True),
        sa.Column("preferences", postgresql.JSONB(), nullable=False),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("login", name=op.f("uq_users_login")),
    )
    op.create_table(
        "arm",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("from_stage", sa.String(), nullable=False),
        sa.Column("overrides", postgresql.JSONB(), nullable=False),
        sa.Column("retained", sa.Boolean(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_arm_cycle_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_arm")),
        sa.UniqueConstraint("cycle_id", "name", name=op.f("uq_arm_cycle_id_name")),
    )
    op.create_table(
        "stage",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("plan", postgresql.JSONB(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("phase", sa.String(32), nullable=True),
        sa.Column("progress_done", sa.Integer(), nullable=False),
        sa.Column("progress_total", sa.Integer(), nullable=True),
        sa.Column("progress_text", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("actor_parent_id", sa.Integer(), nullable=True),
        sa.Column("critic_parent_id", sa.Integer(), nullable=True),
        sa.Column("expected_s", sa.Float(), nullable=True),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_stage_cycle_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stage")),
        sa.UniqueConstraint("cycle_id", "arm", "name", name=op.f("uq_stage_cycle_id_arm_name")),
        sa.UniqueConstraint("cycle_id", "index", name=op.f("uq_stage_cycle_id_index")),
    )
    op.create_table(
        "task",
        sa.Column("suite_id", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("stratum", sa.String(32), nullable=False),
        sa.Column("instruction", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("categories", postgresql.JSONB(), nullable=False),
        sa.Column("checks", postgresql.JSONB(), nullable=False),
        sa.Column("max_turns", sa.Integer(), nullable=False),
        sa.Column("nop_progress", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["suite_id"], ["suite.id"], name=op.f("fk_task_suite_id")),
        sa.PrimaryKeyConstraint("suite_id", "task_id", name=op.f("pk_task")),
    )
    op.create_index(op.f("ix_task_family"), "task", ["family"], unique=False)
    op.create_index(op.f("ix_task_task_id"), "task", ["task_id"], unique=False)
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("selection", postgresql.JSONB(), nullable=False),
        sa.Column("set_digest", sa.String(), nullable=False),
        sa.Column("formulas", postgresql.JSONB(), nullable=False),
        sa.Column("result", postgresql.JSONB(), nullable=False),
        sa.Column("artifact", sa.String(), nullable=True),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_audit_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_audit_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_cycle_id"), "audit", ["cycle_id"], unique=False)
    op.create_index(op.f("ix_audit_stage_id"), "audit", ["stage_id"], unique=False)
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("actor_digest", sa.String(), nullable=False),
        sa.Column("critic_digest", sa.String(), nullable=True),
        sa.Column("actor_parent_id", sa.Integer(), nullable=True),
        sa.Column("critic_parent_id", sa.Integer(), nullable=True),
        sa.Column("retained", sa.Boolean(), nullable=False),
        sa.Column("parent_kept", sa.Boolean(), nullable=False),
        sa.Column("metrics", postgresql.JSONB(), nullable=False),
        sa.Column("manifest_digest", sa.String(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["actor_parent_id"], ["checkpoint.id"], name=op.f("fk_checkpoint_actor_parent_id")),
        sa.ForeignKeyConstraint(["critic_parent_id"], ["checkpoint.id"], name=op.f("fk_checkpoint_critic_parent_id")),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_checkpoint_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_checkpoint_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoint")),
        sa.UniqueConstraint(
            "cycle_id", "arm", "name", name=op.f("uq_checkpoint_cycle_id_arm_name"), postgresql_nulls_not_distinct=True
        ),
    )
    op.create_index(op.f("ix_checkpoint_actor_digest"), "checkpoint", ["actor_digest"], unique=False)
    op.create_index(op.f("ix_checkpoint_actor_parent_id"), "checkpoint", ["actor_parent_id"], unique=False)
    op.create_index(op.f("ix_checkpoint_critic_digest"), "checkpoint", ["critic_digest"], unique=False)
    op.create_index(op.f("ix_checkpoint_critic_parent_id"), "checkpoint", ["critic_parent_id"], unique=False)
    op.create_index(op.f("ix_checkpoint_cycle_id"), "checkpoint", ["cycle_id"], unique=False)
    op.create_index("ix_checkpoint_list", "checkpoint", ["retained", sa.literal_column("id DESC")], unique=False)
    op.create_index(op.f("ix_checkpoint_stage_id"), "checkpoint", ["stage_id"], unique=False)
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_event_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_event_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index("ix_event_cycle", "event", ["cycle_id", "id"], unique=False)
    op.create_table(
        "log_line",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=False),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("logger", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_log_line_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_log_line_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_line")),
    )
    op.create_index("ix_log_line_cycle", "log_line", ["cycle_id", "id"], unique=False)
    op.create_index("ix_log_line_stage", "log_line", ["stage_id", "id"], unique=False)
    op.create_table(
        "profile",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("stage_id", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_profile_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profile")),
        sa.UniqueConstraint("stage_id", "phase", name=op.f("uq_profile_stage_id_phase")),
    )
    op.create_table(
        "runbook",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("source_trajectory_id", sa.String(), nullable=False),
        sa.Column("planner", sa.String(), nullable=False),
        sa.Column("author", sa.String(), nullable=False),
        sa.Column("lines", postgresql.JSONB(), nullable=False),
        sa.Column("raw_text", sa.String(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_runbook_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_runbook_stage_id")),
        sa.PrimaryKeyConstraint("id", "revision", name=op.f("pk_runbook")),
        sa.UniqueConstraint("seq", name=op.f("uq_runbook_seq")),
    )
    op.create_index("ix_runbook_cycle", "runbook", ["cycle_id", "state", "seq"], unique=False)
    op.create_index(op.f("ix_runbook_source_trajectory_id"), "runbook", ["source_trajectory_id"], unique=False)
    op.create_index("ix_runbook_stage", "runbook", ["stage_id", "seq"], unique=False)
    op.create_index("ix_runbook_state", "runbook", ["state", "seq"], unique=False)
    op.create_index(op.f("ix_runbook_task_id"), "runbook", ["task_id"], unique=False)
    op.create_table(
        "selection",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("stage_id", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("chosen", sa.String(), nullable=False),
        sa.Column("candidates", postgresql.JSONB(), nullable=False),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("suite_digest", sa.String(), nullable=False),
        sa.Column("parent_kept", sa.Boolean(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_selection_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_selection")),
        sa.UniqueConstraint("stage_id", "phase", name=op.f("uq_selection_stage_id_phase")),
    )
    op.create_table(
        "stage_phase",
        sa.Column("stage_id", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("facts", postgresql.JSONB(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_stage_phase_stage_id")),
        sa.PrimaryKeyConstraint("stage_id", "phase", name=op.f("pk_stage_phase")),
    )
    op.create_table(
        "step_metric",
        sa.Column("stage_id", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_step_metric_stage_id")),
        sa.PrimaryKeyConstraint("stage_id", "phase", "step", "name", name=op.f("pk_step_metric")),
    )
    op.create_index("ix_step_metric_name", "step_metric", ["name", "stage_id"], unique=False)
    op.create_table(
        "evaluation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("checkpoint_id", sa.Integer(), nullable=True),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("suite_digest", sa.String(), nullable=False),
        sa.Column("suite_version", sa.String(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("passed", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("verdicts", sa.Integer(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("wall_s", sa.Float(), nullable=False),
        sa.Column("settings", postgresql.JSONB(), nullable=False),
        sa.Column("harness_digest", sa.String(), nullable=True),
        sa.Column("resource_digest", sa.String(), nullable=True),
        sa.Column("reference_only", sa.Boolean(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoint.id"], name=op.f("fk_evaluation_checkpoint_id")),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_evaluation_cycle_id")),
        sa.ForeignKeyConstraint(
            ["harness_digest"], ["harness_setting.digest"], name=op.f("fk_evaluation_harness_digest")
        ),
        sa.ForeignKeyConstraint(
            ["resource_digest"], ["resource_setting.digest"], name=op.f("fk_evaluation_resource_digest")
        ),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_evaluation_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluation")),
        sa.UniqueConstraint(
            "stage_id",
            "checkpoint",
            "suite",
            "suite_digest",
            "harness_digest",
            name=op.f("uq_evaluation_stage_id_checkpoint_suite_suite_digest_harness_digest"),
            postgresql_nulls_not_distinct=True,
        ),
    )
    op.create_index("ix_evaluation_checkpoint", "evaluation", ["checkpoint_id", "suite"], unique=False)
    op.create_index(op.f("ix_evaluation_cycle_id"), "evaluation", ["cycle_id"], unique=False)
    op.create_index("ix_evaluation_suite", "evaluation", ["suite", "suite_digest"], unique=False)
    op.create_table(
        "family_scale",
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("multiplier", sa.Float(), nullable=False),
        sa.Column("floored", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profile.id"], name=op.f("fk_family_scale_profile_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("profile_id", "family", name=op.f("pk_family_scale")),
    )
    op.create_table(
        "review",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("reviewer", sa.String(), nullable=False),
        sa.Column("decision", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["runbook_id", "revision"], ["runbook.id", "runbook.revision"], name=op.f("fk_review_runbook_id_revision")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_review")),
        sa.UniqueConstraint("key", name=op.f("uq_review_key")),
    )
    op.create_index("ix_review_reviewer", "review", ["reviewer", "id"], unique=False)
    op.create_index("ix_review_runbook", "review", ["runbook_id", "revision", "id"], unique=False)
    op.create_table(
        "trajectory",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("cycle_id", sa.Integer(), nullable=True),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("phase", sa.String(32), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("checkpoint_id", sa.Integer(), nullable=True),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("stratum", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.String(32), nullable=False),
        sa.Column("end_reason", sa.String(32), nullable=False),
        sa.Column("strict", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.Integer(), nullable=False),
        sa.Column("n_checks", sa.Integer(), nullable=False),
        sa.Column("only_gate_failed", sa.Boolean(), nullable=False),
        sa.Column("nop_progress", sa.Integer(), nullable=False),
        sa.Column("n_turns", sa.Integer(), nullable=False),
        sa.Column("n_segments", sa.Integer(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("n_sampled", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("runbook_id", sa.String(), nullable=True),
        sa.Column("flags", postgresql.JSONB(), nullable=False),
        sa.Column("boundaries", postgresql.JSONB(), nullable=False),
        sa.Column("drift_tokens", sa.Integer(), nullable=False),
        sa.Column("weight_version", sa.String(), nullable=False),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.Column("sampler_s", sa.Float(), nullable=False),
        sa.Column("sandbox_s", sa.Float(), nullable=False),
        sa.Column("verifier_log", sa.String(), nullable=False),
        sa.Column("artifact", sa.String(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoint.id"], name=op.f("fk_trajectory_checkpoint_id")),
        sa.ForeignKeyConstraint(["cycle_id"], ["cycle.id"], name=op.f("fk_trajectory_cycle_id")),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_trajectory_stage_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectory")),
        sa.UniqueConstraint("seq", name=op.f("uq_trajectory_seq")),
    )
    op.create_index("ix_trajectory_checkpoint", "trajectory", ["checkpoint_id", "suite", "seq"], unique=False)
    op.create_index("ix_trajectory_cycle", "trajectory", ["cycle_id", "seq"], unique=False)
    op.create_index("ix_trajectory_cycle_verdict", "trajectory", ["cycle_id", "verdict", "seq"], unique=False)
    op.create_index("ix_trajectory_family", "trajectory", ["family", "seq"], unique=False)
    op.create_index(
        "ix_trajectory_flagged", "trajectory", ["seq"], unique=False, postgresql_where=sa.text("flags <> '[]'::jsonb")
    )
    op.create_index(
        "ix_trajectory_runbook",
        "trajectory",
        ["runbook_id"],
        unique=False,
        postgresql_where=sa.text("runbook_id IS NOT NULL"),
    )
    op.create_index("ix_trajectory_stage", "trajectory", ["stage_id", "phase", "step", "seq"], unique=False)
    op.create_index("ix_trajectory_task", "trajectory", ["suite", "task_id", "seq"], unique=False)
    op.create_index("ix_trajectory_task_id", "trajectory", ["task_id", "seq"], unique=False)
    op.create_index("ix_trajectory_verdict", "trajectory", ["verdict", "seq"], unique=False)
    op.create_table(
        "check_result",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("check_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectory.id"], name=op.f("fk_check_result_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "index", name=op.f("pk_check_result")),
    )
    op.create_table(
        "evaluation_task",
        sa.Column("evaluation_id", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("stratum", sa.String(32), nullable=False),
        sa.Column("passed", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("verdict_count", sa.Integer(), nullable=False),
        sa.Column("verdicts", postgresql.JSONB(), nullable=False),
        sa.Column("checks_passed", postgresql.JSONB(), nullable=False),
        sa.Column("checks_total", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluation.id"], name=op.f("fk_evaluation_task_evaluation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("evaluation_id", "task_id", name=op.f("pk_evaluation_task")),
    )
    op.create_index(op.f("ix_evaluation_task_task_id"), "evaluation_task", ["task_id"], unique=False)
    op.create_table(
        "finding",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("review_id", sa.BigInteger(), nullable=False),
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("part", sa.String(32), nullable=False),
        sa.Column("severity", sa.String(32), nullable=False),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=True),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("evidence", sa.String(), nullable=False),
        sa.Column("evidence_source", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["review_id"], ["review.id"], name=op.f("fk_finding_review_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_finding")),
    )
    op.create_index(op.f("ix_finding_review_id"), "finding", ["review_id"], unique=False)
    op.create_index("ix_finding_runbook", "finding", ["runbook_id", "revision"], unique=False)
    op.create_table(
        "replay",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("stage_id", sa.Integer(), nullable=True),
        sa.Column("runbook_id", sa.String(), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["stage_id"], ["stage.id"], name=op.f("fk_replay_stage_id")),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectory.id"], name=op.f("fk_replay_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_replay")),
    )
    op.create_index(op.f("ix_replay_runbook_id"), "replay", ["runbook_id"], unique=False)
    op.create_index(op.f("ix_replay_stage_id"), "replay", ["stage_id"], unique=False)
    op.create_table(
        "segment",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("n_sampled", sa.Integer(), nullable=False),
        sa.Column("weight_versions", postgresql.JSONB(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectory.id"], name=op.f("fk_segment_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "index", name=op.f("pk_segment")),
    )
    op.create_table(
        "turn",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("observation", sa.String(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("timed_out", sa.Boolean(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectory.id"], name=op.f("fk_turn_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "index", name=op.f("pk_turn")),
    )


def downgrade() -> None:
    op.drop_table("turn")
    op.drop_table("segment")
    op.drop_index(op.f("ix_replay_stage_id"), table_name="replay")
    op.drop_index(op.f("ix_replay_runbook_id"), table_name="replay")
    op.drop_table("replay")
    op.drop_index("ix_finding_runbook", table_name="finding")
    op.drop_index(op.f("ix_finding_review_id"), table_name="finding")
    op.drop_table("finding")
    op.drop_index(op.f("ix_evaluation_task_task_id"), table_name="evaluation_task")
    op.drop_table("evaluation_task")
    op.drop_table("check_result")
    op.drop_index("ix_trajectory_verdict", table_name="trajectory")
    op.drop_index("ix_trajectory_task_id", table_name="trajectory")
    op.drop_index("ix_trajectory_task", table_name="trajectory")
    op.drop_index("ix_trajectory_stage", table_name="trajectory")
    op.drop_index("ix_trajectory_runbook", table_name="trajectory", postgresql_where=sa.text("runbook_id IS NOT NULL"))
    op.drop_index("ix_trajectory_flagged", table_name="trajectory", postgresql_where=sa.text("flags <> '[]'::jsonb"))
    op.drop_index("ix_trajectory_family", table_name="trajectory")
    op.drop_index("ix_trajectory_cycle_verdict", table_name="trajectory")
    op.drop_index("ix_trajectory_cycle", table_name="trajectory")
    op.drop_index("ix_trajectory_checkpoint", table_name="trajectory")
    op.drop_table("trajectory")
    op.drop_index("ix_review_runbook", table_name="review")
    op.drop_index("ix_review_reviewer", table_name="review")
    op.drop_table("review")
    op.drop_table("family_scale")
    op.drop_index("ix_evaluation_suite", table_name="evaluation")
    op.drop_index(op.f("ix_evaluation_cycle_id"), table_name="evaluation")
    op.drop_index("ix_evaluation_checkpoint", table_name="evaluation")
    op.drop_table("evaluation")
    op.drop_index("ix_step_metric_name", table_name="step_metric")
    op.drop_table("step_metric")
    op.drop_table("stage_phase")
    op.drop_table("selection")
    op.drop_index(op.f("ix_runbook_task_id"), table_name="runbook")
    op.drop_index("ix_runbook_state", table_name="runbook")
    op.drop_index("ix_runbook_stage", table_name="runbook")
    op.drop_index(op.f("ix_runbook_source_trajectory_id"), table_name="runbook")
    op.drop_index("ix_runbook_cycle", table_name="runbook")
    op.drop_table("runbook")
    op.drop_table("profile")
    op.drop_index("ix_log_line_stage", table_name="log_line")
    op.drop_index("ix_log_line_cycle", table_name="log_line")
    op.drop_table("log_line")
    op.drop_index("ix_event_cycle", table_name="event")
    op.drop_table("event")
    op.drop_index(op.f("ix_checkpoint_stage_id"), table_name="checkpoint")
    op.drop_index("ix_checkpoint_list", table_name="checkpoint")
    op.drop_index(op.f("ix_checkpoint_cycle_id"), table_name="checkpoint")
    op.drop_index(op.f("ix_checkpoint_critic_parent_id"), table_name="checkpoint")
    op.drop_index(op.f("ix_checkpoint_critic_digest"), table_name="checkpoint")
    op.drop_index(op.f("ix_checkpoint_actor_parent_id"), table_name="checkpoint")
    op.drop_index(op.f("ix_checkpoint_actor_digest"), table_name="checkpoint")
    op.drop_table("checkpoint")
    op.drop_index(op.f("ix_audit_stage_id"), table_name="audit")
    op.drop_index(op.f("ix_audit_cycle_id"), table_name="audit")
    op.drop_table("audit")
    op.drop_index(op.f("ix_task_task_id"), table_name="task")
    op.drop_index(op.f("ix_task_family"), table_name="task")
    op.drop_table("task")
    op.drop_table("stage")
    op.drop_table("arm")
    op.drop_table("users")
    op.drop_table("suite")
    op.drop_table("resource_setting")
    op.drop_table("reference_row")
    op.drop_table("harness_setting")
    op.drop_index("ix_cycle_state", table_name="cycle")
    op.drop_index(op.f("ix_cycle_config_digest"), table_name="cycle")
    op.drop_index(op.f("ix_cycle_cloned_from_id"), table_name="cycle")
    op.drop_table("cycle")
    op.drop_index("ix_audit_log_object", table_name="audit_log")
    op.drop_index("ix_audit_log_actor", table_name="audit_log")
    op.drop_table("audit_log")
    op.drop_table("artifact")
