"""Starts that cannot succeed, and ends that were not planned: clear words, and nothing left running."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator import workers
from orchestrator.embedded import control, database, prefect_server, state
from orchestrator.embedded.layout import Layout
from orchestrator.embedded.state import Phase
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.workers import FlowState
from tests.integration.services_kit import LONG, ROOT, STUB, environment, nothing_is_left, rsi, settings_of, wait


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = settings_of(tmp_path / "home")
    yield made
    control.down(made)


def test_a_taken_port_is_named_with_its_holder_and_the_option(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.console_port))
        taken.listen()
        failed = rsi(settings, "up")
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    for word in (f"Port {settings.console_port}", "console", f"pid {os.getpid()}", "--console-port"):
        assert word in failed.stderr
    nothing_is_left(settings)


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    failed = rsi(settings_of(tmp_path / "file" / "home"), "up")
    assert failed.returncode == 2
    assert str(tmp_path / "file") in failed.stderr
    assert "RSI_HOME" in failed.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        failed = rsi(settings_of(tmp_path / "home"), "up")
        assert failed.returncode == 2
        assert "8 MB are free" in failed.stderr
        (tmp_path / "filler").write_bytes(b"x" * (8 << 20 >> 1))
        assert "4 MB are free" in rsi(settings_of(tmp_path / "home"), "up").stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_service_that_does_not_start_shows_its_log_and_stops_the_rest(settings: Settings, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "prefect"  # found before the real package by `python -m prefect`
    broken.mkdir(parents=True)
    (broken / "__init__.py").touch()
    (broken / "__main__.py").write_text("raise SystemExit('no server today')")
    failed = rsi(settings, "up", "--no-console", extra={"PYTHONPATH": f"{broken.parent}:{ROOT}"})
    assert failed.returncode == 2
    assert "prefect ended with code 1" in failed.stderr
    assert "no server today" in failed.stderr
    assert str(Layout(settings.home).log("prefect")) in failed.stderr
    nothing_is_left(settings)
    told = rsi(settings, "doctor", "--no-sandbox")
    assert "the last start failed" in told.stdout


def test_ctrl_c_in_a_start_leaves_nothing(settings: Settings) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "up", "--no-console"]
    start = subprocess.Popen(command, env=environment(settings), cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def prefect_starts() -> bool:
        published = state.read(Layout(settings.home))
        return published is not None and published.service("prefect") is not None

    wait(prefect_starts)
    start.send_signal(signal.SIGINT)
    assert start.wait(60) == 130
    assert start.stderr is not None
    assert "Traceback" not in start.stderr.read()
    nothing_is_left(settings)


def test_down_where_nothing_runs(settings: Settings) -> None:
    done = rsi(settings, "down")
    assert done.returncode == 0
    assert "Nothing was running" in done.stdout
    assert rsi(settings, "status").returncode == 1


@pytest.mark.full
def test_a_killed_supervisor_is_cleaned_up_by_up_and_by_down(settings: Settings) -> None:
    first = control.up(settings, console=False)
    os.kill(first.published.pid, signal.SIGKILL)
    wait(lambda: control.look(settings) is None, 10)
    assert "`rsi down` ends them" in rsi(settings, "doctor", "--no-sandbox").stdout
    second = control.up(settings, console=False)
    assert second.published.phase is Phase.READY
    assert not second.already
    os.kill(second.published.pid, signal.SIGKILL)
    wait(lambda: control.look(settings) is None, 10)
    assert control.down(settings)
    nothing_is_left(settings)


@pytest.mark.full
def test_down_interrupts_a_running_cycle_and_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    control.up(settings, console=False)
    prefect_server.register(settings, (STUB,))
    flow_run_id = workers.submit_cycle(LONG, settings=settings, deployment=STUB)
    wait(lambda: workers.flow_run(flow_run_id, settings=settings).state is FlowState.RUNNING)
    store = Store.open(database.url(settings), settings.artifacts)
    cycle = store.cycles.create(
        m.Cycle(name="t", recipe="t", config={}, config_digest="0", seed=0, base_checkpoint="", flow_run_id=flow_run_id)
    )
    assert cycle.id is not None
    store.cycles.set_state(cycle.id, m.CycleState.RUNNING)
    store.close()
    assert control.down(settings)
    nothing_is_left(settings)
    control.up(settings, console=False)
    store = Store.open(database.url(settings), settings.artifacts)
    after = store.cycles.get(cycle.id)
    store.close()
    assert after.state is m.CycleState.FAILED
    assert "`rsi down`" in after.error
    assert f"rsi cycle resume {cycle.id}" in after.error
    assert workers.flow_run(flow_run_id, settings=settings).state is FlowState.CRASHED
