"""What a rollout needs of a harness: the first message, what follows a reply, and sub-calls when the context is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stages.backends.protocols import CommandResult, Shell
from stages.chat import Message
from stages.domain import EndReason, Runbook, Task
from stages.errors import SandboxError
from stages.harness.terminus2.compaction import Compaction

LIVENESS_GRACE_S = 60.0  # on top of a command's own time limit: a stuck sandbox never stalls a wave


class Wording(Protocol):
    """Who phrases messages: a model folder's `Chat`, or plain text for a model behind a URL."""

    def task_message(self, instruction: str, runbook: Runbook | None = None) -> Message: ...

    def clean(self, text: str) -> str:
        """Text from outside, without control tokens of the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What followed one reply."""

    observation: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    end: EndReason | None = None  # the attempt is over; None: the observation is the next message


class Session(Protocol):
    """One attempt: a model's replies on one side, one sandbox on the other."""

    async def opening(self, wording: Wording, runbook: Runbook | None = None) -> Message:
        """The first message. May start something in the sandbox. Raises SandboxError."""
        ...

    async def act(self, reply: str, *, cut: bool, left_s: float) -> Observed:
        """Do what a reply says. `cut`: the token limit ended it; `left_s`: wall clock left. Raises SandboxError."""
        ...

    async def compaction(self, messages: Sequence[Message]) -> Compaction | None:
        """Sub-calls that make a shorter conversation of `messages`; None: this harness has none. Raises SandboxError."""
        ...


class Harness(Protocol):
    @property
    def name(self) -> str: ...

    def session(self, sandbox: Shell, task: Task) -> Session: ...


class LiveSandbox:
    """A sandbox whose every command is answered, or given up as lost, in bounded time."""

    def __init__(self, inner: Shell, task: Task) -> None:
        self._inner, self._limit = inner, task.limits.command_timeout_s

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        limit = self._limit if timeout_s is None else timeout_s
        try:
            return await asyncio.wait_for(self._inner.run(command, timeout_s=limit), limit + LIVENESS_GRACE_S)
        except TimeoutError as error:
            raise SandboxError("the sandbox did not answer") from error
