"""The state of an attempt, copied into another attempt's workspace while its agent's processes stand still.

Between two steps of a task the verifier judges such a copy: its tests never come near the agent, and nothing that it does
stays. Runs in the host process, on descriptors of the two workspaces. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterator

from stages.backends.sandbox.spawn import Jail, descendants, send

_SETTLE_S = 5.0
_CHUNK = 4 << 20
_STOPPED = frozenset("TtZX")


@contextlib.asynccontextmanager
async def standing_still(jail: Jail | None) -> AsyncIterator[None]:
    """Stops every process of a jail; afterwards all go on, except those that had been stopped before (Ctrl-Z).

    Raises RuntimeError when they will not stop.
    """
    before: set[int] = set()
    init = jail.init() if jail is not None and jail.alive else None
    if init is None:
        yield
        return
    try:
        before = {pid for pid in (init, *descendants(init)) if _state(pid) == "T"}
        await _stop(init)
        yield
    finally:
        for pid in (init, *descendants(init)):
            if pid not in before:
                send(pid, signal.SIGCONT)


async def _stop(init: int) -> None:
    """Until two looks in a row see the same processes, all stopped: what forked meanwhile is seen by the next look."""
    deadline, last, told = time.monotonic() + _SETTLE_S, set[int](), set[int]()
    while time.monotonic() < deadline:
        seen = {init, *descendants(init)}
        states = {pid: _state(pid) for pid in seen}
        # one that waits in the kernel (for the child that it made with vfork) stops before it acts again, once it is told to
        running = [pid for pid, state in states.items() if state not in _STOPPED and not (state == "D" and pid in told)]
        if not running and seen == last:
            return
        last = seen if not running else set()
        for pid in running:
            send(pid, signal.SIGSTOP)
        told.update(running)
        await asyncio.sleep(0.001)
    raise RuntimeError(f"processes of the agent did not stop within {_SETTLE_S:.0f} s")


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
    except OSError:
        return "X"


# --------------------------------------------------------------------------- copying


async def copy_tree(source: int, target: int) -> None:
    """Everything below the folder `source` (a descriptor) into the empty folder `target`: contents, modes, times, links,
    pipes, sockets, overlay white-outs and their attributes. Follows no symbolic link. Raises OSError when there is no room.
    """
    links: dict[tuple[int, int], str] = {}
    todo = [""]  # paths: a descriptor of each would let one attempt use up those of all
    folders: list[tuple[str, os.stat_result]] = []
    try:
        await _copy_folders(todo, links, folders, source, target)
    finally:
        for path, info in reversed(folders):
            os.chmod(path, stat.S_IMODE(info.st_mode), dir_fd=source)
    for path, info in reversed(folders):  # inner ones first: what comes into a folder changes its time
        os.chmod(path, stat.S_IMODE(info.st_mode), dir_fd=target)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target)


async def _copy_folders(
    todo: list[str],
    links: dict[tuple[int, int], str],
    folders: list[tuple[str, os.stat_result]],
    source: int,
    target: int,
) -> None:
    while todo:
        prefix = todo.pop()
        from_fd, to_fd = _folder(prefix, source), _folder(prefix, target)
        try:
            _attributes(from_fd, to_fd)
            for name in os.listdir(from_fd):
                info = os.stat(name, dir_fd=from_fd, follow_symlinks=False)
                path = f"{prefix}{name}"
                if stat.S_ISDIR(info.st_mode):
                    os.mkdir(name, 0o700, dir_fd=to_fd)
                    if info.st_mode & 0o700 != 0o700:  # its owner may not look inside: until the copy is made, it may
                        os.chmod(name, stat.S_IMODE(info.st_mode) | 0o700, dir_fd=from_fd)
                    todo.append(f"{path}/")
                    folders.append((path, info))
                elif info.st_nlink > 1 and (first := links.get((info.st_dev, info.st_ino))) is not None:
                    os.link(first, name, src_dir_fd=target, dst_dir_fd=to_fd, follow_symlinks=False)
                else:
                    links[info.st_dev, info.st_ino] = path
                    await _copy_file(name, info, from_fd, to_fd)
        finally:
            os.close(from_fd)
            os.close(to_fd)


def _folder(path: str, root: int) -> int:
    return os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)


async def _copy_file(name: str, info: os.stat_result, from_fd: int, to_fd: int) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=from_fd), name, dir_fd=to_fd)
    elif stat.S_ISREG(info.st_mode):
        with _readable(name, from_fd, info, 0o400):
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=from_fd)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=to_fd)
        try:
            await _copy_data(source, target, info.st_size)
            _attributes(source, target)
            os.fchmod(target, mode)
        finally:
            os.close(source)
            os.close(target)
    else:
        os.mknod(name, stat.S_IFMT(info.st_mode) | mode, info.st_rdev, dir_fd=to_fd)
        if not stat.S_ISCHR(info.st_mode):
            os.chmod(name, mode, dir_fd=to_fd)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=to_fd, follow_symlinks=False)


async def _copy_data(source: int, target: int, size: int) -> None:
    """Holes stay holes: a file may look larger than any disk."""
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole from here on
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(target, os.pread(source, min(_CHUNK, end - at), at), at)
            await asyncio.sleep(0)  # other attempts go on


def _attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        with contextlib.suppress(OSError):  # some are the kernel's to set
            os.setxattr(target, name, os.getxattr(source, name))


@contextlib.contextmanager
def _readable(name: str, folder: int, info: os.stat_result, bits: int) -> Iterator[None]:
    """A file that even its owner may not read is readable meanwhile: hiding one from the verifier must not help."""
    mode = stat.S_IMODE(info.st_mode)
    if mode & bits == bits:
        yield
        return
    os.chmod(name, mode | bits, dir_fd=folder)
    try:
        yield
    finally:
        os.chmod(name, mode, dir_fd=folder)
