"""Digests of task folders and suites, and the one walk over a folder that both loading and digesting use."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from stages.errors import TaskError

MAX_FILE_BYTES = 16 << 20
"""Largest file of a task folder that is read."""
MAX_FOLDER_BYTES = 64 << 20
"""Largest sum over a task folder."""
MAX_FOLDER_FILES = 2000
MAX_FOLDER_DEPTH = 32


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every file of a task folder: relative path → content, in path order.

    A symbolic link is followed when it leads to a regular file inside the folder. Raises TaskError naming the entry for a
    link that leads out or nowhere, a device, socket or FIFO, a file over `MAX_FILE_BYTES`, or too much in all.
    """
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such task folder")
    real_root = os.path.realpath(folder)
    found: dict[str, bytes] = {}
    total = 0
    pending = [""]
    try:
        while pending:
            prefix = pending.pop()
            with os.scandir(os.path.join(folder, prefix)) as entries:
                for entry in entries:
                    relative = f"{prefix}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        if relative.count("/") >= MAX_FOLDER_DEPTH:
                            raise TaskError(
                                f"{folder / relative}: more than {MAX_FOLDER_DEPTH} folders deep: flatten it"
                            )
                        pending.append(relative + "/")
                        continue
                    content = _read_entry(entry, folder / relative, real_root)
                    total += len(content)
                    if total > MAX_FOLDER_BYTES or len(found) >= MAX_FOLDER_FILES:
                        raise TaskError(
                            f"{folder}: more than {MAX_FOLDER_BYTES >> 20} MiB or {MAX_FOLDER_FILES} files in one task: "
                            "keep large data in the image"
                        )
                    found[relative] = content
    except OSError as error:
        raise TaskError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return dict(sorted(found.items()))


def _read_entry(entry: os.DirEntry[str], path: Path, real_root: str) -> bytes:
    if entry.is_symlink():
        target = os.path.realpath(path)
        if not target.startswith(real_root + os.sep):
            raise TaskError(f"{path}: symbolic link out of the task folder (to {target}): copy the file instead")
    info = entry.stat()
    if not stat.S_ISREG(info.st_mode):
        raise TaskError(f"{path}: not a regular file (device, socket, FIFO, or link to a directory): remove it")
    if info.st_size > MAX_FILE_BYTES:
        raise TaskError(
            f"{path}: {info.st_size} bytes, a task file may have {MAX_FILE_BYTES}: keep large data in the image"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with os.fdopen(descriptor, "rb", buffering=0) as handle:
            return handle.readall() if info.st_size else b""
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error


def digest_files(files: Mapping[str, bytes]) -> str:
    """SHA-256 over paths and contents, independent of order, owner, mode and time."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{len(files[path])}\0".encode("utf-8", "surrogateescape"))
        total.update(files[path])
    return total.hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 over every file of a task folder. Raises TaskError as `read_folder` does."""
    return digest_files(read_folder(folder))


def suite_digest(task_digests: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over (task id, task digest) pairs, independent of their order."""
    text = "".join(f"{task}\0{digest}\n" for task, digest in sorted(task_digests))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
