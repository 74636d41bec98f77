"""Alembic environment. `orchestrator.store.schema` runs it with a connection; nothing else does."""

from alembic import context

from orchestrator.models import metadata


def run() -> None:
    connection = context.config.attributes["connection"]
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=False,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
