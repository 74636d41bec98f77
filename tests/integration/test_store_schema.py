"""Migrations and models agree; append-only tables are."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from orchestrator import models as m
from orchestrator.embedded import postgres
from orchestrator.store import Store, connect, schema
from stages.domain import Decision, Finding, LeakPart, Review, Runbook, RunbookLine, Severity
from stages.errors import ConfigError, StoreError


def test_migrations_are_the_models(store: Store) -> None:
    assert schema.differences(store.engine) == []


def test_every_word_fits_its_column() -> None:
    words = [
        w for t in m.metadata.sorted_tables for c in t.columns if isinstance(c.type, sa.Enum) for w in c.type.enums
    ]
    assert words
    assert max(map(len, words)) <= 32


def test_up_and_down_and_up(empty_database_url: str) -> None:
    assert schema.current(empty_database_url) is None
    schema.upgrade(empty_database_url)
    assert schema.current(empty_database_url) == schema.head()
    schema.downgrade(empty_database_url)
    engine = connect(empty_database_url)
    assert set(sa.inspect(engine).get_table_names()) <= {"alembic_version"}
    with engine.connect() as connection:
        functions = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'rsi\\_%'"
        assert connection.execute(sa.text(functions)).scalar_one() == 0
    schema.upgrade(empty_database_url)
    assert schema.differences(engine) == []
    engine.dispose()


def test_a_database_in_another_encoding_is_refused_with_what_to_do(
    postgres_server: postgres.PostgresInfo, tmp_path: Path
) -> None:
    name = f"ascii_{os.getpid()}"
    options = sql.SQL("ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} ").format(sql.Identifier(name)) + options)
    try:
        environment = {**os.environ, "DATABASE_URL": postgres_server.url(name), "RSI_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "orchestrator.cli", "setup"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert f"database {name} on {postgres_server.socket_dir} is encoded in SQL_ASCII" in done.stderr
        advice = re.search("CREATE DATABASE .*template0;", done.stderr)
        assert advice is not None
        with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
            connection.execute(advice.group().encode())  # what it says to do is what helps
        schema.upgrade(postgres_server.url(name))
    finally:
        postgres.drop_database(postgres_server, name)


def test_two_starters_migrate_once(empty_database_url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(schema.upgrade, [empty_database_url] * 3))
    assert schema.current(empty_database_url) == schema.head()


def test_a_database_of_a_newer_version_is_refused(database_url: str) -> None:
    engine = connect(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="newer version"):
        schema.upgrade(database_url)


def test_an_unreachable_database_says_so(tmp_path) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        schema.upgrade(f"postgresql://postgres@/none?host={tmp_path}")
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(f"postgresql://postgres@/none?host={tmp_path}", tmp_path).cycles.list()


@pytest.mark.parametrize("url", ["mysql://a/b", "not a url", "sqlite:///x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        connect(url)


def _fill(store: Store) -> None:
    store.events.append(m.EventKind.ALARM, payload={"why": "test"})
    store.audit_trail.add("anna", "cycle.pause", object_kind="cycle", object_id=1)
    line = RunbookLine(text="ls", cites=(0,))
    store.runbooks.write(Runbook(id="b", task_id="t", source_trajectory_id="s", planner="p", lines=(line,)))
    finding = Finding(part=LeakPart.PATTERN, severity=Severity.HARD, rule="pattern.secret", message="says a secret")
    review = Review(runbook_id="b", revision=1, reviewer="rules", decision=Decision.REJECT, findings=(finding,))
    assert store.reviews.add(review)


@pytest.mark.parametrize("table", ["event", "audit_log", "review", "finding"])
def test_append_only(store: Store, table: str) -> None:
    _fill(store)
    for statement in (f"UPDATE {table} SET id = id + 1", f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
        with pytest.raises(StoreError, match="append-only"), store.transaction() as session:
            session.execute(sa.text(statement))
    with store.transaction() as session:
        assert session.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one() == 1


def test_every_foreign_key_of_a_busy_table_has_an_index(store: Store) -> None:
    """Without one, deleting or joining from the other side reads the whole table."""
    busy = {
        "trajectory",
        "turn",
        "check_result",
        "segment",
        "runbook",
        "review",
        "finding",
        "event",
        "log_line",
        "replay",
    }
    inspector = sa.inspect(store.engine)
    missing = []
    for table in busy:
        leading = [tuple(i["column_names"]) for i in inspector.get_indexes(table)]
        leading.append(tuple(inspector.get_pk_constraint(table)["constrained_columns"]))
        for key in inspector.get_foreign_keys(table):
            columns = tuple(key["constrained_columns"])
            if columns[0].endswith("stage_id") and table == "event":
                continue  # stages are never deleted, and events are read by cycle
            if not any(index[: len(columns)] == columns for index in leading):
                missing.append((table, columns))
    assert missing == []
