"""Compatibility part: the runbook fits the target harness and the public task."""

from __future__ import annotations

import re
from functools import partial

from stages.domain import Finding, LeakPart, Runbook, Severity
from stages.leaks.context import ReviewContext, finding, lines_of
from stages.leaks.evidence import atoms_of
from stages.leaks.lines import Line, Role
from stages.leaks.words import COMMANDS, INTERACTIVE, READERS, words

_find = partial(finding, LeakPart.COMPATIBILITY)

_TRANSCRIPT = re.compile(
    r"(?i)\b(?:turn|attempt|observation|episode)\s*#?\s*\d+\b|\bstep\s+\d+\s+of\s+the\s+(?:transcript|trajectory|log|attempt)"
    r"|\b(?:the|this|that|my|your|our|previous|earlier|successful|above|last)\s+(?:\w+\s+)?(?:transcript|trajectory|rollout|attempt|episode)\b"
    r"|\bas\s+(?:I|we|you|the\s+agent)\s+(?:did|saw|typed|ran|found|have\s+seen)\b|\bas\s+(?:seen|shown|done|printed)\s+(?:above|before|earlier)\b"
    r"|\b(?:the|an?)\s+(?:previous|earlier|successful|last)\s+(?:agent|run)\b|\bin\s+my\s+(?:run|session|attempt)\b"
)
_FOREIGN = (
    (
        "tool call",
        re.compile(
            r"(?i)<(?:function|tool|invoke|tool_call|function_calls?)\b|\"(?:tool|tool_name|function|arguments)\"\s*:|\bstr_replace_editor\b|\b\w+_tool\s*\("
        ),
    ),
    (
        "browser or screen",
        re.compile(
            r"(?i)\b(?:click|double-click|scroll\s+(?:up|down)|drag|hover|right-click)\b|\bopen\s+(?:a|the|your)\s+(?:web\s+)?browser\b|\btake\s+a\s+screenshot\b"
        ),
    ),
    (
        "question to a person",
        re.compile(
            r"(?i)\bask\s+(?:the\s+)?(?:user|human|person|operator|customer|admin(?:istrator)?)\b|\bwait\s+for\s+(?:the\s+)?(?:user|human|approval|confirmation)\b"
        ),
    ),
)
_KEYS = re.compile(
    r"(?i)\b(?:press|hit|type)\s+(?:ctrl|control|alt|esc(?:ape)?|enter|return|tab|the\s+arrow|[a-z]\s+to)\b|\bctrl[-+][a-z]\b|\bC-[a-z]\b|(?<!\w)\^[A-Z]\b|:wq\b|:q!"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b]")
_FILE = re.compile(r"(?<![\w/.\-*{}$])(?:\./)?[\w][\w.+-]*(?:/[\w.+-]+)*\.[A-Za-z][A-Za-z0-9]{0,5}(?![\w/*\-(])")
_EXTENSION = words("""
    txt log csv tsv json jsonl yaml yml toml conf cfg ini md html xml sh py js ts c h cpp hpp rs go java rb pl sql gz
    tar zip bak dat img lst ref pdf png jpg jpeg gif so out tex ipynb db sqlite pem key crt lock map list tmp in mp4
    wav bin patch diff
""")
_MAKES_FILE = re.compile(
    r"(?i)\b(?:create|write|save|make|produce|generate|name|call|output|store|redirect|copy|move|rename|into|to|as|download|build|compile)\b"
)
_IT = re.compile(r"(?<![\w.\-/])it(?![\w\-/])")


def empty(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """No step at all, or nothing but the word that ends an attempt."""
    texts = [line.text.strip() for line in runbook.lines if line.text.strip()]
    if not texts:
        return [_find(Severity.HARD, "empty", "has no line")]
    if all(t.lower().strip(".!`") in context.harness.done_words for t in texts):
        return [
            _find(
                Severity.HARD,
                "done-only",
                "only ends the attempt; it has no step",
                line=0,
                span=(0, len(texts[0])),
                evidence=texts[0],
            )
        ]
    return []


def size(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    rules = context.harness
    found = []
    if len(runbook.lines) > rules.max_lines:
        found.append(
            _find(
                Severity.SOFT,
                "too-many-lines",
                f"has {len(runbook.lines)} lines, the harness takes {rules.max_lines}",
                line=rules.max_lines,
            )
        )
    for number, line in enumerate(runbook.lines):
        if len(line.text) > rules.max_line_chars:
            found.append(
                _find(
                    Severity.SOFT,
                    "long-line",
                    f"line of {len(line.text)} characters, the harness takes {rules.max_line_chars}",
                    line=number,
                    span=(rules.max_line_chars, len(line.text)),
                )
            )
        m = _CONTROL.search(line.text)
        if m:
            found.append(
                _find(
                    Severity.SOFT,
                    "control-character",
                    "holds a control character",
                    line=number,
                    span=m.span(),
                    evidence=repr(m.group()),
                )
            )
    return found


def commands(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Commands and constructs that the harness does not execute."""
    rules = context.harness
    found = []
    for number, line in enumerate(lines_of(runbook, context)):
        for name, pattern in rules.forbidden.items():
            m = re.search(pattern, _unquoted(line.text)) if line.is_shell else None
            if m:
                found.append(
                    _find(
                        Severity.SOFT,
                        "forbidden",
                        f"uses a construct that the harness refuses: {name}",
                        line=number,
                        span=m.span(),
                        evidence=m.group(),
                    )
                )
        if line.text.strip().lower() in rules.done_words:
            continue
        if context.strict and not line.commands and line.text.strip():
            found.append(
                _find(
                    Severity.SOFT,
                    "not-a-command",
                    "is not a command that the harness can type",
                    line=number,
                    span=(0, len(line.text)),
                    evidence=line.text[:80],
                )
            )
        for command in line.commands if rules.allowed_commands is not None else ():
            if rules.allowed_commands is not None and command.name not in rules.allowed_commands:
                found.append(
                    _find(
                        Severity.SOFT,
                        "command",
                        f"`{command.name[:40]}` is not among the harness's commands",
                        line=number,
                        span=(command.start, command.end),
                        evidence=command.name,
                    )
                )
    return found


def interactive(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Full-screen programs, keystrokes, other tools, questions to people."""
    found = []
    for number, line in enumerate(lines_of(runbook, context)):
        for name, rx in _FOREIGN:
            m = rx.search(line.text)
            if m and not rx.search(context.task.instruction):
                found.append(
                    _find(
                        Severity.SOFT,
                        "foreign",
                        f"asks for something that this harness lacks: {name}",
                        line=number,
                        span=m.span(),
                        evidence=m.group(),
                    )
                )
        if context.harness.interactive:
            continue
        for command in line.commands:
            batch = command.name in ("vim", "vi", "nvim", "emacs") and any(
                w in ("-es", "-Es", "-c", "--batch", "-s") for w in command.words
            )
            batch = batch or (
                command.name in ("gdb", "top", "tmux", "screen", "ed")
                and any(w in ("-batch", "-b", "-d", "new-session", "-dm", "-dmS", "-s") for w in command.words)
            )
            bare = (
                command.name in ("python", "python3", "mysql", "psql", "sqlite3", "node", "irb") and not command.words
            )
            piped = len(line.commands) > 1 or "<" in line.text
            if (command.name in INTERACTIVE and not batch) or (bare and not piped):
                found.append(
                    _find(
                        Severity.SOFT,
                        "interactive",
                        f"`{command.name}` waits for keystrokes",
                        line=number,
                        span=(command.start, command.end),
                        evidence=command.name,
                    )
                )
        m = _KEYS.search(line.text) or (
            None
            if line.is_shell
            else re.search(r"(?i)\b(?:in|with|using|open|run|launch|use)\s+(?:vim?|nano|emacs|htop|less)\b", line.text)
        )
        if m and not any(f.line == number and f.rule == "compatibility.interactive" for f in found):
            found.append(
                _find(
                    Severity.SOFT,
                    "interactive",
                    "asks for keystrokes in a full-screen program",
                    line=number,
                    span=m.span(),
                    evidence=m.group(),
                )
            )
    return found


def transcript(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Mentions of the attempt that it was made from: a reader does not have it."""
    found = []
    for number, line in enumerate(runbook.lines):
        m = _TRANSCRIPT.search(line.text)
        if m and m.group().lower() not in context.task.instruction.lower():
            found.append(
                _find(
                    Severity.SOFT,
                    "transcript",
                    "refers to an attempt that the reader does not have",
                    line=number,
                    span=m.span(),
                    evidence=m.group(),
                )
            )
    return found


def unknown_file(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """Files that neither the task, nor its workspace, nor the agent, nor the runbook itself brings into being."""
    evidence, task = context.evidence, context.task
    if not task.files and context.source is None:
        return []  # the workspace is not known
    seen = evidence.names_met
    made: set[str] = set()
    parsed = lines_of(runbook, context)
    for line in parsed:
        made |= _made(line)
    found = []
    for number, line in enumerate(parsed):
        for name, start, end in _file_mentions(line):
            base = name.removeprefix("./")
            last = base.rsplit("/", 1)[-1]
            if base in made or last in made or base in seen or last in seen or last.lower() in task.instruction.lower():
                continue
            found.append(
                _find(
                    Severity.SOFT,
                    "unknown-file",
                    f"`{name[:60]}` is not in the task and nothing creates it",
                    line=number,
                    span=(start, end),
                    evidence=name,
                )
            )
    return found


def unbound_it(runbook: Runbook, context: ReviewContext) -> list[Finding]:
    """In a runbook of commands `it` stands for what was just read; here nothing was read before it."""
    if not context.strict:
        return []
    read = False
    for number, line in enumerate(lines_of(runbook, context)):
        m = _IT.search(line.text)
        if m and not read and "it" not in _named_words(context):
            return [
                _find(
                    Severity.SOFT,
                    "unbound-it",
                    "`it` is used before anything is read",
                    line=number,
                    span=m.span(),
                    evidence="it",
                )
            ]
        read = read or any(c.name in READERS for c in line.commands)
    return []


def _named_words(context: ReviewContext) -> frozenset[str]:
    return frozenset(re.findall(r"(?:text|line|word|key|named?)\s+(\w+)", context.task.instruction.lower()))


def _unquoted(text: str) -> str:
    """Single-quoted parts are literal for the shell; blanked, so that spans stay."""
    return re.sub(r"'[^']*'", lambda m: "'" + "q" * (len(m.group()) - 2) + "'", text)


def _made(line: Line) -> set[str]:
    """Names that a line brings into being."""
    names = {x.text.removeprefix("./") for x in line.literals if x.role is Role.CREATED}
    names |= {n.rsplit("/", 1)[-1] for n in names}
    for command in line.commands:
        if command.name not in READERS | {"chmod", "rm", "sed", "test"}:
            names |= {w.removeprefix("./") for w in command.words if _FILE.fullmatch(w)}
        names |= {
            w for a, w in zip(command.words, command.words[1:], strict=False) if a in ("-o", "-O", "--output", "-out")
        }
    if not line.is_shell:
        for m in _FILE.finditer(line.text):
            if _MAKES_FILE.search(line.text[max(0, m.start() - 60) : m.start()]):
                names |= {m.group().removeprefix("./"), m.group().rsplit("/", 1)[-1]}
    return names


def _file_mentions(line: Line) -> list[tuple[str, int, int]]:
    out = []
    if line.is_shell:
        for x in line.literals:
            if x.role in (Role.REFERENCE, Role.OPTION) and _FILE.fullmatch(x.text) and _named_like_file(x.text):
                out.append((x.text, x.start, x.end))
        return out
    for m in _FILE.finditer(line.text):
        if _named_like_file(m.group()):
            out.append((m.group(), m.start(), m.end()))
    return out


def _named_like_file(text: str) -> bool:
    stem, _, extension = text.rpartition(".")
    return extension.lower() in _EXTENSION and bool(stem) and not (len(atoms_of(stem)) == 1 and stem in COMMANDS)


RULES = (empty, size, commands, interactive, transcript, unknown_file, unbound_it)
