"""A runbook line taken apart: shell commands with the role of every literal, or prose with its code and its claims.

A reader of runbooks needs no shell grammar, only: which words are typed into the terminal, and what for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from stages.leaks.words import COMMANDS, FUNCTION_WORDS


class Role(StrEnum):
    """What a literal is there for."""

    PAYLOAD = "payload"  # text that the line writes or prints: echo X, printf X
    CREATED = "created"  # a name that comes into being: mkdir X, > X, the last word of mv and cp
    SETTING = "setting"  # a mode, an owner, an assignment, a sed replacement
    REFERENCE = "reference"  # a pattern, a path to read
    OPTION = "option"  # -n 3, -f2
    CODE = "code"  # a program in quotes
    CLAIM = "claim"  # prose that gives a value: "the answer is X", "write X into f"


PRODUCED = frozenset({Role.PAYLOAD, Role.CREATED, Role.SETTING, Role.CLAIM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    text: str  # quotes removed, printf escapes and % formats blanked
    start: int  # span in the line, quotes included
    end: int
    role: Role
    target: str = ""  # file that the text goes to, if the line says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    start: int
    end: int
    words: tuple[str, ...]  # arguments, quotes removed
    target: str = ""  # redirect


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    text: str
    is_shell: bool
    commands: tuple[Command, ...] = ()
    literals: tuple[Literal, ...] = ()


_MARK = re.compile(r"^\s*(?:[-*•]\s+|\(?\d{1,2}[.):]\s+|[a-z]\)\s+|\$\s+|#\s+(?=\w+\s+-))*")
_TOKEN = re.compile(
    r"(?P<op>\|\||&&|[|;\n]|\d?>>?&?\d?|<<<|<<-?|<|&(?!\d))|(?P<word>(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\|&;<>])+)|(?P<stray>['\"\\])"
)
_QUOTED = re.compile(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)")
_ESCAPE = re.compile(r"\\[nrt0abfv]|%%|%[-+0#\d.]*[a-zA-Z]")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_ASSIGN = re.compile(r"[A-Za-z_]\w*=")
_CODE = re.compile(r"`([^`]+)`")
_INTERPRETERS = re.compile(r"python[\d.]*|perl|ruby|node|awk|gawk|bash|sh|php|R|Rscript|jq|sqlite3|psql|mysql")
_WRAPPERS = frozenset(
    {"sudo", "env", "nohup", "time", "exec", "then", "do", "else", "if", "while", "!", "command", "timeout"}
)
_PROSE_REDIRECT = re.compile(r"\b(?:echo|printf)\s+(?P<rest>[^.]*?>>?\s*[\w./~-]+)")

_VALUE = r"[\"'“`]?(?P<value>[\w.+:/@#$%&!?*=,-]*\w[%!]?)[\"'”`]?"
_NOUN = r"(?:number|value|string|word|text|line|answer|result|name|count|total|key|digits?|character|token|flag|message|content|code|integer)s?"
_CLAIMS = (
    re.compile(
        rf"(?i)\b(?:write|put|enter|save|store|append|add|print|output|type|record|place|set|submit|insert|return|report)\s+"
        rf"(?:(?:the|a|an|only|just)\s+)*(?:{_NOUN}\s+)?{_VALUE}\s+(?:in|into|to|at|as|inside|on)\b(?:\s+(?:the\s+)?(?:file\s+)?(?P<target>[\w./~-]+))?"
    ),
    re.compile(
        rf"(?i)\b(?:answer|result|value|password|passphrase|flag|key|name|count|total|sum|number|output|secret|token|code|"
        rf"solution|content|median|mean|average|mode|maximum|minimum|winner|culprit|pin|message|word|string|text|line)s?"
        rf"(?:\s+(?:of|in|for|to|from|on)\s+(?:the\s+)?[\w./~-]+){{0,2}}\s*"
        rf"(?:is|are|=|==|:|should\s+be|must\s+be|equals|will\s+be|was|turns\s+out\s+to\s+be|comes\s+(?:out\s+)?to)\s+(?:exactly\s+|just\s+|equal\s+to\s+)?{_VALUE}"
    ),
    re.compile(
        rf"(?i)\b(?:create|make|add|mkdir|name|call|rename)\b.{{0,40}}?\b(?:named|called|name|to|as|it|them|directory|folder)\s+{_VALUE}"
    ),
    re.compile(
        rf"(?i)\b(?:use|enter|try|with)\s+(?:the\s+)?(?:password|passphrase|key|pin|token|answer|value|number)\s+{_VALUE}"
    ),
)
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")


@lru_cache(maxsize=4096)
def parse(text: str, *, shell_only: bool = False) -> Line:
    """`shell_only`: the harness types every line, so a line is a command whatever it looks like."""
    body = _MARK.match(text)
    offset = body.end() if body else 0
    if shell_only or _looks_like_shell(text[offset:]):
        commands, literals = _shell(text, offset, len(text))
        return Line(text=text, is_shell=True, commands=tuple(commands), literals=tuple(literals))
    commands, literals = [], []
    for m in _CODE.finditer(text):
        if _first_word(m.group(1)) in COMMANDS or re.search(r"[|>]", m.group(1)):
            found, values = _shell(text, m.start(1), m.end(1))
            commands += found
            literals += values
        else:
            literals.append(Literal(text=m.group(1), start=m.start(1), end=m.end(1), role=Role.REFERENCE))
    bare = _CODE.sub(lambda m: " " * len(m.group()), text)
    for m in _PROSE_REDIRECT.finditer(bare):
        found, values = _shell(text, m.start(), m.end())
        commands += found
        literals += values
    for rx in _CLAIMS:
        for m in rx.finditer(text):
            target = m.groupdict().get("target") or ""
            literals.append(
                Literal(text=m["value"], start=m.start("value"), end=m.end("value"), role=Role.CLAIM, target=target)
            )
    return Line(text=text, is_shell=False, commands=tuple(commands), literals=tuple(literals))


def _first_word(text: str) -> str:
    for word in text.split():
        if word not in _WRAPPERS and not _ASSIGN.match(word):
            return word.rsplit("/", 1)[-1]
    return ""


def _looks_like_shell(text: str) -> bool:
    """A command by its first word, unless it reads as a sentence ("find the file and sort the lines")."""
    first = _first_word(text)
    if first not in COMMANDS:
        return bool(_ASSIGN.match(text.strip())) and " " not in text.split("=", 1)[0].strip()
    words = text.split()
    if re.search(r"\s--?[a-zA-Z]|[|<>]|&&|\s['\"]|\$\(", text) and not re.search(r"[a-z]{3,}\. [A-Z]", text):
        sentence = sum(w.lower() in FUNCTION_WORDS for w in words)
        return sentence <= max(2, len(words) // 4)
    # No operator, no option: "mkdir it" is a command, "make the script executable" is not.
    if any(w.lower().strip(",.:;") in FUNCTION_WORDS - {"it", "in", "on", "at", "up", "all"} for w in words[1:]):
        return False
    return not text.rstrip().endswith((".", ":")) and len(words) <= 12


def _unquote(word: str) -> str:
    return (
        _QUOTED.sub(lambda m: next(g for g in m.groups() if g is not None), word) if set(word) & set("'\"\\") else word
    )


def _shell(text: str, start: int, end: int) -> tuple[list[Command], list[Literal]]:
    """Simple commands between operators, and the literals that they type."""
    commands: list[Command] = []
    literals: list[Literal] = []
    words: list[tuple[str, int, int]] = []
    target = ""
    target_span = (0, 0)
    expect = ""

    def flush() -> None:
        nonlocal words, target
        command = _command(words, target)
        if command:
            commands.append(command)
            literals.extend(_roles(command, words))
        if target:
            literals.append(Literal(text=target, start=target_span[0], end=target_span[1], role=Role.CREATED))
        words, target = [], ""

    for m in _TOKEN.finditer(text, start, end):
        if m["word"] is not None:
            if expect.startswith("<<<"):
                literals.append(Literal(text=_unquote(m["word"]), start=m.start(), end=m.end(), role=Role.PAYLOAD))
            elif expect and ">" in expect:
                target, target_span = _unquote(m["word"]), m.span()
            elif not expect:
                words.append((m["word"], m.start(), m.end()))
            expect = ""
        elif m["op"] is not None:
            op = m["op"]
            if ">" in op and "&" in op:
                continue  # 2>&1
            if ">" in op or "<" in op:
                expect = op
                if op.startswith("<") and not op.startswith("<<"):
                    expect = ""  # the file that is read is a reference like any other argument
                continue
            flush()
    flush()
    return commands, literals


def _command(words: list[tuple[str, int, int]], target: str) -> Command | None:
    for i, (word, start, end) in enumerate(words):
        if word in _WRAPPERS or (_ASSIGN.match(word) and len(words) > 1):
            continue
        name = _unquote(word).rsplit("/", 1)[-1]
        arguments = tuple(_unquote(w) for w, _, _ in words[i + 1 :])
        return Command(name=name, start=start, end=end, words=arguments, target=target)
    return None


def _roles(command: Command, words: list[tuple[str, int, int]]) -> list[Literal]:
    name = command.name
    arguments = [w for w in words if w[1] >= command.end]
    out = [
        Literal(text=w.split("=", 1)[1], start=s, end=e, role=Role.SETTING)
        for w, s, e in words
        if e <= command.start and _ASSIGN.match(w)
    ]
    plain = [w for w in arguments if not w[0].startswith("-")]
    after_option = ""
    for word, start, end in arguments:
        text = _unquote(word)
        role = Role.REFERENCE
        if word.startswith("-") and len(word) > 1 and name not in ("echo", "printf"):
            role = Role.OPTION
            text = text[2:] if not text.startswith("--") else text.partition("=")[2] or text  # -p1998, -f2
        elif name in ("echo", "printf"):
            text = _ESCAPE.sub(lambda m: " " * len(m.group()), _ARITHMETIC.sub(r"\1", text))
            role = Role.PAYLOAD
        elif _INTERPRETERS.fullmatch(name) and (" " in text or "(" in text):
            role = Role.CODE
        elif (
            name in ("mkdir", "touch", "tee", "useradd", "groupadd")
            or (name in ("git",) and after_option == "-m")
            or (name in ("mv", "cp", "ln", "install", "rsync") and len(plain) > 1 and start == plain[-1][1])
        ):
            role = Role.CREATED
        elif (
            (name in ("chmod", "chown", "chgrp") and plain and start == plain[0][1])
            or name
            in (
                "export",
                "set",
                "alias",
            )
            or (name == "sed" and (re.match(r"(?:\d+|\$|/[^/]*/)?\s*[sacyi]\W", text) or ";s" in text))
        ):
            role = Role.SETTING
        elif after_option in ("-n", "-c", "-f", "-d", "-k", "-t") and name in ("head", "tail", "cut", "sort", "split"):
            role = Role.OPTION
        after_option = word if word.startswith("-") else ""
        target = command.target
        if role is Role.SETTING and name in ("sed", "chmod", "chown", "chgrp") and plain:
            target = _unquote(plain[-1][0])
        out.append(Literal(text=text, start=start, end=end, role=role, target=target))
    if name not in COMMANDS and not out and not arguments and len(words) == 1 and _ASSIGN.match(words[0][0]):
        word, start, end = words[0]
        out.append(Literal(text=word.split("=", 1)[1], start=start, end=end, role=Role.SETTING))
    return out
