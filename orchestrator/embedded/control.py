"""`up`, `down` and `look` from outside the supervisor: start it, follow it, stop it, and prove that nothing is left."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from orchestrator.embedded import ports, postgres, prefect_server, processes, services, state
from orchestrator.embedded.layout import Layout, tail
from orchestrator.embedded.state import Phase, Published
from orchestrator.settings import Settings
from stages.errors import ServiceError

UP_TIMEOUT_S = 300.0  # the services' own limits are shorter and give better messages
DOWN_TIMEOUT_S = 90.0
LOCK_WAIT_S = 5.0  # from the launch to the lock; measured 0.02 s
Watch = Callable[[Published], None]  # called with each new snapshot


@dataclass(frozen=True, slots=True)
class Up:
    """What is running, and whether it already was."""

    published: Published
    already: bool


def running_settings(settings: Settings) -> Settings:
    """The settings with the ports of the running supervisor, which may have been chosen on its command line."""
    layout = Layout(settings.home)
    if state.supervisor_pid(layout) is None or (published := state.read(layout)) is None:
        return settings
    found = {}
    if (prefect := published.service("prefect")) and prefect.port:
        found["prefect_port"] = prefect.port
    if (console := published.service("console")) and console.port:
        found["console_port"] = console.port
    return settings.model_copy(update=found)


def look(settings: Settings) -> Published | None:
    """What the living supervisor published last; None when there is none."""
    layout = Layout(settings.home)
    return state.read(layout) if state.supervisor_pid(layout) is not None else None


def up(settings: Settings, *, console: bool = True, worker: bool = True, watch: Watch = lambda _: None) -> Up:
    """Bring everything up and wait until it answers. Says so when it is up already.

    An interrupt (Ctrl-C) while it starts stops what was started; one that comes while somebody else's start is watched
    stops only the watching.

    Raises:
        ServiceError: a port is taken, the disk is full, a service does not start; nothing is left running.
    """
    layout = Layout(settings.home)
    layout.prepare()
    with _stop_if_interrupted(settings) as mine:
        with _alone(layout):
            already = state.supervisor_pid(layout) is not None
            if not already:
                _clear_leftovers(settings)
                _require_ports(settings, console=console)
                layout.state.unlink(missing_ok=True)
                mine.append(True)
                _launch(settings, console=console, worker=worker)
                _wait_for_lock(layout)
        return Up(_follow(layout, watch), already=already)


def down(settings: Settings, *, watch: Watch = lambda _: None) -> bool:
    """Stop everything of this home and verify that nothing is left. False when nothing was running.

    Works after a `kill -9` of the supervisor too.

    Raises:
        ServiceError: something survived; the message lists it.
    """
    layout = Layout(settings.home)
    if not layout.run.exists():
        return False  # nothing was ever started here
    pid = state.supervisor_pid(layout)
    if pid is not None:
        _stop_supervisor(layout, pid, watch)
    with _alone(layout):
        leftovers = state.supervisor_pid(layout) is None and _clear_leftovers(settings)
    survivors = [f"pid {p.pid}" for p in processes.marked(settings.home)]
    if settings.embedded_database and postgres.is_running(settings.home):
        survivors.append("Postgres")
    if survivors:
        raise ServiceError(f"Still running in {settings.home}: {', '.join(survivors)}. End them with `kill -9 PID`.")
    return pid is not None or leftovers


def _launch(settings: Settings, *, console: bool, worker: bool) -> None:
    command = [sys.executable, "-m", "orchestrator.embedded.supervisor"]
    command += [] if console else ["--no-console"]
    command += [] if worker else ["--no-worker"]
    environment = {
        **os.environ,
        "RSI_HOME": str(settings.home),
        "RSI_PREFECT_PORT": str(settings.prefect_port),
        "RSI_CONSOLE_PORT": str(settings.console_port),
        "RSI_CONSOLE_HOST": settings.console_host,
        **({"RSI_DATABASE_URL": settings.database_url} if settings.database_url else {}),
    }
    started = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if started.returncode:
        raise ServiceError(f"The supervisor could not be started: {started.stderr.strip()[-1000:]}")


def _follow(layout: Layout, watch: Watch) -> Published:
    """Watch a start until it is ready.

    Raises:
        ServiceError: it failed, died or took too long.
    """
    begun = time.monotonic()
    while time.monotonic() - begun < UP_TIMEOUT_S:
        published = state.read(layout)
        if published:
            watch(published)
            if published.phase is Phase.READY:
                return published
            if published.phase is Phase.FAILED:
                raise ServiceError(published.error)
            if published.phase in {Phase.STOPPING, Phase.STOPPED} and not published.error:
                raise ServiceError("The services are being stopped by someone else. Try again in a moment.")
        if state.supervisor_pid(layout) is None:
            raise _died(layout)
        time.sleep(0.1)
    raise ServiceError(
        f"The services were not ready after {UP_TIMEOUT_S:.0f} s. `rsi status` shows which; logs are in "
        f"{layout.log('x').parent}. Stop them with `rsi down`."
    )


@contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """One `up` or `down` at a time decides; otherwise one could clear away what another is starting."""
    with open(layout.run / "control.lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _stop_if_interrupted(settings: Settings) -> Iterator[list[bool]]:
    """Ctrl-C in a start leaves nothing half-started. The yielded list gets an item once the start is ours."""
    mine: list[bool] = []
    try:
        yield mine
    except KeyboardInterrupt:
        if mine:
            layout = Layout(settings.home)
            until = time.monotonic() + LOCK_WAIT_S
            while state.supervisor_pid(layout) is None and time.monotonic() < until:
                time.sleep(0.05)  # it may be about to take its lock
            down(settings)
        raise


def _require_ports(settings: Settings, *, console: bool) -> None:
    """Ask before anything is started; the supervisor asks again."""
    if not prefect_server.external():
        ports.require_free(settings.prefect_port, service="Prefect server", option=services.PREFECT_OPTION)
    if console:
        host = settings.console_host
        ports.require_free(settings.console_port, service="console", option=services.CONSOLE_OPTION, host=host)


def _wait_for_lock(layout: Layout) -> None:
    until = time.monotonic() + LOCK_WAIT_S
    while state.supervisor_pid(layout) is None and state.read(layout) is None:
        if time.monotonic() > until:
            raise _died(layout)
        time.sleep(0.02)


def _died(layout: Layout) -> ServiceError:
    published = state.read(layout)
    if published and published.error:
        return ServiceError(published.error)
    log = layout.log("supervisor")
    return ServiceError(f"The supervisor ended while it started. Its log ({log}) ends with:\n{tail(log)}")


def _stop_supervisor(layout: Layout, pid: int, watch: Watch) -> None:
    try:
        process = psutil.Process(pid)
        if not any("orchestrator.embedded.supervisor" in part for part in process.cmdline()):
            return  # the pid of a supervisor that has ended meanwhile, used again by somebody else
        process.terminate()
    except psutil.NoSuchProcess:
        return
    until = time.monotonic() + DOWN_TIMEOUT_S
    while state.supervisor_pid(layout) is not None:
        if time.monotonic() > until:
            processes.end([process], grace_s=0)  # its children are swept next
            return
        if published := state.read(layout):
            watch(published)
        time.sleep(0.1)
    processes.wait([process], 10)  # it drops its lock a moment before it is gone


def _clear_leftovers(settings: Settings) -> bool:
    """End what a killed supervisor left behind. True when there was anything."""
    left = processes.marked(settings.home)
    processes.end(left, grace_s=10)
    stopped = False
    if settings.embedded_database and (settings.home / "postgres").exists():
        stopped = postgres.stop(settings.home)
    return bool(left) or stopped
