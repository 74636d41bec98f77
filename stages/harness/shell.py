"""The one-command-a-turn harness: the whole reply is the command, the word `done` ends the attempt."""

from __future__ import annotations

from dataclasses import dataclass

from stages.backends.protocols import CommandResult
from stages.harness.observation import tidy

DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellHarness:
    """Binds a model's replies to a sandbox's shell."""

    observation_chars: int = 64
    name: str = "shell"

    def command(self, reply: str) -> str | None:
        """The command in a reply; None when the agent says that it is done."""
        text = reply.strip()
        return None if text == DONE else text

    def observe(self, result: CommandResult) -> str:
        return tidy(result.output, result.exit_code, result.timed_out, self.observation_chars)
