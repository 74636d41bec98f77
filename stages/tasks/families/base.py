"""The common shape of a task family: what it asks, how it is checked, how it is done right and wrong.

A family's checks are bash conditions over the final workspace (`stages.tasks.verifier` holds the functions that they
use). They are graded: partial work passes some of them, doing nothing passes none, so that progress P is informative.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stages.tasks.names import NameSource

IT = "it"
"""What a runbook line calls a value that must be read from a file: the value itself is never copied into a runbook."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One graded assertion: `test` is a bash condition list, true when the assertion holds."""

    id: str
    test: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgoal:
    """One thing that a task asks for."""

    family: str
    text: str  # the public instruction
    params: Mapping[str, Any]  # what the family drew; private to the family
    files: Mapping[str, str] = field(default_factory=dict)  # its part of the initial workspace
    untouched: tuple[str, ...] = ()  # those of `files` that must stay byte-identical (the gate check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What `Family.draw` returns."""

    params: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()


class Family(ABC):
    """One kind of subgoal. Stateless; all randomness comes from the `rng` given."""

    name: ClassVar[str]
    skill: ClassVar[float]  # P(the scripted operator does it right at first), for the pre-training corpus
    wordings: ClassVar[tuple[str, str, str]]  # instruction templates over `params`

    def make(self, rng: random.Random, names: NameSource) -> Subgoal:
        """Draw one subgoal."""
        draw = self.draw(rng, names)
        return Subgoal(
            family=self.name,
            text=rng.choice(self.wordings).format(**draw.params),
            params=draw.params,
            files=draw.files,
            untouched=draw.untouched,
        )

    def runbook(self, goal: Subgoal, rng: random.Random) -> list[str]:
        """Reference runbook: one line per right command."""
        return [self.line(goal, command) for command in self.right(goal, rng)]

    def line(self, goal: Subgoal, command: str) -> str:
        """The runbook line that restates a right command."""
        return command

    @abstractmethod
    def draw(self, rng: random.Random, names: NameSource) -> Draw: ...

    @abstractmethod
    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        """2-4 graded assertions; an untouched workspace passes none of them."""

    @abstractmethod
    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        """Commands that reach the subgoal in a workspace where nothing went wrong before."""

    @abstractmethod
    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        """Commands of a typical mistake: most leave the right command still possible, some do damage."""


def quote(text: str) -> str:
    """`text` as one bash word."""
    if text.isprintable() and "'" not in text:
        return f"'{text}'"
    out = []
    for byte in text.encode():
        char = chr(byte)
        if char == "\n":
            out.append("\\n")
        elif char in "\\'":
            out.append("\\" + char)
        else:
            out.append(char if 32 <= byte < 127 else f"\\x{byte:02x}")
    return "$'" + "".join(out) + "'"


def lines(words: Iterable[str]) -> str:
    """A text file with one word a line."""
    return "".join(f"{word}\n" for word in words)
