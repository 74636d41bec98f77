"""The full log of attempts: every command with its whole kept output and the verifier's words, written as they happen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from stages.backends.protocols import Capability, CommandResult, Sandbox, SandboxBackend, VerifierReport
from stages.domain import Task
from stages.errors import SandboxError


@runtime_checkable
class Solves(Protocol):
    """A sandbox that can run the task's own solution."""

    async def run_solution(self, step: Task | None = None) -> CommandResult: ...


@runtime_checkable
class Checks(Protocol):
    """A sandbox whose state can be verified while its agent lives on."""

    async def check(self, step: Task) -> VerifierReport: ...


class AttemptLog:
    """One attempt's file. Unbuffered, so that a killed run keeps what happened before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = io.FileIO(path, "w")

    def note(self, text: str) -> None:
        self._write(b"# " + text.encode("utf-8", "backslashreplace").replace(b"\n", b"\n# ") + b"\n")

    def command(self, command: str, result: CommandResult) -> None:
        end = "timed out" if result.timed_out else f"exit {'none' if result.exit_code is None else result.exit_code}"
        cut = f", {result.truncated_bytes} bytes left out" if result.truncated_bytes else ""
        anew = ", the shell was started anew" if result.restarted else ""
        output = result.output if not result.output or result.output.endswith(b"\n") else result.output + b"\n"
        self._write(b"$ " + command.encode("utf-8", "surrogateescape") + b"\n" + output)
        self.note(f"{end}, {result.duration_s:.3f} s{cut}{anew}")

    def report(self, report: VerifierReport) -> None:
        self.note(f"verifier: {report.verdict}, {report.duration_s:.3f} s")
        for check in report.checks:
            self.note(f"  {check.status} {check.role} {check.id}{': ' if check.message else ''}{check.message}")
        if report.flags:
            self.note(f"  flags: {', '.join(report.flags)}")
        self._write(report.log.encode("utf-8", "backslashreplace") + b"\n" if report.log else b"")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            raise SandboxError(
                f"{self.path}: the log cannot be written: {error.strerror}; free space or name another --log"
            ) from error


class LoggedSandbox:
    """A sandbox whose every action goes to a log first or last."""

    def __init__(self, inner: Sandbox, log: AttemptLog) -> None:
        self._inner, self.log = inner, log

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        result = await self._inner.run(command, timeout_s=timeout_s)
        self.log.command(command, result)
        return result

    async def run_solution(self, step: Task | None = None) -> CommandResult:
        """The task's `solution/solve.sh`, or one step's. Raises TaskError when it has none, SandboxError where the backend cannot."""
        if not isinstance(self._inner, Solves):
            raise SandboxError("this sandbox backend cannot run a task's solution; use --backend bubblewrap")
        result = await (self._inner.run_solution(step) if step else self._inner.run_solution())
        self.log.command("bash /solution/solve.sh", result)
        return result

    async def verify(self) -> VerifierReport:
        report = await self._inner.verify()
        self.log.report(report)
        return report

    async def check(self, step: Task) -> VerifierReport:
        """One step's verifier; the agent can go on. Raises SandboxError where the backend cannot."""
        if not isinstance(self._inner, Checks):
            raise SandboxError(
                "this sandbox backend cannot run tasks of several steps; use --backend bubblewrap or docker"
            )
        report = await self._inner.check(step)
        self.log.report(report)
        return report

    async def close(self) -> None:
        await self._inner.close()


class LoggedBackend:
    """Any sandbox backend, with `attempt-1.log`, `attempt-2.log`, … in a folder, in the order in which `open` is called."""

    def __init__(self, inner: SandboxBackend, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self.name = inner.name
        self.logs: list[AttemptLog] = []

    async def start(self) -> None:
        await self._inner.start()

    async def open(self, task: Task) -> LoggedSandbox:
        log = AttemptLog(self._folder / f"attempt-{len(self.logs) + 1}.log")
        self.logs.append(log)
        log.note(f"attempt {len(self.logs)} at task {task.id} (digest {task.digest[:12]}) in {self.name}")
        try:
            return LoggedSandbox(await self._inner.open(task), log)
        except SandboxError as error:
            log.note(f"no sandbox: {error}")
            raise

    async def capabilities(self) -> Sequence[Capability]:
        return await self._inner.capabilities()

    async def aclose(self) -> None:
        for log in self.logs:
            log.close()
        await self._inner.aclose()
