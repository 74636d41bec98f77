"""The host's end of the authenticated result channel (see `verifier_tools/rsi_pytest.py`). Standard library only."""

from __future__ import annotations

import asyncio
import os
import secrets

CHANNEL_FD, NONCE_FD = 194, 195
RESULT_FILES = ("ctrf.json", "reward.json", "reward.txt")  # in /logs/verifier
MAX_RESULT_BYTES = 4 << 20  # of one of them
LOG_BYTES = 65536  # of a script's output that are kept
_MAX_BYTES = 4 << 20
OVERFLOW = b"\n(more than can be kept)\n"  # without a nonce: what is missing may be what contradicts the rest


class Channel:
    """A pipe for results and one for nonces. Each nonce can be read once; after a session's end a new one is laid out."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._results, self.results_in = os.pipe()
        self.nonce_out, self._nonce_in = os.pipe()
        for fd in (self._results, self._nonce_in):
            os.set_blocking(fd, False)
        self._data = bytearray()
        self._overflow = False
        self.nonces: list[str] = []
        self._lay_out()
        self._loop.add_reader(self._results, self._read)

    @property
    def fds(self) -> dict[int, int]:
        """Descriptor numbers in the jail -> ours."""
        return {CHANNEL_FD: self.results_in, NONCE_FD: self.nonce_out}

    def started(self) -> None:
        """The jail has its copies: close ours."""
        for fd in (self.results_in, self.nonce_out):
            os.close(fd)

    def finish(self) -> bytes:
        """Everything that was written; closes the channel. Call when no process of the jail lives."""
        self._loop.remove_reader(self._results)
        while self._take():
            pass
        os.close(self._results)
        os.close(self._nonce_in)
        return bytes(self._data) + (OVERFLOW if self._overflow else b"")

    def _lay_out(self) -> None:
        self.nonces.append(secrets.token_hex(16))
        os.write(self._nonce_in, self.nonces[-1].encode())

    def _read(self) -> None:
        start = max(self._data.rfind(b"\n") + 1, 0)
        if not self._take():
            self._loop.remove_reader(self._results)
            return
        ended = f'{self.nonces[-1]} {{"end"'.encode()
        if any(line.startswith(ended) for line in bytes(self._data[start:]).split(b"\n")) and len(self.nonces) < 64:
            self._lay_out()

    def _take(self) -> bool:
        try:
            data = os.read(self._results, 1 << 16)
        except BlockingIOError:
            return False
        if len(self._data) + len(data) <= _MAX_BYTES:
            self._data += data
        else:
            self._overflow = True
        return bool(data)
