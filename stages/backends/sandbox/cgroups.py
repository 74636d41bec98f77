"""Memory, CPU and process limits for a whole attempt, where this process may create cgroups (v1 and v2).

A normal user usually may not; then `available` is empty and the backend says so. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

_ROOT = "/sys/fs/cgroup"
_V1 = ("memory", "pids", "cpu")
_PREFIX = "rsi-"


@dataclass(slots=True)
class Hierarchy:
    """One mounted hierarchy: `kinds` are the controllers that we may set, `fd` our own group in it."""

    version: int
    kinds: tuple[str, ...]
    parent_fd: int
    name: str
    fd: int
    home_fd: int  # of the group that the host was born in and returns to after starting a jail


class Cgroups:
    """Our own group in each hierarchy and one child per attempt. Everything goes through directory descriptors, so it works
    after the host has left the machine's mount namespace."""

    def __init__(self, hierarchies: list[Hierarchy]) -> None:
        self._hierarchies = hierarchies
        self.available = tuple(k for h in hierarchies for k in h.kinds)

    @classmethod
    def create(cls, *, enabled: bool) -> Cgroups:
        """Whatever this process may use; nothing when it may not. Sweeps groups left by hosts that were killed."""
        found: list[Hierarchy] = []
        if enabled:
            own = _own_groups()
            for kind in _V1:
                base = f"{_ROOT}/{kind}{own.get(kind, '/')}"
                if os.path.isdir(f"{_ROOT}/{kind}") and os.path.exists(f"{_ROOT}/{kind}/cgroup.procs"):
                    base = base if os.path.isdir(base) else f"{_ROOT}/{kind}"
                    found += _make(1, (kind,), base, base)
            if not found and os.path.exists(f"{_ROOT}/cgroup.controllers"):
                kinds = _v2_controllers(_ROOT)
                if kinds:
                    found += _make(2, kinds, _ROOT, _ROOT + own.get("", "/"))
        return cls(found)

    def describe(self) -> dict[str, int]:
        """Controller -> cgroup version."""
        return {kind: h.version for h in self._hierarchies for kind in h.kinds}

    def group(self, name: str, *, memory_mb: int, pids: int, cpus: float) -> Group | None:
        """A group with these limits for one attempt; None where there are no cgroups."""
        if not self._hierarchies:
            return None
        group = Group(name, self._hierarchies)
        group.limit(memory_mb=memory_mb, pids=pids, cpus=cpus)
        return group

    def close(self) -> None:
        for h in self._hierarchies:
            for name in os.listdir(h.fd):
                if name.startswith(_PREFIX):
                    _remove(name, h.fd)
            _remove(h.name, h.parent_fd)
            for fd in (h.fd, h.parent_fd, h.home_fd):
                os.close(fd)
        self._hierarchies = []


class Group:
    """One attempt's group in every hierarchy."""

    def __init__(self, name: str, hierarchies: Iterable[Hierarchy]) -> None:
        self._name = _PREFIX + name
        self._hierarchies = list(hierarchies)
        self._procs: list[int] = []
        for h in self._hierarchies:
            os.mkdir(self._name, dir_fd=h.fd)
            self._procs.append(os.open(f"{self._name}/{_members(h.version)}", os.O_WRONLY, dir_fd=h.fd))

    def __enter__(self) -> None:
        """The caller moves in, so that what it starts is born here; no process of an attempt ever runs outside its limits."""
        for fd in self._procs:
            os.write(fd, b"0")

    def __exit__(self, *_: object) -> None:
        for h in self._hierarchies:
            os.write(h.home_fd, b"0")

    def limit(self, *, memory_mb: int, pids: int, cpus: float) -> None:
        size = memory_mb << 20
        values: dict[str, list[tuple[str, object]]]
        for h in self._hierarchies:
            if h.version == 1:
                values = {
                    "memory": [("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size)],
                    "pids": [("pids.max", pids)],
                    "cpu": [("cpu.cfs_period_us", 100_000), ("cpu.cfs_quota_us", int(cpus * 100_000))],
                }
            else:
                values = {
                    "memory": [("memory.max", size), ("memory.swap.max", 0)],
                    "pids": [("pids.max", pids)],
                    "cpu": [("cpu.max", f"{int(cpus * 100_000)} 100000")],
                }
            for kind in h.kinds:
                for file, value in values[kind]:
                    with contextlib.suppress(FileNotFoundError):  # swap accounting may be off
                        self._write(h, file, str(value))

    def is_full(self) -> bool:
        """Whether files (of a tmpfs) alone come within 2 MiB of the memory limit: no process can be born then."""
        for h in self._hierarchies:
            if "memory" in h.kinds:
                limit = self._read(h, "memory.limit_in_bytes" if h.version == 1 else "memory.max").strip()
                rows = dict(line.split(" ", 1) for line in self._read(h, "memory.stat").splitlines())
                return limit.isdigit() and int(rows.get("shmem", 0)) + (2 << 20) > int(limit)
        return False

    def close(self) -> None:
        for fd in self._procs:
            os.close(fd)
        self._procs = []
        for h in self._hierarchies:
            _remove(self._name, h.fd)

    def _write(self, h: Hierarchy, file: str, text: str) -> None:
        fd = os.open(f"{self._name}/{file}", os.O_WRONLY, dir_fd=h.fd)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def _read(self, h: Hierarchy, file: str) -> str:
        fd = os.open(f"{self._name}/{file}", os.O_RDONLY, dir_fd=h.fd)
        try:
            return os.read(fd, 1 << 16).decode()
        finally:
            os.close(fd)


def _members(version: int) -> str:
    """The file that a thread writes 0 to. Of v1 the one for threads: the kernel moves only the caller and takes no global lock."""
    return "tasks" if version == 1 else "cgroup.procs"


def _own_groups() -> dict[str, str]:
    out = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, kinds, path = line.rstrip("\n").split(":", 2)
            for kind in kinds.split(","):
                out[kind] = path
    return out


def _v2_controllers(base: str) -> tuple[str, ...]:
    """Controllers that children of `base` get; tries to enable them (refused where `base` itself holds processes)."""
    for kind in _V1:
        with contextlib.suppress(OSError), open(f"{base}/cgroup.subtree_control", "w") as file:
            file.write(f"+{kind}")
    try:
        with open(f"{base}/cgroup.subtree_control") as file:
            present = file.read().split()
    except OSError:
        return ()
    return tuple(k for k in _V1 if k in present)


def _make(version: int, kinds: tuple[str, ...], base: str, home: str) -> list[Hierarchy]:
    name = f"{_PREFIX}{os.getpid()}-{birth(os.getpid())}"
    try:
        parent_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        _sweep(parent_fd)
        os.mkdir(name, dir_fd=parent_fd)
        if version == 2:
            fd = os.open(f"{name}/cgroup.subtree_control", os.O_WRONLY, dir_fd=parent_fd)
            os.write(fd, " ".join(f"+{k}" for k in kinds).encode())
            os.close(fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent_fd)
        home_fd = os.open(f"{home}/{_members(version)}", os.O_WRONLY)
        return [Hierarchy(version, kinds, parent_fd, name, fd, home_fd)]
    except OSError:  # not permitted: reported by the backend's capabilities, never pretended
        return []


def birth(pid: int) -> str:
    """Start time in clock ticks since boot; empty for a process that is gone, or dead and not yet reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in b"ZX" else fields[19].decode()


def _sweep(parent_fd: int) -> None:
    """Remove the groups of hosts that no longer run (killed with -9)."""
    for name in os.listdir(parent_fd):
        parts = name.split("-")
        if len(parts) != 3 or not name.startswith(_PREFIX) or not (parts[1].isdigit() and parts[2].isdigit()):
            continue
        if birth(int(parts[1])) != parts[2]:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent_fd)
            for child in os.listdir(fd):
                if child.startswith(_PREFIX):
                    _remove(child, fd)
            os.close(fd)
            _remove(name, parent_fd)


def _remove(name: str, dir_fd: int) -> None:
    """rmdir, waiting shortly for the last process of the group to be gone."""
    for _ in range(50):
        try:
            os.rmdir(name, dir_fd=dir_fd)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.002)
