"""Replies of the Terminus-2 protocol: one JSON object with analysis, plan, commands and task_complete.

Tolerant as Harbor's parser is: text around the object, a reply whose last braces are missing and wrong durations are
warnings; what cannot be understood is an error. Both are told to the model. Total: any text gives a result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

REQUIRED = ("analysis", "plan", "commands")
DEFAULT_S, LONGEST_S = 1.0, 60.0  # waits after keystrokes
_UNTYPABLE = re.compile("[\x00\ud800-\udfff]")  # a terminal cannot be sent these
_QUOTED = 200  # characters of a broken reply that the error repeats
_TOLD = 20  # warnings; a reply with thousands of commands could fill the context with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """One entry of `commands`."""

    keystrokes: str
    duration_s: float = DEFAULT_S  # 0 to 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """`error` not empty: nothing of the reply is done."""

    commands: tuple[Keys, ...] = ()
    task_complete: bool = False
    error: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def feedback(self) -> str:
        """What the model is told about its reply; empty when it was flawless."""
        lines = [f"ERROR: {self.error}"] if self.error else []
        if self.warnings:
            told = [f"- {w[:_QUOTED]}" for w in self.warnings[:_TOLD]]
            if more := len(self.warnings) - len(told):
                told.append(f"- and {more} more")
            lines.append("WARNINGS: " + "\n".join(told))
        return "\n".join(lines)


def parse_reply(reply: str) -> Parsed:
    """The commands of a reply. When it is broken, repairs are tried in order and the first that works is a warning."""
    first = _parse(reply)
    if not first.error:
        return first
    for name, text in _repairs(reply):
        repaired = _parse(text)
        if not repaired.error:
            return replace(
                repaired, warnings=(f"AUTO-CORRECTED: {name} - please fix this in future responses", *repaired.warnings)
            )
    return first


def _repairs(reply: str) -> Iterator[tuple[str, str]]:
    ending = _missing_end(reply)
    if ending:
        yield "Fixed incomplete JSON by adding missing closing brackets", reply.rstrip().rstrip(",") + ending
    for found in _objects(reply):
        yield "Extracted JSON from mixed content", found


def _parse(text: str) -> Parsed:
    start, end = _span(text)
    if end <= start:
        return Parsed(error="No valid JSON found in response", warnings=("No valid JSON object found",))
    warnings = []
    if text[:start].strip():
        warnings.append("Extra text detected before JSON object")
    if text[end:].strip():
        warnings.append("Extra text detected after JSON object")
    data, problem = _load(text[start:end])
    if problem:
        return Parsed(error=problem, warnings=tuple(warnings))
    return _check(data, warnings)


def _load(text: str) -> tuple[dict[str, Any], str]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = repr(text) if len(text) < _QUOTED else f"{text[:100]!r}..."
        return {}, f"Invalid JSON: {error} | Content: {shown}"
    return (data, "") if isinstance(data, dict) else ({}, "Response must be a JSON object")


def _check(data: dict[str, Any], warnings: list[str]) -> Parsed:
    missing = [name for name in REQUIRED if name not in data]
    if missing:
        return Parsed(error=f"Missing required fields: {', '.join(missing)}", warnings=tuple(warnings))
    warnings += [f"Field '{n}' should be a string" for n in ("analysis", "plan") if not isinstance(data[n], str)]
    order = [name for name in data if name in REQUIRED]
    if order != list(REQUIRED):
        warnings.append(f"Fields appear in wrong order. Found: {' → '.join(order)}, expected: {' → '.join(REQUIRED)}")
    complete = data.get("task_complete", False)
    if isinstance(complete, str):
        complete = complete.strip().lower() in ("true", "1", "yes")
    elif not isinstance(complete, bool | None):
        warnings.append("Field 'task_complete' should be a boolean or string")
    complete = bool(complete)
    commands, error = _commands(data["commands"], warnings)
    if error and complete:  # the agent is done, so what it cannot type does not matter
        warnings.append(error)
        error = ""
    return Parsed(
        commands=() if error else commands,
        task_complete=complete and not error,
        error=error,
        warnings=tuple(warnings),
    )


def _commands(rows: Any, warnings: list[str]) -> tuple[tuple[Keys, ...], str]:
    if not isinstance(rows, list):
        return (), "Field 'commands' must be an array"
    out: list[Keys] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            return (), f"Command {number} must be an object"
        if "keystrokes" not in row:
            return (), f"Command {number} missing required 'keystrokes' field"
        keystrokes = row["keystrokes"]
        if not isinstance(keystrokes, str):
            return (), f"Command {number} 'keystrokes' must be a string"
        if _UNTYPABLE.search(keystrokes):
            warnings.append(f"Command {number}: characters that cannot be typed were left out")
            keystrokes = _UNTYPABLE.sub("", keystrokes)
        if unknown := [str(key) for key in row if key not in ("keystrokes", "duration")]:
            warnings.append(f"Command {number}: Unknown fields: {', '.join(unknown)}")
        if number < len(rows) and keystrokes and not keystrokes.endswith("\n"):
            warnings.append(
                f"Command {number} should end with newline when followed by another command. Otherwise the two commands "
                "will be concatenated together on the same line."
            )
        out.append(Keys(keystrokes=keystrokes, duration_s=_duration(row, number, warnings)))
    return tuple(out), ""


def _duration(row: dict[str, Any], number: int, warnings: list[str]) -> float:
    if "duration" not in row:
        warnings.append(f"Command {number}: Missing duration field, using default {DEFAULT_S}")
        return DEFAULT_S
    value = row["duration"]
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or value != value
    ):  # NaN; math.isnan fails on a huge integer
        warnings.append(f"Command {number}: Invalid duration value, using default {DEFAULT_S}")
        return DEFAULT_S
    return float(min(max(value, 0), LONGEST_S))


# --------------------------------------------------------------------------- finding the object


def _span(text: str) -> tuple[int, int]:
    """[start, end) of the first balanced {…} outside strings; (0, 0) when there is none."""
    start, depth = -1, 0
    for at, char in _structure(text):
        if char == "{":
            start = at if depth == 0 else start
            depth += 1
        elif char == "}" and depth > 0:
            depth -= 1
            if depth == 0:
                return start, at + 1
    return 0, 0


def _missing_end(text: str) -> str:
    """The brackets that a reply lacks at its end; none for one that ends in a string: half a command is not what was meant."""
    open_: list[str] = []
    in_string = escaped = False
    for char in text[text.find("{") :] if "{" in text else "":
        if in_string:
            in_string, escaped = (char != '"' or escaped), (char == "\\" and not escaped)
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_.append("}" if char == "{" else "]")
        elif char in "}]" and open_:
            open_.pop()
    return "" if in_string else "".join(reversed(open_))


def _structure(text: str) -> Iterator[tuple[int, str]]:
    """Characters outside strings, with their places. A quote before the first brace is prose, not a string."""
    in_string = escaped = False
    for at, char in enumerate(text[text.find("{") :] if "{" in text else "", text.find("{")):
        if in_string:
            in_string, escaped = (char != '"' or escaped), (char == "\\" and not escaped)
        elif char == '"':
            in_string = True
        else:
            yield at, char


def _objects(text: str) -> Iterator[str]:
    """JSON objects at any brace of a reply, the first few."""
    decoder = json.JSONDecoder()
    for match in list(re.finditer(r"\{", text))[:50]:
        try:
            _, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        yield text[match.start() : end]
