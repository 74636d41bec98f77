"""Frames between the training process and its sandbox host: a JSON header and raw bytes, both length-prefixed.

Imported by the host process, so: standard library only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct("!II")  # bytes of header, bytes of blob
MAX_FRAME_BYTES = 1 << 30


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame. `header` must be JSON; `blob` travels as it is."""
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(head), len(blob)), head, blob))


class FrameReader:
    """Turns a byte stream back into frames. Raises ValueError on a frame that claims more than 1 GiB."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            head_len, blob_len = _LENGTHS.unpack_from(self._buffer)
            end = _LENGTHS.size + head_len + blob_len
            if end > MAX_FRAME_BYTES:
                raise ValueError(f"sandbox frame of {end} bytes is over the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < end:
                return
            head = json.loads(bytes(self._buffer[_LENGTHS.size : _LENGTHS.size + head_len]))
            blob = bytes(self._buffer[_LENGTHS.size + head_len : end])
            del self._buffer[:end]
            yield head, blob
