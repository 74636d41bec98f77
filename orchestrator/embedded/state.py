"""What the supervisor publishes about itself, and how others see whether it lives."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import IO

from orchestrator.embedded.layout import Layout
from stages.errors import ServiceError


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"  # did not come up; `error` says why; everything was stopped again


class ServiceState(StrEnum):
    WAITING = "waiting"  # its turn has not come
    STARTING = "starting"
    READY = "ready"  # answers
    UNHEALTHY = "unhealthy"  # runs but does not answer
    RESTARTING = "restarting"  # ended; starts again after a pause
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    name: str
    state: ServiceState
    pid: int | None = None
    port: int | None = None
    url: str = ""
    log: str = ""
    restarts: int = 0
    since: float = 0.0  # Unix time of the last change of state, s
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One snapshot. `services` is in starting order."""

    pid: int
    phase: Phase
    started_at: float  # Unix time, s
    error: str = ""
    services: tuple[ServiceStatus, ...] = ()

    def service(self, name: str) -> ServiceStatus | None:
        return next((s for s in self.services if s.name == name), None)


def publish(layout: Layout, snapshot: Published) -> None:
    """Replace the snapshot in one step: a reader never sees half of one."""
    fresh = layout.state.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(snapshot), indent=1))
    fresh.replace(layout.state)


def read(layout: Layout) -> Published | None:
    """The last snapshot, of a living supervisor or not; None when there never was one."""
    try:
        raw = json.loads(layout.state.read_text())
    except FileNotFoundError:
        return None
    services = tuple(ServiceStatus(**{**s, "state": ServiceState(s["state"])}) for s in raw.pop("services"))
    return Published(**{**raw, "phase": Phase(raw["phase"])}, services=services)


def supervisor_pid(layout: Layout) -> int | None:
    """Pid of the living supervisor, or None. Decided by the lock, which the system drops when its holder dies."""
    try:
        handle = open(layout.lock, "a+")  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ServiceError(
            f"{layout.home} belongs to another user: {error.strerror}. Work as that user, or choose another RSI_HOME."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            return int(handle.read() or 0) or None
    return None


@contextmanager
def hold_lock(layout: Layout) -> Iterator[bool]:
    """Hold the supervisor's lock; yields False when another one has it.

    Tries for a second, because `supervisor_pid` of another process holds it for an instant.
    """
    with open(layout.lock, "a+") as handle:
        until = time.monotonic() + 1.0
        while not _exclusive(handle):
            if time.monotonic() > until:
                yield False
                return
            time.sleep(0.05)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        try:
            yield True
        finally:
            handle.truncate(0)


def _exclusive(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
