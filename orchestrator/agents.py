"""Who acts in a sandbox for `rsi tasks run`: the task's own solution, nobody, or a model behind a URL."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from orchestrator.attempt_log import LoggedSandbox
from orchestrator.chat_endpoint import ChatEndpoint, ContextFull, Reply
from stages.chat import Message, Prompts
from stages.config import RolloutConfig
from stages.domain import EndReason, Runbook, Task
from stages.harness.registry import harness_of
from stages.harness.terminus2.compaction import Compaction


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWording:
    """Messages for a model whose control tokens are not known here: its own server keeps text from becoming one."""

    prompt: str = Prompts().act

    def task_message(self, instruction: str, runbook: Runbook | None = None) -> Message:
        return {"role": "user", "content": self.prompt.replace("{instruction}", instruction)}

    def clean(self, text: str) -> str:
        return text


class RemoteAgent(Agent):
    """A model behind a URL, in the harness that checkpoints have."""

    def __init__(self, endpoint: ChatEndpoint, *, config: RolloutConfig, prompt: str = Prompts().act) -> None:
        self._endpoint, self._config = endpoint, config
        self._wording, self._harness = PlainWording(prompt=prompt), harness_of(config)

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._endpoint.__aexit__()

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        talk = _Talk(self._endpoint, sandbox, time.monotonic() + task.agent_timeout_s)
        session = self._harness.session(sandbox, task)
        messages = [await session.opening(self._wording)]
        at = self._config.compaction_at(self._config.max_context_tokens)
        turns = 0
        try:
            while turns < task.max_turns:
                reply = await talk.reply(messages)
                turns += 1
                seen = await session.act(reply.text, cut=reply.cut, left_s=talk.left_s)
                if seen.end is not None:
                    return seen.end, turns
                messages += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": seen.observation},
                ]
                if at is not None and (reply.tokens or 0) >= at:
                    messages = await talk.compacted(messages, await session.compaction(messages))
        except TimeoutError:
            return EndReason.TIME_LIMIT, turns
        except ContextFull as error:
            sandbox.log.note(str(error))
            return EndReason.CONTEXT_OVERFLOW, turns
        return EndReason.TURN_CAP, turns


class _Talk:
    """Calls to an endpoint until a deadline, noted in the log where they are no turns."""

    def __init__(self, endpoint: ChatEndpoint, sandbox: LoggedSandbox, deadline: float) -> None:
        self._endpoint, self._log, self._deadline = endpoint, sandbox.log, deadline

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Raises TimeoutError at the deadline, ContextFull, SamplerError."""
        reply = await asyncio.wait_for(self._endpoint.reply(messages), self.left_s)
        if reply.cut:
            self._log.note(f"the reply was cut by the token limit: {reply.text}")
        return reply

    async def compacted(self, messages: list[Message], compaction: Compaction | None) -> list[Message]:
        """The shorter conversation; the same one where the harness has no compaction."""
        if compaction is None:
            return messages
        while not compaction.done:
            kind = compaction.kind
            try:
                reply = await self.reply(compaction.prompt())
            except ContextFull:
                if not compaction.shrink():
                    raise
                continue
            self._log.note(f"{kind}: {reply.text}")
            compaction.answer(reply.text)
        return compaction.messages()
