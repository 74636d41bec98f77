"""What the tests of the services share."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.embedded import control, ports, postgres, processes
from orchestrator.embedded.prefect_server import Deployment
from orchestrator.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
STUB = Deployment(flow="stub", name="stub", entrypoint="tests.integration.stub_flows.stub_flow", pool="cpu")
LONG = 1000  # cycle ids from here on make the stub run for a minute
OTHER_INSTALLATIONS = ("DATABASE_URL", "RSI_DATABASE_URL", "RSI_PREFECT_API_URL", "RSI_PREFECT_AUTH")


def settings_of(home: Path) -> Settings:
    """An installation in `home` on free ports, whatever the environment says."""
    return Settings(home=home, prefect_port=ports.pick_free(), console_port=ports.pick_free(), database_url=None)


def environment(settings: Settings, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in OTHER_INSTALLATIONS}
    return clean | {
        "RSI_HOME": str(settings.home),
        "RSI_PREFECT_PORT": str(settings.prefect_port),
        "RSI_CONSOLE_PORT": str(settings.console_port),
        **(extra or {}),
    }


def rsi(
    settings: Settings, *arguments: str, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        env=environment(settings, extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def wait(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.1)


def nothing_is_left(settings: Settings) -> None:
    assert processes.marked(settings.home) == []
    assert control.look(settings) is None
    assert not postgres.is_running(settings.home)
    assert ports.is_free(settings.prefect_port)
    assert ports.is_free(settings.console_port)
