"""Terminus-2: the model sees a terminal, replies with keystrokes as JSON, and sees what is new (spec §7).

Waits are by the clock, so two runs of one seed need not see the same screen: cycles with this harness claim no equal digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.backends.protocols import Shell
from stages.backends.sandbox.terminal import Terminal
from stages.chat import Message
from stages.domain import EndReason, Runbook, Task
from stages.errors import SandboxError
from stages.harness.protocol import Observed, Wording
from stages.harness.terminus2 import prompt
from stages.harness.terminus2.compaction import Compaction
from stages.harness.terminus2.parser import Parsed, parse_reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminus2Harness:
    """Binds a model's replies to a screen in a sandbox."""

    output_bytes: int = 10_000  # of terminal output per turn, head and tail
    columns: int = 160
    rows: int = 40
    name: str = "terminus2"

    def session(self, sandbox: Shell, task: Task) -> Terminus2Session:
        terminal = Terminal(sandbox, columns=self.columns, rows=self.rows)
        return Terminus2Session(terminal, task, self.output_bytes)


class Terminus2Session:
    """One attempt at one screen. `task_complete` counts when it is said twice in a row."""

    def __init__(self, terminal: Terminal, task: Task, output_bytes: int) -> None:
        self._terminal, self._task, self._bytes = terminal, task, output_bytes
        self._clean: Callable[[str], str] = str
        self._claimed_done = False

    async def opening(self, wording: Wording, runbook: Runbook | None = None) -> Message:
        await self._terminal.start()
        self._clean = wording.clean
        lines = [wording.clean(line) for line in prompt.runbook_lines(runbook) or ()]
        screen = prompt.terminal_state(await self._terminal.screen(), fresh=False)
        text = prompt.first_message(wording.clean(self._task.instruction), wording.clean(screen), lines)
        return {"role": "user", "content": text}

    async def act(self, reply: str, *, cut: bool, left_s: float) -> Observed:
        began = time.monotonic()
        if cut:
            return Observed(observation=prompt.after_cut())
        parsed = parse_reply(reply)
        if parsed.error:
            return Observed(observation=prompt.after_error(parsed))
        try:
            for keys in parsed.commands:
                left = left_s - (time.monotonic() - began)
                if left <= 0:
                    return Observed(end=EndReason.TIME_LIMIT, duration_s=time.monotonic() - began)
                await self._terminal.send(keys.keystrokes, duration_s=min(keys.duration_s, left))
            text, fresh = await self._terminal.new_output()
        except SandboxError:
            if await self._terminal.is_alive():
                raise
            # it typed `exit`, or used up its processes: the agent's doing, and what it left is verified
            return Observed(end=EndReason.DONE, duration_s=time.monotonic() - began)
        state = prompt.limited(prompt.terminal_state(text, fresh=fresh), self._bytes)
        return self._observed(parsed, state, time.monotonic() - began)

    def _observed(self, parsed: Parsed, state: str, duration_s: float) -> Observed:
        confirmed = parsed.task_complete and self._claimed_done
        self._claimed_done = parsed.task_complete
        if confirmed:
            return Observed(observation=state, end=EndReason.DONE, duration_s=duration_s)
        text = prompt.confirm(state) if parsed.task_complete else prompt.after_commands(parsed, state)
        return Observed(observation=text, duration_s=duration_s)

    async def compaction(self, messages: Sequence[Message]) -> Compaction:
        try:
            screen = await self._terminal.screen()
        except SandboxError:
            if await self._terminal.is_alive():
                raise
            screen = ""
        return Compaction(messages, instruction=self._clean(self._task.instruction), screen=self._clean(screen))
