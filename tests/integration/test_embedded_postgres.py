"""The embedded server: starts once, survives murder, refuses what it cannot do in plain words."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from orchestrator.embedded import postgres
from stages.errors import ServiceError


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rsi-pg-test-"))
    folder.chmod(0o755)
    yield folder
    postgres.stop(folder, mode="immediate")
    shutil.rmtree(folder, ignore_errors=True)


def _pid(home: Path) -> int:
    return int((home / "postgres/data/postmaster.pid").read_text().split()[0])


def _start_together(home: Path, n: int) -> list[int]:
    code = f"from orchestrator.embedded import postgres; postgres.ensure({str(home)!r})"
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(n)]
    return [child.wait(timeout=120) for child in children]


def test_a_life(home: Path) -> None:
    assert not postgres.is_running(home)
    assert not postgres.stop(home)
    assert _start_together(home, 3) == [0, 0, 0]  # concurrent starters wait for one another
    pid = _pid(home)
    info = postgres.ensure(home)
    assert (_pid(home), info.version) == (pid, "18")
    url = postgres.ensure_database(info, "rsi")
    assert postgres.ensure_database(info, "rsi") == url
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)  # unix socket only
        assert connection.execute("SELECT lower('ÄÖ')").fetchone() == ("äö",)
    assert info.async_url("prefect").startswith("postgresql+asyncpg://postgres@/prefect?host=/")

    os.kill(pid, signal.SIGKILL)  # no farewell: lock files stay behind
    deadline = time.monotonic() + 10
    while postgres.is_running(home) and time.monotonic() < deadline:
        time.sleep(0.02)
    postgres.ensure(home)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (1,)
    assert postgres.stop(home)
    assert not postgres.is_running(home)


def test_a_stranger_with_the_old_pid_blocks_nothing(home: Path) -> None:
    postgres.ensure(home, durable=False)
    lock = home / "postgres/data/postmaster.pid"
    lines = lock.read_text().splitlines()
    postgres.stop(home)
    lines[0] = str(os.getpid())  # alive, and no Postgres
    lock.write_text("\n".join(lines) + "\n")
    assert not postgres.stop(home)  # in particular, we are not killed
    postgres.ensure(home, durable=False)
    assert postgres.is_running(home)


def test_an_interrupted_initdb_is_done_again(home: Path) -> None:
    half = home / "postgres/data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    postgres.ensure(home, durable=False)
    assert postgres.is_running(home)


def test_data_of_another_version_is_refused(home: Path) -> None:
    data = home / "postgres/data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(ServiceError, match=r"written by Postgres 9\.6; the installed binaries are 18"):
        postgres.ensure(home)


def test_the_servers_own_words_are_in_the_error(home: Path) -> None:
    postgres.ensure(home, durable=False)
    postgres.stop(home)
    with open(home / "postgres/data/postgresql.conf", "a") as conf:
        conf.write("shared_buffers = 'plenty'\n")
    with pytest.raises(ServiceError, match="shared_buffers"):
        postgres.ensure(home, durable=False)


def test_a_long_path_moves_the_socket(home: Path) -> None:
    deep = home / ("d" * 90)
    try:
        info = postgres.ensure(deep, durable=False)
        assert len(str(info.socket_dir)) < 40
        with psycopg.connect(info.url()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        postgres.stop(deep, mode="immediate")
        shutil.rmtree(info.socket_dir, ignore_errors=True)


def test_no_binaries(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_PG_BIN", str(home))
    with pytest.raises(ServiceError, match="No pg_ctl in"):
        postgres.ensure(home)


def test_a_home_that_is_a_file(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(ServiceError, match="RSI_HOME"):
        postgres.ensure(home / "file")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root drops privileges")
def test_as_root_under_a_private_folder(home: Path) -> None:
    home.chmod(0o700)
    inner = home / "inner"
    inner.mkdir()
    try:
        info = postgres.ensure(inner, durable=False)
        owner = os.stat(f"/proc/{_pid(inner)}").st_uid
        assert owner != 0
        assert home.stat().st_mode & 0o777 == 0o700  # nobody's folder changed its mode
        with psycopg.connect(info.url()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        postgres.stop(inner, mode="immediate")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs another account")
def test_as_an_ordinary_user(home: Path) -> None:
    """The same code under an account without any right: `nobody` owns the folder and runs everything."""
    os.chown(home, 65534, 65534)
    packages = Path(postgres.__file__).parents[2]
    code = (
        "from pathlib import Path; from orchestrator.embedded import postgres as p; "
        f"h = Path({str(home)!r}); i = p.ensure(h, durable=False); p.ensure_database(i, 'x'); "
        "assert p.is_running(h) and p.stop(h) and not p.is_running(h)"
    )
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "HOME": str(home)}
    done = subprocess.run(
        [*drop, sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, timeout=120
    )
    if "Permission denied" in done.stderr and "python" in done.stderr:
        pytest.skip("this account cannot reach the Python interpreter")
    assert done.returncode == 0, done.stderr
