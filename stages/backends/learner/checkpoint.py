"""Checkpoint folders: written whole or not at all, verified by digest.

A folder is written beside its place as `tmp_<name>`, flushed to disk, then renamed. `manifest.json` lists the SHA-256 and
size of every other file. Safetensors and JSON only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from stages.errors import CheckpointError

MANIFEST = "manifest.json"


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digest_weights(folder: Path) -> str:
    """SHA-256 of the weight bytes of an actor or critic folder.

    One `.safetensors` file: its SHA-256. Several shards: SHA-256 over the sorted lines "name sha256\\n".
    Raises CheckpointError when there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; is it a model folder?")
    if len(files) == 1:
        return file_sha256(files[0])
    lines = "".join(f"{f.name} {file_sha256(f)}\n" for f in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    """Writes `manifest.json` over every file below `folder` and returns its `files` table."""
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST:
            files[name] = {"sha256": file_sha256(path), "size": path.stat().st_size}
    text = json.dumps({"format": 1, "files": files}, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text)
    return files


def read_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    """The `files` table of a checkpoint's manifest. Raises CheckpointError when it is missing or unreadable."""
    path = folder / MANIFEST
    try:
        return json.loads(path.read_text())["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a finished checkpoint") from None
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read ({e}); take an earlier checkpoint") from e


def verify_manifest(folder: Path) -> None:
    """Recomputes every size and digest. Raises CheckpointError that names the first file that is missing or differs."""
    for name, entry in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing from the checkpoint; restore the file or take an earlier one")
        if path.stat().st_size != entry["size"] or file_sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} does not match its manifest (damaged or edited); take an earlier checkpoint")


def link_or_copy(source: Path, dest: Path) -> None:
    """Makes `dest` the same files as `source`, byte for byte (hard links where the file system allows).

    Hard links are safe because no file of a finished checkpoint is ever written again.
    Raises CheckpointError when `source` is not a folder.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder: there is no model to carry over")
    for path in sorted(source.rglob("*")):
        target = dest / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError as e:
            if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            shutil.copyfile(path, target)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Creates or replaces `path` with what `fill(temporary folder)` writes, atomically.

    On any failure (a full disk included) `path` is what it was and no temporary folder is left.
    Raises CheckpointError for a file system failure; other errors of `fill` pass through.
    """
    tmp, old = path.with_name(f"tmp_{path.name}"), path.with_name(f"tmp_old_{path.name}")
    recover(path)
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
        fill(tmp)
        write_manifest(tmp)
        _flush(tmp)
        if path.exists():  # a folder cannot be renamed onto another: step aside, `recover` undoes a crash in between
            os.rename(path, old)
        os.rename(tmp, path)
        _flush_dir(path.parent)
    except (OSError, SafetensorError) as e:
        _undo(path, tmp)
        raise CheckpointError(f"checkpoint {path} was not written: {_reason(e)}; earlier checkpoints are intact") from e
    except BaseException:
        _undo(path, tmp)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(path: Path) -> None:
    """Puts the previous folder back when a process died between the two renames of `write_folder`."""
    old = path.with_name(f"tmp_old_{path.name}")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)


def _undo(path: Path, tmp: Path) -> None:
    shutil.rmtree(tmp, ignore_errors=True)
    recover(path)


def _reason(error: Exception) -> str:
    # safetensors reports a full disk in words only
    full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
    return "the disk is full; free some space and resume" if full else str(error)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            _flush_dir(path)
        else:
            with path.open("rb") as f:
                os.fsync(f.fileno())
    _flush_dir(folder)


def _flush_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
