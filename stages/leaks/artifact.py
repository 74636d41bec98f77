"""Artifact part: copied outputs, hashes, blobs, answers.

A runbook may tell how a value is found, not what it was. A value is reported when the public instruction does not hold
it and the trajectory shows that it was *read* before it was typed, or when only the workspace's data or the hidden files
hold it. Numbers need more care: a small one can stand in the instruction by chance, so a written number must stand in
the sentence that names the file it is written to.
"""

from __future__ import annotations

import re
from functools import partial

from stages.domain import Finding, LeakPart, Runbook, Severity
from stages.leaks.answers import normal
from stages.leaks.context import ReviewContext, finding, lines_of
from stages.leaks.evidence import Atom, Origin, OriginKind, atoms_of
from stages.leaks.lines import PRODUCED, Line, Literal, Role
from stages.leaks.signatures import blobs, first_of_each_place
from stages.leaks.words import COMMON, COMMON_NUMBERS, NUMERALS

_find = partial(finding, LeakPart.ARTIFACT)

_CLAUSE = re.compile(r"(?<=[.!?:])\s+|\n+|;\s|\s(?:and\s+)?then\s")
_COMPUTES = re.compile(
    r"(?i)\b(?:counts?|numbers?\s+of|how\s+(?:many|much|often|long)|sums?|totals?|averages?|means?|medians?|max(?:imum|imal)?|"
    r"min(?:imum|imal)?|largest|smallest|longest|shortest|highest|lowest|most|least|sort(?:ed)?|unique|distinct|compute[sd]?|"
    r"calculate[sd]?|determine|find|figure\s+out|extract|derive|decode|decrypt|crack|recover|solve|convert|results?|which|who|"
    r"what|answer|measure|length|size)\b"
)
_SYSTEM = re.compile(r"^/(?:proc|sys|dev)/")
_SED_REPLACEMENT = re.compile(
    r"s(?P<d>[/|#,@!:])(?P<old>(?:\\.|(?!(?P=d)).)*)(?P=d)(?P<new>(?:\\.|(?!(?P=d)).)*)(?P=d)"
)
_BARE_NUMBER = re.compile(r"(?<![\w./:])(?<!\w-)(?:\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)(?![\w\-/:]|\.\d)")
_BARE_NAME = re.compile(r"(?<![\w./@-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z\d]+(?:[-_][A-Za-z\d]+)*(?![\w/@-]|\.\w)")
_MODE = re.compile(r"[0-7]{3,4}|[ugoa]*[-+=][rwxXst]*(?:,[ugoa]*[-+=][rwxXst]*)*")
_GIT_SHA = re.compile(r"(?<![\w/.\-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,11}(?![\w.])")


def blob(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Hashes, identifiers, base64, escaped bytes: copied, since nobody types them from understanding."""
    found = []
    for number, line in enumerate(runbook.lines):
        matches = [(m.start, m.end, m.kind) for m in first_of_each_place(blobs(line.text, context.task.instruction))]
        matches += [
            (m.start(), m.end(), "hash")
            for m in _GIT_SHA.finditer(line.text)
            if m.group() not in context.task.instruction and _whence(m.group(), context)
        ]
        for start, end, kind in matches:
            text = line.text[start:end]
            found.append(
                _find(
                    Severity.SOFT,
                    "blob",
                    f"holds a {kind} that the task does not give; say how it is obtained",
                    line=number,
                    span=(start, end),
                    evidence=text[:80],
                    source=_whence(text, context),
                )
            )
    return found


def copied_output(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """A run of words out of an observation."""
    found = []
    for number, line in enumerate(runbook.lines):
        for p in context.evidence.copied(line.text):
            found.append(
                _find(
                    Severity.SOFT,
                    "copied-output",
                    f"repeats the output of {p.source}; say what to look for, not what was seen",
                    line=number,
                    span=(p.start, p.end),
                    evidence=p.text,
                    source=p.source,
                )
            )
    return found


def read_value(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """A name, number or string that had to be read, written down as if it were known."""
    found = []
    for number, line in enumerate(lines_of(runbook, context)):
        seen: set[str] = set()
        for literal in line.literals:
            for atom in atoms_of(literal.text):
                if atom.text in seen:
                    continue
                origin = context.evidence.origin(atom.text)
                if _is_leak(atom, literal, origin, context):
                    seen.add(atom.text)
                    found.append(_value_finding(number, line, literal, atom, origin))
        found += _bare_values(number, line, seen, context)
    return found


def answer(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """What the agent wrote as its result, or what the judge and the screen both name, anywhere in a line."""
    found = []
    for number, line in enumerate(runbook.lines):
        text = normal(line.text)
        for value, place in context.evidence.answers:
            m = re.search(rf"(?<![\w.]){re.escape(value)}(?!\w)", text) if value in text else None
            if m is None or _is_ordinary(value, context):
                continue
            at = line.text.lower().find(value)
            span = (at, at + len(value)) if at >= 0 else (0, len(line.text))
            found.append(
                _find(
                    Severity.SOFT,
                    "answer",
                    "gives the result itself; say how it is found",
                    line=number,
                    span=span,
                    evidence=line.text[span[0] : span[1]],
                    source=place,
                )
            )
            break
    return found


def _is_ordinary(value: str, context: ReviewContext) -> bool:
    """Every part is public or everyday: the agent wrote it from understanding, not from reading."""
    return all(
        context.evidence.is_public(a.text) or a.text in COMMON or (a.is_number and a.text in COMMON_NUMBERS)
        for a in atoms_of(value)
    )


def hard_coded_answer(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """A result that the task asks to compute, written as a literal."""
    found = []
    clauses = _clauses(context)
    for number, line in enumerate(lines_of(runbook, context)):
        for literal in line.literals:
            for start, end, text in _written(literal):
                reason = _unexplained(text, literal, clauses, context)
                if reason is None:
                    continue
                source = next((o.place for a in atoms_of(text) if (o := _deep_origin(a, context)).place), "")
                found.append(
                    _find(
                        Severity.SOFT,
                        "hard-coded-answer",
                        reason,
                        line=number,
                        span=(start, end),
                        evidence=text.strip()[:80],
                        source=source or "instruction",
                    )
                )
    return found


def unexplained_number(literal: Literal, context: ReviewContext) -> str | None:
    """Why a written number cannot come from the instruction; None if it can, or if it is no number."""
    if not literal.text.strip().strip("'\"").replace(".", "").isdigit():
        return None
    return _unexplained(literal.text, literal, _clauses(context), context)


def _clauses(context: ReviewContext) -> list[str]:
    return [c for c in _CLAUSE.split(context.task.instruction) if c.strip()]


# ------------------------------------------------------------------------------------------------- one value's judgement


def _is_leak(atom: Atom, literal: Literal, origin: Origin, context: ReviewContext) -> bool:
    produced = literal.role in PRODUCED
    if origin.kind in (OriginKind.PUBLIC, OriginKind.COMMON, OriginKind.UNKNOWN):
        return False
    if origin.common and not (produced and origin.lone and literal.text.strip().lower() == atom.text):
        return False
    if atom.is_number:
        return _is_number_leak(atom, literal, origin)
    if len(atom.text) < 2 or (atom.text in COMMON and not origin.lone):
        return False
    if origin.kind is OriginKind.OWN:
        return False
    if origin.kind is OriginKind.HIDDEN:  # never seen by the agent, yet in the tests or the solution
        return literal.role in (Role.PAYLOAD, Role.CREATED, Role.CLAIM) or (context.strict and len(atom.text) > 2)
    existing = atom.text in context.evidence.listed
    if origin.kind is OriginKind.FILE and origin.place == "workspace":
        return False  # the name of a workspace file
    if existing and not origin.lone:
        return literal.role in (Role.PAYLOAD, Role.CLAIM) and not context.strict
    if produced or origin.lone:
        return True
    return context.strict


def _is_number_leak(atom: Atom, literal: Literal, origin: Origin) -> bool:
    digits = atom.text.replace(".", "").replace(":", "")
    if literal.role is Role.OPTION:
        return origin.lone and origin.kind is OriginKind.READ
    if atom.text.count(".") > 1 or ":" in atom.text:
        return False  # versions, addresses and clock times are facts of the environment
    if origin.kind is OriginKind.READ and origin.lone:
        return literal.role in PRODUCED or len(digits) >= 3
    if literal.role is Role.SETTING:
        return origin.kind in (OriginKind.READ, OriginKind.FILE) and len(digits) >= 2
    if literal.role in (Role.PAYLOAD, Role.CLAIM):
        return origin.kind is not OriginKind.OWN and len(digits) >= 2
    return origin.kind is OriginKind.READ and len(digits) >= 5


def _bare_values(number: int, line: Line, seen: set[str], context: ReviewContext) -> list[Finding]:
    """Numbers and identifiers outside literals, in prose and in code, that only observations or hidden files hold."""
    found = []
    for rx in (_BARE_NUMBER,) if line.is_shell else (_BARE_NUMBER, _BARE_NAME):
        for m in rx.finditer(line.text):
            if any(x.start <= m.start() < x.end and x.role in (Role.OPTION, Role.REFERENCE) for x in line.literals):
                continue
            for atom in atoms_of(m.group()):
                if atom.text in seen or not any(c.isdigit() for c in atom.text):
                    continue
                origin = context.evidence.origin(atom.text)
                if not (_telling_number if rx is _BARE_NUMBER else _telling_name)(atom, origin, context):
                    continue
                seen.add(atom.text)
                literal = Literal(text=m.group(), start=m.start(), end=m.end(), role=Role.CLAIM)
                found.append(_value_finding(number, line, literal, atom, origin))
                break
    return found


def _telling_number(atom: Atom, origin: Origin, context: ReviewContext) -> bool:
    digits = len(atom.text.replace(".", ""))
    if origin.kind not in (OriginKind.READ, OriginKind.HIDDEN) or digits < 2:
        return False
    if origin.lone and atom.text not in COMMON_NUMBERS and context.evidence.hidden_place(atom.text):
        return True  # shown as a result, and asked for by the judge
    if atom.text in COMMON_NUMBERS or digits < 3:
        return False
    return digits >= 4 or origin.lone or "." in atom.text


def _telling_name(atom: Atom, origin: Origin, context: ReviewContext) -> bool:
    """An identifier such as u_4417 that was on a line of its own; names of files are facts of the environment."""
    return origin.kind is OriginKind.READ and origin.lone and atom.text not in context.evidence.listed


def _value_finding(number: int, line: Line, literal: Literal, atom: Atom, origin: Origin) -> Finding:
    at = line.text.lower().find(atom.text, literal.start)
    start, end = (at, at + len(atom.text)) if 0 <= at < literal.end else (literal.start, literal.end)
    if origin.kind is OriginKind.HIDDEN:
        # The agent never met it: it can only come from the judge or the solution.
        hard = len(atom.text) >= 4
        return _find(
            Severity.HARD if hard else Severity.SOFT,
            "hidden-answer",
            "holds a value that neither the task nor the trajectory shows",
            line=number,
            span=(start, end),
            evidence=line.text[start:end],
            source=origin.place,
        )
    return _find(
        Severity.SOFT,
        "read-value",
        f"holds a value that must be read ({origin.place}); tell how to read it and call it `it`",
        line=number,
        span=(start, end),
        evidence=line.text[start:end],
        source=origin.place,
    )


# ---------------------------------------------------------------------------------------------------- written results


def _written(literal: Literal) -> list[tuple[int, int, str]]:
    """The parts of a literal that end up in a file or in an answer."""
    if literal.role in (Role.PAYLOAD, Role.CLAIM):
        return [(literal.start, literal.end, literal.text)]
    if literal.role is Role.SETTING and _MODE.fullmatch(literal.text):
        return [(literal.start, literal.end, literal.text)]
    if literal.role is Role.SETTING and literal.target:
        return [
            (literal.start, literal.end, m["new"].rsplit("=", 1)[-1]) for m in _SED_REPLACEMENT.finditer(literal.text)
        ]
    return []


def _unexplained(text: str, literal: Literal, clauses: list[str], context: ReviewContext) -> str | None:
    """Why this written text cannot come from the instruction; None if it can, or if that is not known."""
    value = text.strip().strip("'\"").lower()
    value = NUMERALS.get(value, value)
    if not value or (literal.target and _SYSTEM.match(literal.target)):
        return None
    numeric = bool(re.fullmatch(r"[\d\s.,+*/%()-]*\d[\d\s.,+*/%()-]*", value))
    named = [c for c in clauses if literal.target and literal.target.rsplit("/", 1)[-1].lower() in c.lower()]
    computed = [c for c in named if _COMPUTES.search(c) or _names_another_file(c, literal.target, context)]
    atoms = {a.text for a in atoms_of(value)}
    if literal.role is Role.SETTING and _MODE.fullmatch(value) and not numeric:
        flows = any(_names_another_file(c, literal.target, context) for c in named)
        return f"sets a mode on {literal.target} that another file must give" if flows else None
    if not atoms:
        return None
    if numeric:
        if literal.role is Role.SETTING and not computed:
            return None
        if literal.role is Role.CLAIM and not literal.target and not _COMPUTES.search(context.task.instruction):
            return None
        public = context.evidence.public
        if any(atoms <= _numbers(c) for c in named):
            strong = any(re.search(r"(?i)\b(?:count|number of|how many)\b", c) for c in computed)
            return "writes a number that the task asks to count" if strong and literal.role is Role.PAYLOAD else None
        if computed:
            return f"gives {literal.target} a number that the task asks to find or to compute"
        if literal.role is Role.CLAIM and atoms <= {*COMMON_NUMBERS} and not literal.target:
            return None
        return None if atoms <= public else "writes a number that the instruction does not give"
    if literal.role is Role.PAYLOAD and literal.target and computed and len(atoms) <= 3 and len(computed) == len(named):
        words = {a.text for c in named for a in atoms_of(c)}
        everywhere = context.evidence.public
        if not atoms & words and not atoms <= everywhere and not re.search(r"[$`(]", text):
            return f"writes a fixed text into {literal.target}, which the task asks to compute"
    return None


def _names_another_file(clause: str, target: str, context: ReviewContext) -> bool:
    """The sentence that names the target also names an input of the workspace: the value flows from there."""
    name = target.rsplit("/", 1)[-1]
    return any(f.rsplit("/", 1)[-1] != name and f.rsplit("/", 1)[-1] in clause for f in context.task.files)


def _numbers(clause: str) -> set[str]:
    found = set()
    for atom in atoms_of(clause):
        found.add(atom.text)
        if atom.text in NUMERALS:
            found.add(NUMERALS[atom.text])
    return found


def _deep_origin(atom: Atom, context: ReviewContext) -> Origin:
    origin = context.evidence.origin(atom.text)
    if origin.kind in (OriginKind.COMMON, OriginKind.UNKNOWN, OriginKind.PUBLIC):
        place = context.evidence.hidden_place(atom.text)
        return Origin(kind=OriginKind.HIDDEN, place=place) if place else Origin(kind=origin.kind)
    return origin


def _whence(text: str, context: ReviewContext) -> str:
    """Where machine text was seen: a turn, a workspace file or a hidden file."""
    for turn in context.source.turns if context.source else ():
        if text in turn.observation:
            return f"turn {turn.index}"
    for path, content in context.task.files.items():
        if text.encode() in content:
            return path
    return next((name for name, body in context.hidden_texts.items() if text in body), "")


RULES = (blob, copied_output, read_value, answer, hard_coded_answer)
