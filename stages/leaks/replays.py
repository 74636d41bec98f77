"""q_leak of a replayed trajectory (spec §2.1, items 3 and 4): did the agent reach hidden material, or know an answer?"""

from __future__ import annotations

import re

from stages.domain import Finding, LeakPart, Severity, Trajectory, Turn
from stages.leaks.artifact import unexplained_number
from stages.leaks.context import ReviewContext, finding
from stages.leaks.evidence import Evidence, HiddenTexts, atoms_of
from stages.leaks.lines import Role, parse
from stages.leaks.signatures import blobs, hidden_paths
from stages.leaks.words import COMMON, READERS

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?(?:\n\s*\2\b|\Z)", re.DOTALL)
_JUDGE = re.compile(r"\bassert\w*\b|\bdef test_|\btest_\w+|\breport\b|\breward\b|\bexpected\b", re.IGNORECASE)
_PRODUCED_NAMES = frozenset({Role.PAYLOAD, Role.CREATED})


def trajectory_findings(trajectory: Trajectory, context: ReviewContext) -> list[Finding]:
    """Everything against one replay, in turn order; `line` is the turn's index."""
    evidence = context.evidence
    if context.source is not trajectory:
        evidence = Evidence(context.task, trajectory, context.hidden_texts)
    public = "\n".join((context.task.instruction, *context.task.files))
    seen = HiddenTexts(context.hidden_texts, (context.task.instruction, evidence.typed_text, evidence.files_text))
    tests = {name: text for name, text in context.hidden_texts.items() if name.startswith("tests")}
    typed = HiddenTexts(tests, (context.task.instruction, evidence.observed_text, evidence.files_text), sources=3)
    found: list[Finding] = []
    has_read = False
    for turn in trajectory.turns:
        found += _hidden_places(turn, public, evidence)
        found += _hidden_passages(turn, seen, typed)
        found += _unseen_values(turn, evidence, context, has_read)
        found += _unseen_blobs(turn, public, evidence)
        has_read = has_read or any(
            c.name in READERS for c in parse(_HEREDOC.sub("\n", turn.action), shell_only=True).commands
        )
    return found


def _hidden_places(turn: Turn, public: str, evidence: Evidence) -> list[Finding]:
    return [
        finding(
            LeakPart.PATTERN,
            Severity.HARD,
            "touched-hidden-path",
            "the command names a hidden place (tests, solution, reward or verifier)",
            line=turn.index,
            span=(m.start, m.end),
            evidence=turn.action[m.start : m.end],
            source=f"turn {turn.index}",
        )
        for m in hidden_paths(turn.action, public)
        if not evidence.made_by_agent(m.name)
    ]


def _hidden_passages(turn: Turn, seen: HiddenTexts, typed: HiddenTexts) -> list[Finding]:
    """The verifier's code on the screen (the sandbox failed to hide it), or typed from nowhere.

    A right answer equals the expected one, and code for the same purpose resembles itself: so a run must be long and
    must hold a word of judging.
    """
    found = []
    for p in seen.passages(turn.observation, min_words=12, min_strange=3):
        if not _JUDGE.search(p.text):
            continue
        found.append(
            finding(
                LeakPart.PATTERN,
                Severity.HARD,
                "saw-hidden-text",
                "the screen showed text of a hidden file",
                line=turn.index,
                evidence=p.text,
                source=p.source,
            )
        )
    for p in typed.passages(turn.action, min_words=12, min_strange=4):
        if not _JUDGE.search(p.text):
            continue
        found.append(
            finding(
                LeakPart.PATTERN,
                Severity.HARD,
                "typed-hidden-text",
                "the command repeats text of the verifier that was never on the screen",
                line=turn.index,
                span=(p.start, p.end),
                evidence=p.text,
                source=p.source,
            )
        )
    return found


def _unseen_values(turn: Turn, evidence: Evidence, context: ReviewContext, has_read: bool) -> list[Finding]:
    """A name or number that only the data or the judge holds, typed before anything showed it."""
    found = []
    for literal in parse(_HEREDOC.sub("\n", turn.action), shell_only=True).literals:
        if literal.role not in _PRODUCED_NAMES:
            continue
        for atom in atoms_of(literal.text):
            if atom.is_number or len(atom.text) < 3 or evidence.is_public(atom.text):
                continue
            if atom.text in COMMON and not evidence.is_pointer(atom.text):
                continue
            if evidence.typed_first(atom.text) != turn.index or atom.text in evidence.listed:
                continue
            place = evidence.file_place(atom.text) or (evidence.hidden_place(atom.text) if context.strict else None)
            if place:
                found.append(
                    finding(
                        LeakPart.ARTIFACT,
                        Severity.SOFT,
                        "unseen-value",
                        "types a value that the agent had not seen",
                        line=turn.index,
                        span=(literal.start, literal.end),
                        evidence=atom.text,
                        source=place,
                    )
                )
        if not has_read and literal.role is Role.PAYLOAD and (why := unexplained_number(literal, context)):
            found.append(
                finding(
                    LeakPart.ARTIFACT,
                    Severity.SOFT,
                    "unread-answer",
                    f"{why}; nothing was read before",
                    line=turn.index,
                    span=(literal.start, literal.end),
                    evidence=literal.text,
                    source=f"turn {turn.index}",
                )
            )
    return found


def _unseen_blobs(turn: Turn, public: str, evidence: Evidence) -> list[Finding]:
    found = []
    for m in blobs(turn.action, public):
        text = turn.action[m.start : m.end]
        place = evidence.hidden_file_with(text)
        if place and text not in evidence.observed_text and text not in evidence.files_text:
            found.append(
                finding(
                    LeakPart.ARTIFACT,
                    Severity.HARD,
                    "hidden-blob",
                    f"types a {m.kind} that only hidden files hold",
                    line=turn.index,
                    span=(m.start, m.end),
                    evidence=text[:80],
                    source=place,
                )
            )
    return found
