"""Our processes: how they are recognised, measured and ended.

Every process that the supervisor starts, and every process those start, carries `RSI_SUPERVISED=<home>` in its
environment. That finds a flow run whose worker was killed, which no list of children or pids would, and it cannot be
fooled by a reused pid. Sandboxed agents start with a clean environment and die with their flow process.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "RSI_SUPERVISED"


def marked(home: Path) -> list[psutil.Process]:
    """Living processes of the installation in `home`, without the caller and its ancestors."""
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            if process.name() == "postgres":
                continue  # inherits the mark of whoever started it; stopped by its own manager, never by a signal
            if process.environ().get(MARK) == str(home) and alive(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or of another user: not ours
    return found


def alive(process: psutil.Process) -> bool:
    """True for a running process; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_alive(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def memory_mb(pid: int) -> float | None:
    """Resident memory of `pid` and all its descendants in MB (shared pages are counted once per process)."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    total = 0
    for member in family:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total / 1e6


def end(processes: Iterable[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """SIGTERM, wait up to `grace_s`, then SIGKILL. Returns what is still alive 5 s after that (normally nothing)."""
    targets = [p for p in processes if alive(p)]
    for process in targets:
        _signal(process, kill=False)
    left = wait(targets, grace_s)
    for process in left:
        _signal(process, kill=True)
    return wait(left, 5.0)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return


def wait(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for their end; returns those still alive."""
    # psutil.wait_procs would call a zombie that its parent has not reaped yet alive.
    deadline = time.monotonic() + seconds
    left = [p for p in processes if alive(p)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [p for p in left if alive(p)]
    return left
