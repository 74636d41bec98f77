"""The one-command-a-turn harness: the whole reply is the command, the word `done` ends the attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.backends.protocols import Shell
from stages.chat import Message
from stages.domain import EndReason, Runbook, Task
from stages.harness.observation import tidy
from stages.harness.protocol import Observed, Wording
from stages.harness.terminus2.compaction import Compaction

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellHarness:
    """Binds a model's replies to a sandbox's shell."""

    observation_chars: int = 64
    name: str = "shell"

    def session(self, sandbox: Shell, task: Task) -> ShellSession:
        return ShellSession(sandbox, task, self.observation_chars)


class ShellSession:
    """One attempt. It keeps no state: the shell does."""

    def __init__(self, sandbox: Shell, task: Task, observation_chars: int) -> None:
        self._sandbox, self._task, self._chars = sandbox, task, observation_chars

    async def opening(self, wording: Wording, runbook: Runbook | None = None) -> Message:
        return wording.task_message(self._task.instruction, runbook)

    async def act(self, reply: str, *, cut: bool, left_s: float) -> Observed:
        if cut:  # what it would have been is unknown
            return Observed(end=EndReason.TOKEN_CAP)
        command = reply.strip()
        if command == DONE:
            return Observed(end=EndReason.DONE)
        limit = max(0.1, min(self._task.limits.command_timeout_s, left_s))
        result = await self._sandbox.run(command, timeout_s=limit)
        return Observed(
            observation=tidy(result.output, result.exit_code, result.timed_out, self._chars),
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            duration_s=result.duration_s,
        )

    async def compaction(self, messages: Sequence[Message]) -> Compaction | None:
        return None
