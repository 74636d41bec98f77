"""infra/postgres/backup.sh and restore.sh on a real database: what was there is there again, whole or not at all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from orchestrator.embedded import postgres
from orchestrator.store import Store
from tests.compose_file import compose
from tests.console_cycle import seed_cycle

SCRIPTS = Path(__file__).resolve().parents[2] / "infra/postgres"


def _run(script: str, *arguments: str | Path, url: str, **more: str) -> subprocess.CompletedProcess[str]:
    parsed = make_url(url)
    host = parsed.host or parsed.query.get("host", "")
    environment = {
        "PATH": f"{postgres.bin_dir()}:{os.environ['PATH']}", "PGHOST": str(host), "PGPORT": str(parsed.port or 5432),
        "PGUSER": parsed.username or "", **more,
    }  # fmt: skip
    return subprocess.run(
        ["sh", SCRIPTS / script, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def _healthy(folder: Path) -> bool:
    """Compose's word about its service `backup`, for another folder."""
    kind, command = compose()["services"]["backup"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    return subprocess.run(["sh", "-c", command.replace("/backup", str(folder))], check=False).returncode == 0


def _rows(url: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        count = sql.SQL("SELECT count(*) FROM {}")
        return {n: connection.execute(count.format(sql.Identifier(n))).fetchone()[0] for (n,) in names}  # type: ignore[index]


@pytest.fixture
def fresh(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    """Name of a database that is not there."""
    name = f"restored_{os.getpid()}"
    yield name
    postgres.drop_database(postgres_server, name)


def test_a_dump_restores_every_row_and_the_rules(
    store: Store, database_url: str, postgres_server: postgres.PostgresInfo, fresh: str, tmp_path: Path
) -> None:
    seed_cycle(store, tmp_path / "weights")
    name = make_url(database_url).database or ""
    old = tmp_path / f"{name}-20000101T000000Z.dump"
    old.touch()
    os.utime(old, (0, 0))
    assert not _healthy(tmp_path)
    done = _run("backup.sh", tmp_path, name, url=database_url)
    assert done.returncode == 0, done.stderr
    assert _healthy(tmp_path)
    dumps = list(tmp_path.glob("*.dump"))
    assert [str(dump) for dump in dumps] == done.stdout.split()  # the one of the year 2000 is gone

    restored = _run("restore.sh", dumps[0], fresh, url=database_url)
    assert restored.returncode == 0, restored.stderr
    url = postgres_server.url(fresh)
    rows = _rows(url)
    assert rows == _rows(database_url)
    assert rows["trajectory"] > 0
    with psycopg.connect(url) as connection, pytest.raises(psycopg.Error, match="append"):
        connection.execute("UPDATE event SET kind = kind")  # append-only there, too

    again = _run("restore.sh", dumps[0], fresh, url=database_url)  # a database that is there is not touched
    assert again.returncode != 0
    assert "already exists" in again.stderr


def test_a_backup_that_fails_leaves_no_file_and_says_so(database_url: str, tmp_path: Path) -> None:
    old = tmp_path / "rsi-20000101T000000Z.dump"
    old.touch()
    os.utime(old, (0, 0))
    done = _run("backup.sh", tmp_path, "not_here", url=database_url)
    assert done.returncode != 0
    assert "not_here" in done.stderr
    assert list(tmp_path.iterdir()) == [old]  # the last good one is kept while new ones fail
