"""The child processes of the supervisor: command, environment, and how to tell that each one is ready."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from orchestrator.embedded import ports, prefect_server
from orchestrator.embedded.layout import Layout, rotate
from orchestrator.embedded.processes import MARK
from orchestrator.settings import Settings

CONSOLE_APP = "webui.app:start"
PREFECT_OPTION = "rsi up --prefect-port N, or RSI_PREFECT_PORT=N"
CONSOLE_OPTION = "rsi up --console-port N, or RSI_CONSOLE_PORT=N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One child process."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    ready: Callable[[float], bool]  # given the Unix time of its start; quick
    ready_timeout_s: float
    port: int | None = None
    host: str = "127.0.0.1"
    option: str = ""  # how to choose another port
    url: str = ""
    probed: bool = True  # `ready` is asked again while it runs

    def require_port(self) -> None:
        """Raises ServiceError when something else listens there."""
        if self.port is not None:
            ports.require_free(self.port, service=self.name, option=self.option, host=self.host)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a session of its own, so that a Ctrl-C in the terminal reaches only the command that was typed."""
        rotate(self.log)
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def prefect(settings: Settings, database_url: str) -> Service:
    return Service(
        name="prefect",
        command=prefect_server.server_command(),
        environment={**common(settings, database_url), **prefect_server.server_environment(settings, database_url)},
        log=Layout(settings.home).log("prefect"),
        ready=lambda since: prefect_server.healthy(settings),
        ready_timeout_s=180,  # 24 s measured for a first start; a busy machine needs more
        port=settings.prefect_port,
        option=PREFECT_OPTION,
        url=prefect_server.api_url(settings).removesuffix("/api"),
    )


def worker(settings: Settings, database_url: str, pool: str = "cpu") -> Service:
    return Service(
        name=f"worker-{pool}",
        command=worker_command(pool),
        environment={**common(settings, database_url), **prefect_server.client_environment(settings)},
        log=Layout(settings.home).log(f"worker-{pool}"),
        ready=lambda since: prefect_server.worker_online(settings, pool, since=since),
        ready_timeout_s=60,
        probed=False,  # Prefect counts its heartbeats; a busy machine may delay one
    )


def worker_command(pool: str, name: str | None = None, *, health: bool = False, gpu_class: str = "") -> tuple[str, ...]:
    """`gpu_class`: it takes cycles of this class only. `health`: it answers `/health` at PREFECT_WORKER_WEBSERVER_PORT."""
    # Without --name every restart would leave one more dead worker in Prefect's list.
    name = name or "-".join(filter(None, (socket.gethostname(), pool, gpu_class)))
    kind = prefect_server.pool_type(pool)
    options: tuple[str, ...] = ("--pool", pool, "--type", kind, "--name", name)
    if health:
        options += ("--with-healthcheck",)
    if (
        pool == "gpu" and kind == "process"
    ):  # a cycle's learner takes the GPUs of its machine: others wait for their turn
        options += ("--limit", "1")
    if gpu_class:
        options += ("--work-queue", gpu_class)
    return (sys.executable, "-m", "prefect", "worker", "start", *options)


def console(settings: Settings, database_url: str) -> Service:
    host = settings.console_host
    url = settings.console_local
    bind = ("--host", host, "--port", str(settings.console_port))
    return Service(
        name="console",
        command=(sys.executable, "-m", "uvicorn", CONSOLE_APP, "--factory", *bind, "--timeout-graceful-shutdown", "5"),
        environment={**common(settings, database_url), **prefect_server.client_environment(settings)},
        log=Layout(settings.home).log("console"),
        ready=lambda since: _answers(f"{url}/healthz"),
        ready_timeout_s=60,
        port=settings.console_port,
        host=host,
        option=CONSOLE_OPTION,
        url=url,
    )


def common(settings: Settings, database_url: str) -> dict[str, str]:
    """What every child knows: where home is, which database, and the mark that it is ours."""
    return {
        MARK: str(settings.home),
        "RSI_HOME": str(settings.home),
        "RSI_DATABASE_URL": database_url,
        "RSI_PREFECT_PORT": str(settings.prefect_port),
        "RSI_CONSOLE_PORT": str(settings.console_port),
        "RSI_CONSOLE_HOST": settings.console_host,
        "PYTHONUNBUFFERED": "1",
    }


def _answers(url: str) -> bool:
    """Any answer below 500: the console may redirect to its sign-in page."""
    try:
        return httpx.get(url, timeout=3, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False


def default_signals() -> None:
    """Undo an inherited "ignore SIGINT" (a shell does that to background jobs): Prefect's worker stops itself with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
