"""Fixtures on a real Postgres: one server per test session, one fresh database per test."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from orchestrator import passwords
from orchestrator.embedded import postgres
from orchestrator.store import Store, schema

FULL = "CI_FULL"  # environment variable; "1" also runs the tests marked `full`
TEMPLATE = "rsi_template"
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(FULL) == "1":
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason=f"long: runs with {FULL}=1"))


@pytest.fixture(scope="session", autouse=True)
def cheap_passwords() -> Iterator[None]:
    """argon2 with the least that it takes: tests check what is done with a hash, not that making one is expensive."""
    mine, passwords._hasher = passwords._hasher, PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    yield
    passwords._hasher = mine


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresInfo]:
    """An embedded Postgres in a short-lived folder, with a migrated template database."""
    home = Path(tempfile.mkdtemp(prefix="rsi-test-"))
    home.chmod(0o755)  # as root the server runs under another account, which must get in
    try:
        info = postgres.ensure(home, durable=False)
        schema.upgrade(postgres.ensure_database(info, TEMPLATE))
        yield info
    finally:
        postgres.stop(home, mode="immediate")
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def empty_database_url(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    """A database without tables."""
    name = f"empty_{os.getpid()}_{next(_numbers)}"
    yield postgres.ensure_database(postgres_server, name)
    postgres.drop_database(postgres_server, name)


@pytest.fixture
def database_url(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    """A migrated database of its own."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    yield postgres.ensure_database(postgres_server, name, template=TEMPLATE)
    postgres.drop_database(postgres_server, name)


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[Store]:
    """A store on a migrated database and an empty artifact folder."""
    with_artifacts = Store.open(database_url, tmp_path / "artifacts")
    yield with_artifacts
    with_artifacts.close()
