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


FLOW_PROCESS = "orchestrator.embedded.flow_process"


def marked(home: Path, *, include_caller: bool = False) -> list[psutil.Process]:
    """Living processes of the installation in `home`, normally without the caller and its ancestors."""
    own = set() if include_caller else {os.getpid(), *(p.pid for p in psutil.Process().parents())}
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


def is_flow(process: psutil.Process) -> bool:
    """True for the process of a flow run (and false for what it started)."""
    try:
        return FLOW_PROCESS in process.cmdline()
    except psutil.Error:
        return False


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


def memory_mb(pid: int, *, descendants: bool = True) -> float | None:
    """Memory of `pid`, and normally of all its descendants, in MB; None when it has ended.

    A page that n processes share counts 1/n in each (PSS), so that sums are true; where the system does not tell, whole.
    """
    try:
        process = psutil.Process(pid)
        family = [process, *(process.children(recursive=True) if descendants else ())]
    except psutil.NoSuchProcess:
        return None
    total = 0
    for member in family:
        try:
            info = member.memory_full_info()
            total += getattr(info, "pss", info.rss)
        except psutil.AccessDenied:
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
