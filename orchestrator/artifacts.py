"""Content-addressed files on any fsspec URL: a key is the SHA-256 of the bytes, so nothing is ever overwritten.

A chunk of trajectories is three files: an index (JSON, gzip) with everything but the arrays and raw answers; the token
arrays of all its segments end to end (safetensors, format in `orchestrator.chunks`); the raw sampler answers (JSON
lines, gzip). The index names the other two, and its key stands for the chunk.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from orchestrator import chunks
from orchestrator.models.states import ArtifactKind
from stages.domain import Trajectory
from stages.errors import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One file in the store; becomes an `artifact` row."""

    sha256: str
    kind: ArtifactKind
    size: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChunk:
    """A saved chunk of trajectories."""

    key: str  # of the index
    files: tuple[Stored, ...]


class ArtifactStore:
    """Files under one URL: a folder, `s3://bucket/prefix`, `memory://…`."""

    def __init__(self, url: str | Path) -> None:
        try:
            self._fs, self._root = url_to_fs(str(url))
        except (ImportError, ValueError) as error:
            raise StoreError(f"The artifact URL {url} cannot be opened: {error}. Correct RSI_ARTIFACT_URL.") from error
        self.url = str(url)

    def put(self, data: bytes, kind: ArtifactKind = ArtifactKind.FILE) -> Stored:
        """Write unless it is there. Whole or not at all.

        Raises:
            StoreError: the place is full or cannot be written.
        """
        key = hashlib.sha256(data).hexdigest()
        path = self._path(key)
        try:
            if not self._fs.exists(path):
                if isinstance(self._fs, LocalFileSystem):
                    _write_atomically(Path(path), data)
                else:
                    self._fs.pipe_file(path, data)  # object stores show an object when it is complete
        except OSError as error:
            raise StoreError(
                f"The artifact store {self.url} refuses {len(data)} bytes: {error}. Free some space."
            ) from error
        return Stored(sha256=key, kind=kind, size=len(data))

    def get(self, key: str) -> bytes:
        """The bytes of a key, checked against it.

        Raises:
            StoreError: missing or damaged.
        """
        try:
            data: bytes = self._fs.cat_file(self._path(key))
        except FileNotFoundError as error:
            raise self._missing(key) from error
        if hashlib.sha256(data).hexdigest() != key:
            raise StoreError(f"The artifact {key} in {self.url} is damaged: its bytes have another digest. Restore it.")
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes start…end−1 of a file; not checked against the key, for that needs all of it."""
        try:
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=end)
        except FileNotFoundError as error:
            raise self._missing(key) from error
        return data

    def exists(self, key: str) -> bool:
        return bool(self._fs.exists(self._path(key)))

    def put_text(self, text: str) -> Stored:
        return self.put(text.encode("utf-8", "surrogatepass"), ArtifactKind.TEXT)

    def get_text(self, key: str) -> str:
        return self.get(key).decode("utf-8", "surrogatepass")

    # ----------------------------------------------------------------- trajectories

    def save_trajectories(self, trajectories: Sequence[Trajectory]) -> SavedChunk:
        """Save a chunk; `load_trajectories(chunk.key)` gives equal ones."""
        tokens = self.put(chunks.pack_arrays(trajectories), ArtifactKind.TOKENS)
        answers = self.put(chunks.pack_answers(trajectories), ArtifactKind.ANSWERS)
        index = self.put(
            chunks.pack_index(trajectories, tokens=tokens.sha256, answers=answers.sha256), ArtifactKind.TRAJECTORIES
        )
        return SavedChunk(key=index.sha256, files=(index, tokens, answers))

    def load_trajectories(self, key: str, ids: Collection[str] | None = None) -> list[Trajectory]:
        """All trajectories of a chunk in their order, or those with `ids` (then only their parts are read).

        Raises:
            StoreError: a file is missing or damaged, or an id is not in the chunk.
        """
        index = chunks.Index.read(self.get(key))
        wanted = index.select(key, ids)
        if ids is None:
            arrays = chunks.read_arrays(self.get(index.tokens), index.spans(wanted))
        else:
            arrays = chunks.read_slices(
                lambda start, end: self.read_range(index.tokens, start, end), index.spans(wanted)
            )
        answers = chunks.read_answers(self.get(index.answers), wanted)
        return [index.build(n, arrays, answers) for n in wanted]

    def load_answers(self, key: str, ids: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Raw sampler answers of trajectories of a chunk. Raises StoreError as `load_trajectories`."""
        index = chunks.Index.read(self.get(key))
        wanted = index.select(key, ids)
        answers = chunks.read_answers(self.get(index.answers), wanted)
        return {index.entries[n]["id"]: tuple(answers[n]) for n in wanted}

    def _path(self, key: str) -> str:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise StoreError(f"{key!r} is no artifact key; one has 64 hexadecimal digits.")
        return f"{self._root.rstrip('/')}/{key[:2]}/{key[2:]}"

    def _missing(self, key: str) -> StoreError:
        return StoreError(f"The artifact {key} is not in {self.url}. Was the folder moved? Set RSI_ARTIFACT_URL to it.")


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"tmp_{path.name[:16]}_{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
