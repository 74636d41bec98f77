"""The persistent bash of one attempt, driven from the host process over pipes (see `conversation.py`). Standard library only."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable

from stages.backends.sandbox.capture import Capture
from stages.backends.sandbox.conversation import (
    MAX_REPORT_BYTES,
    RESTORE_OLD_S,
    RESTORE_S,
    NoShell,
    Outcome,
    Reports,
    no_shell,
)
from stages.backends.sandbox.spawn import Jail, born, children, descendants, now_mark, send

_CHUNK = 1 << 18
_TERM_GRACE_S, _KILL_GRACE_S = 0.3, 1.0


class Shell:
    """`start_jail(output, command_in, report_out)` starts a fresh jail on the same workspace and returns it."""

    def __init__(self, start_jail: Callable[[int, int, int], Jail], *, workdir: str, output_bytes: int) -> None:
        self._start_jail = start_jail
        self._reports = Reports(workdir)
        self._output_bytes = output_bytes
        self._loop = asyncio.get_running_loop()
        self._output = self._command = self._report = -1
        self._wake = asyncio.Event()
        self.jail: Jail | None = None

    def start(self) -> None:
        """A new jail with new pipes. Nothing is read until the first command."""
        self._output, output_in = os.pipe()
        command_out, self._command = os.pipe()
        self._report, report_in = os.pipe()
        for fd in (self._output, self._command, self._report):
            os.set_blocking(fd, False)
        try:
            self.jail = self._start_jail(output_in, command_out, report_in)
        finally:
            for fd in (output_in, command_out, report_in):
                os.close(fd)
        self.jail.exited.add_done_callback(lambda _: self._wake.set())

    async def begin(self, patience_s: float = RESTORE_S) -> None:
        """Start and wait until bash answers. Raises NoShell where it does not, with bwrap's words in the message."""
        self.start()
        capture = Capture(4096)
        if not await self._restore(patience_s, capture):
            assert self.jail is not None
            if self.jail.alive:
                await self.jail.kill()
            self._drain(capture)
            raise NoShell(
                f"bash does not answer in the jail; bwrap says: {capture.result()[0].decode(errors='replace').strip()}"
            )

    async def run(self, command: bytes, timeout_s: float) -> Outcome:
        """One command. A time-out ends what the command started, and the shell if it will not answer."""
        began = time.monotonic()
        restarted = False
        if self.jail is None or not self.jail.alive:
            restarted = True
            if words := await self._restart():
                return Outcome(words, None, False, True, 0, time.monotonic() - began)
        capture = Capture(self._output_bytes)
        mark = now_mark()
        kind, code = await self._converse(command, began + timeout_s, capture)
        timed_out = kind == "timeout"
        if timed_out:
            kind = await self._interrupt(mark, capture)
        self._drain(capture)
        if kind != "done":
            code, restarted = None, True
            if kind != "ended" or not await self._restore(RESTORE_OLD_S, Capture(1024)):
                capture.add(await self._restart())
        output, omitted = capture.result()
        return Outcome(output, None if timed_out else code, timed_out, restarted, omitted, time.monotonic() - began)

    async def close(self) -> None:
        if self.jail is not None:
            await self.jail.kill()
        for fd in (self._output, self._command, self._report):
            if fd >= 0:
                os.close(fd)
        self._output = self._command = self._report = -1

    # ------------------------------------------------------------------ conversation

    async def _converse(self, command: bytes, deadline: float, capture: Capture) -> tuple[str, int | None]:
        """("done", rc), ("ended", rc of the loop bash), ("gone", None) or ("timeout", None)."""
        self._drain_reports()
        asked = self._reports.ask(command)
        self._wake.clear()
        self._loop.add_reader(self._output, self._read_output, capture)
        self._loop.add_reader(self._report, self._read_report)
        try:
            if not await self._send(asked, deadline):
                return ("timeout", None) if self.jail and self.jail.alive else ("gone", None)
            return await self._answer(deadline)
        finally:
            self._loop.remove_reader(self._output)
            self._loop.remove_reader(self._report)

    async def _answer(self, deadline: float) -> tuple[str, int | None]:
        while True:
            message = self._reports.next()
            if message is not None:
                return message
            if self.jail is None or not self.jail.alive or len(self._reports) > MAX_REPORT_BYTES:
                return "gone", None
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout", None
            self._wake.clear()
            alarm = self._loop.call_later(left, self._wake.set)  # far cheaper than wait_for, which makes a task
            await self._wake.wait()
            alarm.cancel()

    async def _send(self, data: bytes, deadline: float) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._command, view) :]
            except BlockingIOError:
                writable = self._loop.create_future()
                self._loop.add_writer(self._command, _resolve, writable)
                try:
                    await asyncio.wait_for(writable, max(deadline - time.monotonic(), 0.001))
                except TimeoutError:
                    return False
                finally:
                    self._loop.remove_writer(self._command)
            except BrokenPipeError:
                return False
        return True

    # ------------------------------------------------------------------ restart

    async def _restore(self, patience_s: float, capture: Capture) -> bool:
        """Give the loop bash that the supervisor started anew the old cwd and environment. False: it does not answer."""
        kind, _ = await self._converse(self._reports.restore_script(), time.monotonic() + patience_s, capture)
        return kind == "done"

    async def _restart(self) -> bytes:
        """A new jail in the old state, or in the first one where none comes up in that; empty, or why there is none.

        That is no error of ours: the first shell came up here, and what has changed since is the agent's doing.
        """
        for patience_s in (RESTORE_OLD_S, RESTORE_S):
            await self.close()
            try:
                await self.begin(patience_s)
                return b""
            except NoShell as error:
                self._reports.forget()
                words = no_shell(error)
        return words

    # ------------------------------------------------------------------ time-out

    async def _interrupt(self, mark: tuple[int, int], capture: Capture) -> str:
        """TERM, then KILL to what the command started, then the loop bash, then (by the caller) the whole jail."""
        init = self.jail.init() if self.jail else None
        if init is None:
            return "gone"
        supervisor = min(children(init), key=lambda p: (born(p) or 0, p), default=None)
        loop_bash = next(iter(children(supervisor)), None) if supervisor else None
        core = {init, supervisor, loop_bash}
        steps = [(signal.SIGTERM, _TERM_GRACE_S), *[(signal.SIGKILL, 0.05)] * 5, (signal.SIGKILL, _KILL_GRACE_S)]
        for number, grace in steps:
            for pid in descendants(init):
                if pid not in core and ((born(pid) or 0), pid) > mark:
                    send(pid, number)
            kind = await self._listen(grace, capture)
            if kind != "timeout":
                return kind
        if loop_bash:
            send(loop_bash, signal.SIGKILL)
            return await self._listen(_KILL_GRACE_S, capture)
        return "gone"

    async def _listen(self, seconds: float, capture: Capture) -> str:
        self._loop.add_reader(self._output, self._read_output, capture)
        self._loop.add_reader(self._report, self._read_report)
        try:
            return (await self._answer(time.monotonic() + seconds))[0]
        finally:
            self._loop.remove_reader(self._output)
            self._loop.remove_reader(self._report)

    # ------------------------------------------------------------------ pipes

    def _read_output(self, capture: Capture) -> None:
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if data:
            capture.add(data)
        else:
            self._loop.remove_reader(self._output)

    def _read_report(self) -> None:
        try:
            data = os.read(self._report, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._report)
        self._reports.feed(data)
        self._wake.set()

    def _drain(self, capture: Capture) -> None:
        """Exactly what is readable now: a background process that keeps writing cannot hold us."""
        left = _readable(self._output)
        while left > 0:
            try:
                data = os.read(self._output, min(left, _CHUNK))
            except BlockingIOError:
                return
            if not data:
                return
            capture.add(data)
            left -= len(data)

    def _drain_reports(self) -> None:
        left = _readable(self._report)
        if left:
            os.read(self._report, left)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _readable(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0])
