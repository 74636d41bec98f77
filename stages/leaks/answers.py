"""The answers of one attempt: what the agent wrote as a result, and what both the judge and the screen name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from stages.domain import Task, Trajectory
from stages.leaks.lines import Role, parse

_QUOTED = re.compile(r"'([^'\n]{4,80})'|\"([^\"\n]{4,80})\"")
_NOT_PLAIN = re.compile(r"[$`{}\\]")


def normal(text: str) -> str:
    """Lower case, blanks collapsed, quotes and outer punctuation dropped."""
    return re.sub(r"\s+", " ", text.replace('"', " ").replace("'", " ")).strip(" .,;:!").lower()


def answers(task: Task, source: Trajectory | None, hidden: Mapping[str, str]) -> list[tuple[str, str]]:
    """(normalised text, where it comes from), longest first. Nothing that the instruction itself holds."""
    public = normal(task.instruction)
    found: dict[str, str] = {}
    for text, place in (*_written(source), *_judged(source, hidden)):
        value = normal(text)
        if len(value) >= 3 and not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", public):
            found.setdefault(value, place)
    return sorted(found.items(), key=lambda item: -len(item[0]))


def _written(source: Trajectory | None) -> Iterator[tuple[str, str]]:
    """Literals that the agent sent into a file by echo or printf."""
    for turn in source.turns if source else ():
        if ">" not in turn.action or "<<" in turn.action or len(turn.action) > 400:
            continue
        for literal in parse(turn.action, shell_only=True).literals:
            if literal.role is Role.PAYLOAD and literal.target and not _NOT_PLAIN.search(literal.text):
                yield literal.text, f"turn {turn.index}"


def _judged(source: Trajectory | None, hidden: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Texts of several words that a test quotes and that the screen showed."""
    if source is None:
        return
    screen = normal("\n".join(t.observation for t in source.turns))
    for name, text in hidden.items():
        for number, line in enumerate(text.split("\n") if name.startswith("tests") else (), start=1):
            for m in _QUOTED.finditer(line):
                value = m.group(1) or m.group(2)
                if " " in value.strip() and normal(value) in screen:
                    yield value, f"{name}:{number}"
