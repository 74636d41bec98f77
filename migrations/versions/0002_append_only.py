"""What autogeneration does not write: append-only tables, a signal for each new event, keys between stage and checkpoint.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

APPEND_ONLY = ("event", "review", "finding", "audit_log")

REFUSE = """
CREATE FUNCTION rsi_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'The table % is append-only: % is refused. Write a new row instead.', TG_TABLE_NAME, TG_OP
    USING ERRCODE = 'integrity_constraint_violation';
END $$
"""

# One signal per statement: the payload is only a hint, readers fetch from the table by id.
NOTIFY = """
CREATE FUNCTION rsi_notify_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('rsi_event', COALESCE((SELECT max(id)::text FROM fresh), ''));
  RETURN NULL;
END $$
"""


def upgrade() -> None:
    for side in ("actor", "critic"):  # the two tables name each other, so these keys come last
        column = f"{side}_parent_id"
        op.create_foreign_key(f"fk_stage_{column}", "stage", "checkpoint", [column], ["id"])
    op.execute(REFUSE)
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION rsi_refuse()"
        )
    op.execute(NOTIFY)
    op.execute(
        "CREATE TRIGGER event_notify AFTER INSERT ON event REFERENCING NEW TABLE AS fresh "
        "FOR EACH STATEMENT EXECUTE FUNCTION rsi_notify_event()"
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER event_notify ON event")
    for table in APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
    op.execute("DROP FUNCTION rsi_notify_event()")
    op.execute("DROP FUNCTION rsi_refuse()")
    for side in ("actor", "critic"):
        op.drop_constraint(f"fk_stage_{side}_parent_id", "stage", type_="foreignkey")
