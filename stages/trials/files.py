"""Files of a stranger: bounded, UTF-8, never through a link. Every refusal names the file."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from stages.errors import TrialError

ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z")

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """A stranger's name as it may be shown and stored: control characters and broken UTF-8 become �."""
    return _UNPRINTABLE.sub("�", text)


def read_text(folder: Path, name: str, limit: int) -> str | None:
    """The text of `folder/name` (`name` may have `/`), None when it is not there.

    Raises TrialError naming the file: a link on the way, no regular file, more than `limit` bytes, or not UTF-8.
    """
    path = folder / name
    data = _read(folder, name.split("/"), limit, path)
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrialError(f"{path} is not UTF-8 (byte {error.start}); it is not what Harbor writes") from error


def read_json(folder: Path, name: str, limit: int) -> Any:
    """The JSON value of a file, None when it is not there. Raises TrialError as `read_text` does, and for broken JSON."""
    text = read_text(folder, name, limit)
    if text is None:
        return None
    path = folder / name
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise TrialError(f"{path} is nested too deeply to be read") from error
    except ValueError as error:  # JSONDecodeError, and integers of absurd length
        raise TrialError(f"{path} is no JSON: {error}; it was probably cut off") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _read(folder: Path, parts: list[str], limit: int, path: Path) -> bytes | None:
    """Opens one part after the other below `folder`, so that a link cannot be put in the way in between."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TrialError(f"{folder} cannot be read: {error.strerror}") from error
    try:
        for n, part in enumerate(parts):
            last = n == len(parts) - 1
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_NONBLOCK if last else os.O_DIRECTORY)
            try:
                found = os.open(part, flags, dir_fd=at)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(part, at):
                    raise TrialError(f"{path}: {part} is a symbolic link; links are not followed") from error
                raise TrialError(f"{path} cannot be read: {error.strerror}") from error
            os.close(at)
            at = found
        return _bounded(at, limit, path)
    finally:
        os.close(at)


def _is_link(part: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode)


def _bounded(handle: int, limit: int, path: Path) -> bytes:
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        raise TrialError(f"{path} is no regular file")
    if info.st_size > limit:
        raise TrialError(f"{path} has {info.st_size} bytes, more than the {limit} that such a file may have")
    chunks, size = [], 0
    while chunk := os.read(handle, 1 << 20):
        size += len(chunk)
        if size > limit:
            raise TrialError(f"{path} grew beyond {limit} bytes while it was read")
        chunks.append(chunk)
    return b"".join(chunks)
