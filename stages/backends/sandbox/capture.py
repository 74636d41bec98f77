"""Bounded capture of a stream: the first and last bytes are kept, the middle is counted.

Imported by the host process, so: standard library only.
"""

from __future__ import annotations

from collections import deque


class Capture:
    """Keeps at most `limit` bytes: half from the head, half from the tail."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_len = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_len += len(data)
            while self._tail_len - len(self._tail[0]) >= self._half:
                self._tail_len -= len(self._tail.popleft())

    def result(self) -> tuple[bytes, int]:
        """(text, bytes left out); the text says where and how many."""
        tail = b"".join(self._tail)[-self._half :]
        omitted = self.total - len(self._head) - len(tail)
        if not omitted:
            return bytes(self._head) + tail, 0
        return b"%s\n[... %d bytes omitted ...]\n%s" % (bytes(self._head), omitted, tail), omitted
