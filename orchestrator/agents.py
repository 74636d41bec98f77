"""Who acts in a sandbox for `rsi tasks run`: the task's own solution, nobody, or a model behind a URL."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Self

from orchestrator.attempt_log import LoggedSandbox
from orchestrator.chat_endpoint import ChatEndpoint, ContextFull
from stages.chat import Message, Prompts
from stages.config import RolloutConfig
from stages.domain import EndReason, Task
from stages.harness.shell import ShellHarness


class Agent(ABC):
    """Acts in one sandbox until it ends. Entered on the event loop on which it will act."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @abstractmethod
    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        """Why it ended, and after how many turns. Raises SandboxError or SamplerError: then there is no verdict."""


class Oracle(Agent):
    """Runs the task's own solution."""

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        result = await sandbox.run_solution()
        return EndReason.TIME_LIMIT if result.timed_out else EndReason.DONE, 0


class Nop(Agent):
    """Does nothing: whatever passes then was never work."""

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        return EndReason.DONE, 0


class RemoteAgent(Agent):
    """A model behind a URL, one command a turn, with the harness that checkpoints have."""

    def __init__(self, endpoint: ChatEndpoint, *, prompt: str = Prompts().act) -> None:
        self._endpoint, self._prompt = endpoint, prompt
        self._harness = ShellHarness(observation_chars=RolloutConfig().observation_chars)

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._endpoint.__aexit__()

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        messages: list[Message] = [{"role": "user", "content": self._prompt.replace("{instruction}", task.instruction)}]
        deadline = time.monotonic() + task.agent_timeout_s
        for turn in range(task.max_turns):
            try:
                reply = await asyncio.wait_for(self._endpoint.reply(messages), deadline - time.monotonic())
            except TimeoutError:
                return EndReason.TIME_LIMIT, turn
            except ContextFull as error:
                sandbox.log.note(str(error))
                return EndReason.CONTEXT_OVERFLOW, turn
            if reply.cut:
                sandbox.log.note(f"the reply was cut by the token limit: {reply.text}")
                return EndReason.TOKEN_CAP, turn + 1
            command = self._harness.command(reply.text)
            if command is None:
                return EndReason.DONE, turn + 1
            left = deadline - time.monotonic()
            result = await sandbox.run(command, timeout_s=max(0.1, min(task.limits.command_timeout_s, left)))
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": self._harness.observe(result)},
            ]
        return EndReason.TURN_CAP, task.max_turns
