"""Read what a sandbox needs of a task folder: workspace files, tests, solution. Refuses links that leave the folder."""

from __future__ import annotations

import hashlib
import os
import posixpath
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.domain import Task
from stages.errors import TaskError

_MAX_BYTES = 256 << 20

Entry = tuple[str, int, bytes]  # relative path, mode bits, content


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBundle:
    """`key` identifies the content; `trees` are "files", "tests" and "solution"."""

    key: str
    trees: dict[str, tuple[Entry, ...]]

    def header(self) -> dict[str, list[tuple[str, int, int]]]:
        """Names, modes and sizes in the order of `blob`."""
        return {tree: [(p, m, len(c)) for p, m, c in entries] for tree, entries in self.trees.items()}

    @property
    def has_solution(self) -> bool:
        return any(path == "solve.sh" for path, _, _ in self.trees["solution"])

    @property
    def size(self) -> int:
        return sum(len(c) for entries in self.trees.values() for _, _, c in entries)

    def without_contents(self) -> TaskBundle:
        """The same names, nothing in them: what is kept when the contents lie elsewhere."""
        return TaskBundle(key=self.key, trees={t: tuple((p, m, b"") for p, m, _ in e) for t, e in self.trees.items()})

    def blob(self) -> bytes:
        return b"".join(c for entries in self.trees.values() for _, _, c in entries)


_NO_WORKSPACE = ("/", "/usr", "/etc", "/tmp", "/var/tmp", "/opt")
_TAKEN = ("/proc", "/dev", "/tests", "/logs", "/solution", "/opt/rsi")  # and everything below


def read_bundle(task: Task) -> TaskBundle:
    """Everything of `task` that any sandbox of it will see. Raises TaskError naming the file that cannot be used."""
    place = PurePosixPath(posixpath.normpath(task.workdir))
    if (
        not place.is_absolute()
        or str(place) in _NO_WORKSPACE
        or any(place.is_relative_to(taken) for taken in _TAKEN)
        or max(len(os.fsencode(part)) for part in place.parts) > 255
    ):
        raise TaskError(f"task {task.id}: workdir {task.workdir!r} cannot be a workspace; use a folder such as /app")
    files = []
    for path, content in sorted(task.files.items()):
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise TaskError(f"task {task.id}: workspace file {path!r} must be a relative path below {task.workdir}")
        files.append((str(pure), 0o755 if content.startswith(b"#!") else 0o644, content))
    trees = {
        "files": tuple(files),
        "tests": _read_tree(task.root / "tests"),
        "solution": _read_tree(task.root / "solution"),
    }
    if not any(p == "test.sh" for p, _, _ in trees["tests"]):
        raise TaskError(
            f"task {task.id}: {task.root / 'tests' / 'test.sh'} is missing; a task without a verifier has no verdict"
        )
    out = hashlib.sha256()
    for tree, entries in trees.items():
        for path, mode, content in entries:
            out.update(f"{tree}\0{path}\0{mode:o}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
            out.update(content)
    return TaskBundle(key=out.hexdigest()[:32], trees=trees)


def _read_tree(root: Path) -> tuple[Entry, ...]:
    if not root.is_dir():
        return ()
    out: list[Entry] = []
    total, inside = 0, root.resolve()
    try:
        paths = sorted(root.rglob("*"))
    except RecursionError as error:
        raise TaskError(f"{root}: folders nested too deep to be read: flatten it") from error
    for path in paths:
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        if path.is_symlink() and inside not in path.resolve().parents:
            raise TaskError(f"{path} is a link to {os.readlink(path)}, outside {root}; copy the file instead")
        if not path.is_file():
            raise TaskError(f"{path} is not a regular file; only files and folders may be in a task")
        content = path.read_bytes()
        total += len(content)
        if total > _MAX_BYTES:
            raise TaskError(
                f"{root} holds more than {_MAX_BYTES >> 20} MiB (at {path}); keep large data out of the task folder"
            )
        out.append((path.relative_to(root).as_posix(), path.stat().st_mode & 0o777, content))
    return tuple(out)
