"""The host's end of the authenticated result channel where there are only an exec's own streams (see `channel.py`)."""

from __future__ import annotations

import os

from stages.backends.sandbox.channel import OVERFLOW

_MAX_BYTES = 4 << 20


class DockerChannel:
    """The authenticated result channel over the exec's stderr and stdin (see `channel.py`)."""

    def __init__(self) -> None:
        self.data = b""
        self.nonces: list[str] = []

    def lay_out(self) -> bytes:
        self.nonces.append(os.urandom(16).hex())
        return self.nonces[-1].encode()

    def feed(self, data: bytes) -> bool:
        """True when a session has ended and the next nonce is due."""
        start = self.data.rfind(b"\n") + 1
        if len(self.data) + len(data) <= _MAX_BYTES:
            self.data += data
        elif not self.data.endswith(OVERFLOW):
            self.data += OVERFLOW
        ended = f'{self.nonces[-1]} {{"end"'.encode()
        return len(self.nonces) < 64 and any(x.startswith(ended) for x in self.data[start:].split(b"\n"))
