"""Weights by disk: a checkpoint's files where SGLang servers on other machines read them.

A folder that both see (NFS, a mounted bucket) or any fsspec URL. Servers load from a path of their own, so a URL such as
s3://bucket/weights needs `seen_as`: where the servers have it mounted.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fsspec.core import url_to_fs

from stages.backends.learner.checkpoint import digest_weights
from stages.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

WHOLE = "published"  # this empty file is written last
KEPT = 2  # copies: what is served, and what was served before it


class PublishedWeights:
    """Calling it with a model folder copies its files and returns their path as the servers see it.

    Copies are named by the digest of the weights: the same weights are copied once, and none is ever changed.
    Raises ConfigError for a URL that cannot be used.
    """

    def __init__(self, url: str, seen_as: str = "") -> None:
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"RSI_SGLANG_WEIGHTS_URL {url}: {error}") from error
        local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))
        if not seen_as and not local:
            raise ConfigError(
                f"servers load weights from a path, not from {url}: set RSI_SGLANG_WEIGHTS_PATH to where they have it mounted"
            )
        self._url, self._seen_as = url, (seen_as or self._root).rstrip("/")
        self._own: list[str] = []

    def __call__(self, folder: Path) -> str:
        """Raises CheckpointError, with no server told anything, when a file cannot be copied."""
        name = digest_weights(folder)[:32]
        target = f"{self._root.rstrip('/')}/{name}"
        try:
            if not self._fs.exists(f"{target}/{WHOLE}"):
                self._fs.makedirs(target, exist_ok=True)
                for file in sorted(p for p in folder.iterdir() if p.is_file()):
                    self._fs.put_file(str(file), f"{target}/{file.name}")
                self._fs.touch(f"{target}/{WHOLE}")
        except OSError as error:
            raise CheckpointError(
                f"the weights of {folder} cannot be copied to {self._url}: {error}. Make room or mend RSI_SGLANG_WEIGHTS_URL."
            ) from error
        self._forget_old(name)
        return f"{self._seen_as}/{name}"

    def _forget_old(self, newest: str) -> None:
        """Of the copies that this process made, the last ones stay."""
        self._own = [n for n in self._own if n != newest] + [newest]
        while len(self._own) > KEPT:
            old = f"{self._root.rstrip('/')}/{self._own.pop(0)}"
            log.info("removing the weights that no server needs any more: %s", old)
            try:
                self._fs.rm_file(f"{old}/{WHOLE}")  # first: another cycle must not take half a copy for a whole one
                self._fs.rm(old, recursive=True)
            except OSError as error:
                log.warning("%s stays where it is: %s", old, error)
