"""Pattern part: text that betrays the verifier, the reference solution, hidden files, expected outputs or secrets."""

from __future__ import annotations

import re
from functools import partial

from stages.domain import Finding, LeakPart, Runbook, Severity
from stages.leaks.context import ReviewContext, finding
from stages.leaks.signatures import first_of_each_place, hidden_paths, secrets

_find = partial(finding, LeakPart.PATTERN)

# Prose about the judge. Each is excused where the public instruction speaks in the same way.
_TALK = (
    (
        "verifier",
        re.compile(
            r"(?i)\b(?:(?:hidden|secret|private|unseen|held[- ]out)\s+(?:unit\s+)?(?:test|check|case|assertion)s?"
            r"|(?:the\s+)?(?:verifier|grader|autograder|grading\s+script|evaluat(?:or|ion\s+script)|judge|checker(?:\s+script)?|test\s+harness))\b"
        ),
    ),
    (
        "test-expectation",
        re.compile(
            r"(?i)\b(?:tests?|test\s+(?:suite|script|case)s?|checks?|assertions?|pytest)\s+(?:only\s+|also\s+|just\s+|will\s+|merely\s+)*"
            r"(?:expects?|asserts?|compares?|looks?\s+(?:for|at)|wants?|greps?|requires?|verif(?:y|ies)|checks?\s+(?:that|for|if|whether|only)|accepts?|tolerates?)\b"
        ),
    ),
    (
        "please-the-test",
        re.compile(
            r"(?i)\b(?:to|so\s+that|in\s+order\s+to|will|which)\s+(?:\w+\s+){0,3}?(?:pass(?:es)?|satisf(?:y|ies)|fool|trick|bypass|please)\s+(?:all\s+|every\s+)?(?:the\s+)?(?:\w+\s+)?(?:tests?|checks?|assertions?|verification)\b"
        ),
    ),
    (
        "reference-solution",
        re.compile(
            r"(?i)\b(?:reference|official|oracle|golden?|intended|model|sample)\s+(?:solution|answer|implementation|patch|output)s?\b"
        ),
    ),
    (
        "expected-output",
        re.compile(
            r"(?i)\bexpected\s+(?:output|answer|result|value|content|count|hash|checksum)s?\s*(?:is|are|=|:|of|equals?)"
        ),
    ),
    ("reward", re.compile(r"(?i)\b(?:reward|score)\s+(?:file|of\s+1|=\s*1)\b|\bfull\s+(?:reward|marks|score)\b")),
)
_TEST_ID = re.compile(r"\btest_\w{3,}|(?<![\w\-])\w+(?:-\w+){2,}(?![\w\-])")  # test_empty_input, 1-first-lines


def secret(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Keys, tokens and passwords that the public instruction does not itself give."""
    found = []
    for number, line in enumerate(runbook.lines):
        for m in first_of_each_place(secrets(line.text, context.task.instruction)):
            text = line.text[m.start : m.end]
            turn = _where_seen(text, context)
            found.append(
                _find(
                    Severity.HARD,
                    "secret",
                    f"holds a secret ({m.name}); name where it is found, never the value",
                    line=number,
                    span=(m.start, m.end),
                    evidence=text[:4] + "…",  # a finding is stored and shown: it must not spread the secret
                    source=turn,
                )
            )
    return found


def hidden_path(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Places of the verifier, the solution or the reward; names of this task's own hidden files."""
    public = "\n".join((context.task.instruction, *context.task.files))
    evidence = context.evidence
    found = []
    for number, line in enumerate(runbook.lines):
        matches = [(m.start, m.end, "") for m in hidden_paths(line.text, public) if not evidence.made_by_agent(m.name)]
        for name, rx in evidence.hidden_names:
            matches += [(m.start(), m.end(), name) for m in rx.finditer(line.text)]
        at = -1
        for start, end, name in sorted(matches):
            if start < at:
                continue
            at = end
            found.append(
                _find(
                    Severity.HARD,
                    "hidden-path",
                    "names a hidden place (tests, solution, reward or verifier); an agent never has it",
                    line=number,
                    span=(start, end),
                    evidence=line.text[start:end],
                    source=name or "known hidden places",
                )
            )
    return found


def verifier_talk(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Prose about what the judge expects, unless the public instruction talks so itself."""
    found = []
    for number, line in enumerate(runbook.lines):
        for name, rx in _TALK:
            m = rx.search(line.text)
            if m and not rx.search(context.task.instruction):
                found.append(
                    _find(
                        Severity.SOFT,
                        "verifier-talk",
                        f"speaks about how the work is judged ({name}), which the public task does not",
                        line=number,
                        span=m.span(),
                        evidence=m.group(),
                    )
                )
                break
    return found


def hidden_text(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Runs of words of the tests or the solution that nothing visible explains, and the names of hidden tests."""
    evidence = context.evidence
    found = []
    for number, line in enumerate(runbook.lines):
        spans: list[tuple[int, int]] = []
        for p in evidence.hidden_passages.passages(line.text):
            kind = "the reference solution" if p.source.startswith("solution") else "the verifier"
            spans.append((p.start, p.end))
            found.append(
                _find(
                    Severity.HARD,
                    "hidden-text",
                    f"repeats text of {kind} that neither the task nor the trajectory shows",
                    line=number,
                    span=(p.start, p.end),
                    evidence=p.text,
                    source=p.source,
                )
            )
        for check in evidence.check_ids:
            at = line.text.find(check)
            if at >= 0 and not any(s <= at < e for s, e in spans):
                spans.append((at, at + len(check)))
                found.append(
                    _find(
                        Severity.HARD,
                        "test-name",
                        "names a hidden check",
                        line=number,
                        span=spans[-1],
                        evidence=check,
                        source="checks",
                    )
                )
        for m in _TEST_ID.finditer(line.text):
            place = evidence.hidden_place(m.group().lower())
            inside = any(s <= m.start() < e for s, e in spans)
            if place and not inside and m.group().lower() not in evidence.visible_lower:
                found.append(
                    _find(
                        Severity.HARD,
                        "test-name",
                        "names a hidden test",
                        line=number,
                        span=m.span(),
                        evidence=m.group(),
                        source=place,
                    )
                )
    return found


def control_token(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Text in the shape of a model's control token: it could steer the reader."""
    found = []
    for number, line in enumerate(runbook.lines):
        for m in re.finditer(
            r"<\|[^\s|]{1,40}\|>|</?(?:think|tool_call|tool_response|s)>|\[/?INST\]|<(?:start|end)_of_turn>", line.text
        ):
            if m.group() not in context.task.instruction:
                found.append(
                    _find(
                        Severity.HARD,
                        "control-token",
                        "holds a control token",
                        line=number,
                        span=m.span(),
                        evidence=m.group(),
                    )
                )
    return found


def _where_seen(text: str, context: ReviewContext) -> str:
    for turn in context.source.turns if context.source else ():
        if text in turn.observation or text in turn.action:
            return f"turn {turn.index}"
    return next((name for name, body in context.hidden_texts.items() if text in body), "")


RULES = (secret, hidden_path, verifier_talk, hidden_text, control_token)
