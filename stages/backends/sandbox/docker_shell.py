"""The persistent bash of a Docker attempt, over one attached `exec` (see `conversation.py`): stdin carries commands, stdout
output, stderr reports. Nothing is read between commands, so a background program that keeps printing blocks itself."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping

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
from stages.backends.sandbox.docker_engine import ExecStream

PRELUDE = "exec 198<&0 199>&2 2>&1 0</dev/null; ulimit -n 1024; ulimit -u {pids}"
_MARK_S = 5.0
# Only builtins: it must work when no process can be made. $1 signal; hit what is younger than tick $2, or in it and after
# process $3; and process $4 whatever its age.
KILLER = r"""
for d in /proc/[0-9]*; do
 p=${d#/proc/}; { IFS= read -r s < $d/stat; } 2>/dev/null || continue
 f=(${s##*) }); t=${f[19]}; [ "$p" = $$ ] && continue
 if [ "$t" -gt "$2" ] || { [ "$t" -eq "$2" ] && [ "$p" -gt "$3" ]; } || [ "$p" = "$4" ]; then kill -"$1" "$p" 2>/dev/null; fi
done; :
"""


class DockerShell:
    """`connect()` starts a fresh bash in the container; `kill(signal, (tick, last pid), pid)` runs KILLER there."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[ExecStream]],
        kill: Callable[[str, tuple[int, int], int], Awaitable[None]],
        *,
        workdir: str,
        output_bytes: int,
        env: Mapping[str, str],
    ) -> None:
        """`env`: the task's own, exported by bash: a loader that dislikes one would else talk into the reports."""
        self._connect, self._kill = connect, kill
        lines = (f"declare -x {name}={shlex.quote(value)}\n" for name, value in env.items())
        self._reports = Reports(workdir, "".join(lines).encode("utf-8", "surrogateescape"))
        self._output_bytes = output_bytes
        self._stream: ExecStream | None = None

    async def begin(self, patience_s: float = RESTORE_S) -> None:
        """Raises NoShell when no bash answers."""
        self._stream = await self._connect()
        if not await self._restore(patience_s):
            self.close()
            raise NoShell("no bash answers in the container; does the image have /bin/bash?")

    async def run(self, command: bytes, timeout_s: float) -> Outcome:
        """One command. A time-out ends what the command started, and the shell if it will not answer."""
        began = time.monotonic()
        restarted = self._stream is None
        if self._stream is None and (words := await self._restart()):
            return Outcome(words, None, False, True, 0, time.monotonic() - began)
        capture = Capture(self._output_bytes)
        kind, code = await self._converse(command, timeout_s, capture)
        timed_out = kind == "timeout"
        if timed_out:
            kind = await self._interrupt(capture)
        if kind != "done":
            code, restarted = None, True
            if kind != "ended" or not await self._restore(RESTORE_OLD_S):
                capture.add(await self._restart())
        output, omitted = capture.result()
        return Outcome(output, None if timed_out else code, timed_out, restarted, omitted, time.monotonic() - began)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _restore(self, patience_s: float) -> bool:
        return (await self._converse(self._reports.restore_script(), patience_s, Capture(1024)))[0] == "done"

    async def _restart(self) -> bytes:
        """As the bubblewrap backend's: empty, or why there is no shell, which is no error of ours."""
        for patience_s in (RESTORE_OLD_S, RESTORE_S):
            self.close()
            await self._kill("KILL", (0, 0), 0)
            try:
                await self.begin(patience_s)
                return b""
            except NoShell as error:
                self._reports.forget()
                words = no_shell(error)
        return words

    async def _interrupt(self, capture: Capture) -> str:
        since = self._reports.began
        if since is None:
            return "gone"
        for name, grace in (("TERM", 0.3), ("KILL", 0.5), ("KILL", 1.0)):
            await self._kill(name, since, 0)
            kind = (await self._answer(grace, capture))[0]
            if kind != "timeout":
                return kind
        await self._kill("KILL", since, self._reports.loop_pid or 0)
        return (await self._answer(1.0, capture))[0]

    async def _converse(self, command: bytes, seconds: float, capture: Capture) -> tuple[str, int | None]:
        assert self._stream is not None
        asked = self._reports.ask(command)
        deadline = time.monotonic() + seconds
        try:
            await asyncio.wait_for(self._stream.send(asked), seconds)
        except TimeoutError:
            return "timeout", None
        except OSError:
            return "gone", None
        return await self._answer(deadline - time.monotonic(), capture)

    async def _answer(self, seconds: float, capture: Capture) -> tuple[str, int | None]:
        """Reads until a report has come, and the mark after the command's output (or a little longer without it)."""
        assert self._stream is not None
        deadline = time.monotonic() + seconds
        output = MarkedOutput(capture, self._reports.mark)
        message: tuple[str, int | None] | None = None
        try:
            while True:
                message = message or self._reports.next()
                if message is not None and (output.seen or message[0] != "done"):
                    return message
                if len(self._reports) > MAX_REPORT_BYTES:
                    return "gone", None
                left = deadline - time.monotonic()
                if message is not None:
                    left = max(left, _MARK_S)
                if left <= 0:
                    return "timeout", None
                try:
                    frames = await asyncio.wait_for(self._stream.read(), left)
                except TimeoutError:
                    return message or ("timeout", None)
                except OSError:
                    return "gone", None
                if frames is None:
                    return "gone", None
                for stream, data in frames:
                    if stream == 2:
                        self._reports.feed(data)
                    else:
                        output.feed(data)
        finally:
            output.flush()


class MarkedOutput:
    """Feeds a capture, without the mark that says where a command's output ends."""

    def __init__(self, capture: Capture, mark: bytes) -> None:
        self._capture, self._mark = capture, mark
        self._held = b""
        self.seen = False

    def feed(self, data: bytes) -> None:
        if self.seen:
            self._capture.add(data)
            return
        data = self._held + data
        at = data.find(self._mark)
        if at >= 0:
            self.seen = True
            self._held = b""
            self._capture.add(data[:at])
            self._capture.add(data[at + len(self._mark) :])
            return
        keep = min(len(self._mark) - 1, len(data))
        self._capture.add(data[: len(data) - keep])
        self._held = data[len(data) - keep :]

    def flush(self) -> None:
        self._capture.add(self._held)
        self._held = b""
