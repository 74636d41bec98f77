"""Prepared root filesystems: what a sandbox may hold beside its task, built once without a registry, read-only in use.

    rootfs = build(home / "rootfs" / "base", packages=("jq",))
    BubblewrapBackend(rootfs={"base": rootfs})          # or DockerBackend(...): both use the same files

A built folder holds `root/` (for bubblewrap), `rootfs.tar` (the same files, for `docker import`) and `rootfs.json`. Without one
bubblewrap binds this machine's own `/usr`, `/bin` and `/lib` read-only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from stages.backends.sandbox.environment import SANDBOX_UID
from stages.backends.sandbox.rootfs_sources import PACKAGES, from_debootstrap, from_host, from_packages
from stages.domain import Task
from stages.errors import ConfigError, SandboxUnavailable, TaskError

_MANIFEST, _TAR, _ROOT = "rootfs.json", "rootfs.tar", "root"
_NEEDED = ("bin/bash", "bin/cp", "bin/chmod")


class Source(StrEnum):
    """Where the files come from."""

    DEBOOTSTRAP = "debootstrap"  # a fresh Debian; root, debootstrap and a mirror
    PACKAGES = "packages"  # files of Debian packages of this machine; others are fetched from its mirror
    HOST = "host"  # an allow-list of this machine's programs; any distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Rootfs:
    """One built folder. `digest` is the SHA-256 of its tar."""

    name: str
    folder: Path
    source: Source
    packages: tuple[str, ...]  # asked for beyond the basic ones
    digest: str
    size_bytes: int
    created: str  # ISO 8601, UTC

    @property
    def root(self) -> Path:
        return self.folder / _ROOT

    @property
    def tar(self) -> Path:
        return self.folder / _TAR


def best_source() -> Source:
    """What this machine and user can do: debootstrap, else installed packages, else single programs."""
    if os.getuid() == 0 and shutil.which("debootstrap"):
        return Source.DEBOOTSTRAP
    return Source.PACKAGES if shutil.which("dpkg-query") else Source.HOST


def write_rootfs(target: Path, packages: Sequence[str] = (), source: Source | None = None) -> Source:
    """Write the tar (not compressed) of a root filesystem with `packages` beyond the basic ones.

    Raises SandboxUnavailable with what is missing here.
    """
    source = source or best_source()
    if source is Source.HOST:
        from_host(target, packages)
        return source
    tool = "dpkg-query" if source is Source.PACKAGES else "debootstrap"
    if shutil.which(tool) is None:
        raise SandboxUnavailable(f"no {tool} here: `--from host` takes this machine's own programs")
    if source is Source.DEBOOTSTRAP and os.getuid() != 0:
        raise SandboxUnavailable("debootstrap needs root: `--from packages` does not")
    write = from_packages if source is Source.PACKAGES else from_debootstrap
    write(target, tuple(dict.fromkeys((*PACKAGES, *packages))))
    return source


def build(folder: Path, *, packages: Sequence[str] = (), source: Source | None = None) -> Rootfs:
    """Make `folder`, whole or not at all. Raises ConfigError when it exists, SandboxUnavailable as `write_rootfs` does."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="tmp_rootfs_", dir=folder.parent))
    try:
        used = write_rootfs(staging / _TAR, packages, source)
        _unpack(staging / _TAR, staging / _ROOT)
        made = Rootfs(
            name=folder.name,
            folder=folder,
            source=used,
            packages=tuple(packages),
            digest=_digest(staging / _TAR),
            size_bytes=(staging / _TAR).stat().st_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        row = {k: v for k, v in asdict(made).items() if k not in ("name", "folder")}
        (staging / _MANIFEST).write_text(json.dumps(row, indent=1) + "\n")
        staging.chmod(0o755)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return made


def load(folder: Path) -> Rootfs:
    """A built folder. Raises ConfigError saying what it lacks."""
    try:
        row = json.loads((folder / _MANIFEST).read_text())
        found = Rootfs(
            name=folder.name,
            folder=folder,
            source=Source(row["source"]),
            packages=tuple(row["packages"]),
            digest=str(row["digest"]),
            size_bytes=int(row["size_bytes"]),
            created=str(row["created"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: no root filesystem that `rsi rootfs build` made: {error}") from error
    for name in _NEEDED:
        if not os.path.lexists(found.root / name):
            raise ConfigError(f"{found.root / name}: missing: build {folder.name} anew")
    return found


def built_below(folder: Path) -> list[Rootfs]:
    """Every built root filesystem in `folder`, by name; unfinished and foreign folders are left out."""
    if not folder.is_dir():
        return []
    return [load(p) for p in sorted(folder.iterdir()) if (p / _MANIFEST).is_file() and not p.name.startswith("tmp_")]


def choose(task: Task, known: Mapping[str, Rootfs], default: str) -> Rootfs | None:
    """The root filesystem of a task: its own, else the backend's. None: this machine's files, or the task's image.

    Raises TaskError for a name that was never built here.
    """
    name = task.rootfs or default
    if not name:
        return None
    if name not in known:
        raise TaskError(
            f"task {task.id} runs on the root filesystem {name!r}, which is not here: build it with "
            f"`rsi rootfs build {name}` (and --packages for what the task needs)"
        )
    return known[name]


def _unpack(tar: Path, folder: Path) -> None:
    """As the sandbox's user where we are root: an overlay copies up only what its user owns."""
    uid = SANDBOX_UID if os.getuid() == 0 else os.getuid()

    def owned(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        safe = tarfile.tar_filter(member, place)
        return safe.replace(uid=uid, gid=uid, mode=(safe.mode or 0) | 0o200, deep=False) if safe else None

    folder.mkdir(mode=0o755)
    with tarfile.open(tar) as opened:
        opened.extractall(folder, numeric_owner=True, filter=owned)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
