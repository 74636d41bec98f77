"""The training process's end of the socket to its sandbox host: start the process, match answers to requests.

The socket is read by the event loop that makes a request; a backend may so outlive one `asyncio.run` and serve the next.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import stages
from stages.backends.sandbox.wire import FrameReader, pack
from stages.errors import SandboxError

Answer = tuple[dict[str, Any], bytes]


class HostLink:
    """One host process. `config` is its start-up message without the socket and the parent."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._frames = FrameReader()
        self._outbox: collections.deque[memoryview] = collections.deque()
        self._ready: Answer | None = None
        self._lost = ""

    @property
    def pid(self) -> int | None:
        """Of the guard process; the host and every sandbox are below it."""
        return self._process.pid if self._process else None

    @property
    def lost(self) -> bool:
        """True once the host has ended, whatever the reason."""
        return bool(self._lost)

    async def start(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The host's `ready` message. Raises SandboxError with the kernel's words when it cannot set itself up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        package_root = str(Path(stages.__file__).resolve().parent.parent)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-s",
                "-B",
                "-m",
                "stages.backends.sandbox.host",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            env={"PYTHONPATH": package_root, "LC_ALL": "C.UTF-8"},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is for us: it must not kill the jails of attempts that we let finish
        )
        theirs.close()
        self._socket = ours
        future = self._expect(0)
        self._send(pack(self._config))
        try:
            head, _ = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            await self.aclose()
            raise SandboxError(
                f"the sandbox host did not start within {timeout_s:.0f} s; is the machine overloaded?"
            ) from None
        if "error" in head:
            await self.aclose()
            raise SandboxError(head["error"])
        return head

    async def call(self, head: dict[str, Any], blob: bytes = b"") -> Answer:
        """One request. Raises SandboxError when the host answers with an error or is gone."""
        if self._lost or self._socket is None:
            raise SandboxError(self._lost or "the sandbox host is not running; call start() first")
        number = next(self._ids)
        future = self._expect(number)
        self._send(pack({"id": number, **head}, blob))
        try:
            answer, out = await future
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise SandboxError(f"sandbox host: {answer['error']}")
        return answer, out

    def post(self, head: dict[str, Any]) -> None:
        """A request whose answer nobody waits for; nothing when the host is gone."""
        if not self._lost and self._socket is not None:
            self._send(pack({"id": next(self._ids), **head}))

    async def aclose(self) -> None:
        """Close the socket; the host removes everything and ends. Idempotent."""
        if self._socket is not None:
            self._detach()
            self._socket.close()
            self._socket = None
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await asyncio.to_thread(process.wait, 15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._fail("the sandbox backend was closed")

    def _expect(self, number: int) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._detach()
            self._loop = loop
            assert self._socket is not None
            loop.add_reader(self._socket, self._receive)
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting[number] = future
        return future

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    def _send(self, data: bytes) -> None:
        self._outbox.append(memoryview(data))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        assert self._loop is not None
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as error:
                self._fail(f"the sandbox host is gone ({error}); its attempts are lost, restart the backend")
                break
            if sent < len(self._outbox[0]):
                self._outbox[0] = self._outbox[0][sent:]
            else:
                self._outbox.popleft()
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._detach()
            self._fail("the sandbox host ended unexpectedly; its attempts are lost, restart the backend")
            return
        for head, blob in self._frames.feed(data):
            number = 0 if "event" in head else int(head["id"])
            future = self._waiting.pop(number, None)
            if future is not None and not future.done() and not future.get_loop().is_closed():
                future.set_result((head, blob))

    def _fail(self, why: str) -> None:
        self._lost = self._lost or why
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(SandboxError(why))
