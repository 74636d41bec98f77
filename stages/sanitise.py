"""The public view of a successful trajectory: what a planner may see (spec §2.1, item 2).

Only the agent's own commands and observations remain, in order. Secrets, hidden places, text of hidden files, hashes and
blobs become marked placeholders, and no control token of the model can hide in the text. Pure: same input, same output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.domain import Task, Trajectory
from stages.leaks.evidence import ABSENT, Evidence, HiddenTexts
from stages.leaks.signatures import Match, blobs, first_of_each_place, hidden_paths, secrets

_HIDDEN_WORDS = 5  # shorter runs shared with tests or solution are the task's own vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One removal. It never holds the removed text."""

    turn: int
    field: str  # "command" or "observation"
    kind: str  # "secret", "hidden path", "hidden text", "hash", "blob", "control token"
    chars: int  # length of what was removed (0 for a control token: it is broken up, not removed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicView:
    turns: tuple[tuple[str, str], ...]  # (command, observation)
    replacements: tuple[Replacement, ...] = ()


def neutralise(text: str, special_tokens: Sequence[str]) -> str:
    """`text` in which no literal of `special_tokens` occurs.

    A literal is broken by a blank after its first character; a one-character token becomes "?". Text without such a
    literal comes back unchanged, so the function is idempotent.
    """
    present = [t for t in special_tokens if t and t in text]
    if not present:
        return text
    for _ in range(len(special_tokens) + 4):  # breaking one literal may spell another
        for token in present:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else "?")
        present = [t for t in special_tokens if t and t in text]
        if not present:
            return text
    while present:  # tokens made of blanks or of each other's broken forms: take them out
        for token in present:
            text = text.replace(token, "")
        present = [t for t in special_tokens if t and t in text]
    return text


def public_view(
    trajectory: Trajectory,
    task: Task,
    *,
    hidden_texts: Mapping[str, str] | None = None,
    special_tokens: Sequence[str] = (),
) -> PublicView:
    """The sanitised turns and a report of every removal.

    `hidden_texts` (tests and solution) are used only to recognise their own text in an observation. What the public
    instruction holds verbatim stays. A final "done" turn without an observation stays as it is.
    """
    hidden = ABSENT
    if hidden_texts:
        evidence = Evidence(task, trajectory, hidden_texts)
        hidden = HiddenTexts(hidden_texts, (task.instruction, evidence.typed_text, evidence.files_text))
    turns: list[tuple[str, str]] = []
    report: list[Replacement] = []
    for turn in trajectory.turns:
        fields = []
        for name, text in (("command", turn.action), ("observation", turn.observation)):
            clean, removed = _clean(text, task.instruction, hidden, special_tokens)
            report += [Replacement(turn=turn.index, field=name, kind=kind, chars=chars) for kind, chars in removed]
            fields.append(clean)
        turns.append((fields[0], fields[1]))
    return PublicView(turns=tuple(turns), replacements=tuple(report))


def sanitise_trajectory(
    trajectory: Trajectory,
    task: Task,
    *,
    hidden_texts: Mapping[str, str] | None = None,
    special_tokens: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """`public_view` without its report: [(command, observation)]."""
    view = public_view(trajectory, task, hidden_texts=hidden_texts, special_tokens=special_tokens)
    return list(view.turns)


def _clean(
    text: str, public: str, hidden: HiddenTexts, special_tokens: Sequence[str]
) -> tuple[str, list[tuple[str, int]]]:
    removed: list[tuple[str, int]] = []
    passages = [
        Match(kind="hidden text", name=p.source, start=p.start, end=p.end)
        for p in hidden.passages(text, min_words=_HIDDEN_WORDS)
    ]
    found = first_of_each_place([*passages, *secrets(text, public), *hidden_paths(text, public), *blobs(text, public)])
    out: list[str] = []
    at = 0
    for match in found:
        out += [text[at : match.start], f"[{match.kind} removed]"]
        removed.append((match.kind, match.end - match.start))
        at = match.end
    clean = "".join(out) + text[at:]
    safe = neutralise(clean, special_tokens)
    if safe != clean:
        removed.append(("control token", 0))
    return safe, removed
