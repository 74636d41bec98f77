"""Fixtures on a real Postgres: one server per test session, one fresh database per test."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from argon2 import PasswordHasher
from hypothesis import HealthCheck, settings

from orchestrator import passwords, workers
from orchestrator.embedded import postgres
from orchestrator.store import Store, schema

if TYPE_CHECKING:
    from tests.review_world import Gate, NewGate

FULL = "CI_FULL"  # environment variable; "1" also runs the tests marked `full`
TEMPLATE = "rsi_template"
_numbers = itertools.count()

# A busy machine is no fault of the code under test.
settings.register_profile("terminal-rsi", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("terminal-rsi")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(FULL) == "1":
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason=f"long: runs with {FULL}=1"))


@pytest.fixture(scope="session", autouse=True)
def heed_ctrl_c() -> Iterator[None]:
    """Children of tests heed SIGINT, also where a script started pytest in its background, which ignores it for them."""
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


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


@contextmanager
def own_database(server: postgres.PostgresInfo, template: str | None = TEMPLATE) -> Iterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    try:
        yield postgres.ensure_database(server, name, template=template)
    finally:
        postgres.drop_database(server, name)


@pytest.fixture
def empty_database_url(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    """A database without tables."""
    with own_database(postgres_server, template=None) as url:
        yield url


@pytest.fixture
def database_url(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    """A migrated database of its own."""
    with own_database(postgres_server) as url:
        yield url


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[Store]:
    """A store on a migrated database and an empty artifact folder."""
    with_artifacts = Store.open(database_url, tmp_path / "artifacts")
    yield with_artifacts
    with_artifacts.close()


# --------------------------------------------------------------------------- shared by the tests of one module


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module")


@pytest.fixture(scope="module")
def module_database_url(postgres_server: postgres.PostgresInfo) -> Iterator[str]:
    with own_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="module")
def module_store(module_database_url: str, module_folder: Path) -> Iterator[Store]:
    opened = Store.open(module_database_url, module_folder / "artifacts", pool_size=10)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cycles that were handed to Prefect; everything before that is real."""
    found: list[int] = []
    monkeypatch.setattr(workers, "submit_cycle", lambda cycle_id, **_: found.append(cycle_id) or f"flow-{cycle_id}")
    monkeypatch.setattr(workers, "cancel_flow_run", lambda *_, **__: None)
    return found


@pytest.fixture
def new_gate(module_store: Store, module_folder: Path, numbers: Iterator[int], submitted: list[int]) -> NewGate:
    from tests.review_world import open_gate  # loads the whole loop, which most tests do not need

    return lambda **options: open_gate(module_store, module_folder, number=next(numbers), **options)


@pytest.fixture
def gate(new_gate: NewGate, request: pytest.FixtureRequest) -> Gate:
    """A fresh gate: two clean runbooks, one with a soft finding. `request.param`: how many reviewers it needs."""
    return new_gate(clean=2, reviewers=getattr(request, "param", 1))
