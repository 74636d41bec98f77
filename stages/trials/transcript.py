"""What the agent did: ATIF trajectories 1.0-1.8, and plain chat messages as several agents write them.

A transcript is for reading. One that cannot be read costs its turns, never the trial's verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stages.domain import Turn
from stages.errors import TrialError
from stages.trials.files import read_json

FIRST = "agent/trajectory.json"
LIMIT = 32 << 20
TEXT_CHARS = 1 << 16  # of one action or observation; what is beyond is counted
PARTS = 100  # continuation files of one attempt
VERSION = re.compile(r"ATIF-v1\.(\d{1,3})")
NEWEST = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.json")
COMMANDS = ("command", "keystrokes", "cmd", "code")  # arguments that are the command itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    format: str  # "ATIF-v1.6", "messages", or "" when there is none
    turns: tuple[Turn, ...] = ()
    output_tokens: int | None = None  # None: not said


def read_transcript(trial: Path) -> Transcript:
    """A trial's transcript with its continuations (`continued_trajectory_ref`), each a segment of its own.

    Raises TrialError naming the file when it cannot be read or is in an unknown format.
    """
    name, seen = FIRST, list[str]()
    turns: list[Turn] = []
    tokens: list[int | None] = []
    kind = ""
    while name:
        if name in seen or len(seen) == PARTS:
            raise TrialError(f"{trial / name}: the continuations never end")
        seen.append(name)
        document = read_json(trial, name, LIMIT)
        if document is None:
            if name == FIRST:
                return Transcript(format="")
            raise TrialError(f"{trial / name} is missing; {seen[-2]} says that it continues there")
        part = parse_transcript(document, str(trial / name), segment=len(seen) - 1, first=len(turns))
        turns += part.turns
        tokens.append(part.output_tokens)
        kind = kind or part.format
        following = document.get("continued_trajectory_ref") if isinstance(document, dict) else None
        name = _continuation(following, trial / name)
    known = [t for t in tokens if t is not None]
    return Transcript(format=kind, turns=tuple(turns), output_tokens=sum(known) if len(known) == len(tokens) else None)


def _continuation(reference: Any, where: Path) -> str:
    if reference is None:
        return ""
    if not isinstance(reference, str) or not NAME.fullmatch(Path(reference).name) or "/" in reference.strip("./"):
        raise TrialError(f"{where} continues in {reference!r}, which is no file beside it")
    return f"agent/{Path(reference).name}"


def parse_transcript(document: Any, where: str, *, segment: int = 0, first: int = 0) -> Transcript:
    """Turns of one document, numbered from `first`. Raises TrialError for an unknown format."""
    if isinstance(document, dict) and "schema_version" in document:
        return _atif(document, where, segment, first)
    messages = document.get("messages") if isinstance(document, dict) else document
    if isinstance(messages, list) and messages and all(isinstance(x, dict) and "role" in x for x in messages):
        return _messages(messages, segment, first)
    raise TrialError(f"{where} is neither an ATIF trajectory nor a list of chat messages")


# ------------------------------------------------------------------------------------------------ ATIF


def _atif(document: Mapping[str, Any], where: str, segment: int, first: int) -> Transcript:
    version = document["schema_version"]
    found = VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None or int(found[1]) > NEWEST:
        raise TrialError(f"{where} has schema_version {str(version)[:60]!r}; ATIF-v1.0 to ATIF-v1.{NEWEST} can be read")
    steps = document.get("steps")
    if not isinstance(steps, list):
        raise TrialError(f"{where}: steps is no list")
    drafts: list[_Draft] = []
    tokens: list[int] = []
    model_steps = 0
    for n, step in enumerate(steps):
        if not isinstance(step, dict) or step.get("source") not in ("system", "user", "agent"):
            raise TrialError(f"{where}: step {n + 1} has no source system, user or agent")
        if step.get("step_id") != n + 1:
            raise TrialError(f"{where}: step {n + 1} has the step_id {step.get('step_id')!r}; steps are missing")
        if step.get("is_copied_context"):  # the continuation repeats it as context
            continue
        seen = _observation(step.get("observation"))
        # A step without a model call (1.7 on) is the harness's own doing, so it is no turn.
        if step["source"] == "agent" and step.get("llm_call_count") != 0:
            model_steps += 1
            drafts.append(_Draft(action=_atif_action(step), seen=[seen], at=_moment(step.get("timestamp"))))
            metrics = step.get("metrics")
            if isinstance(metrics, dict) and _is_count(metrics.get("completion_tokens")):
                tokens.append(metrics["completion_tokens"])
        elif drafts and seen:
            drafts[-1].seen.append(seen)
    final = document.get("final_metrics")
    total = final.get("total_completion_tokens") if isinstance(final, dict) else None
    if not _is_count(total):
        total = sum(tokens) if len(tokens) == model_steps else None
    return Transcript(format=str(version), turns=_turns(drafts, segment, first), output_tokens=total)


def _atif_action(step: Mapping[str, Any]) -> str:
    calls = step.get("tool_calls")
    texts = [_content(step.get("message"))]
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            texts.append(_call(call.get("function_name"), call.get("arguments")))
    return _joined(texts)


def _observation(observation: Any) -> str:
    results = observation.get("results") if isinstance(observation, dict) else None
    rows = results if isinstance(results, list) else ()
    return _joined([_content(r.get("content")) for r in rows if isinstance(r, dict)])


# ------------------------------------------------------------------------------------------------ chat messages


def _messages(messages: Sequence[Mapping[str, Any]], segment: int, first: int) -> Transcript:
    drafts: list[_Draft] = []
    for message in messages:
        text = _content(message.get("content"))
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            texts = [text]
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict):
                    texts.append(_call(function.get("name"), function.get("arguments")))
            drafts.append(_Draft(action=_joined(texts), seen=[], at=None))
        elif drafts:
            drafts[-1].seen.append(text)
    return Transcript(format="messages", turns=_turns(drafts, segment, first))


# ------------------------------------------------------------------------------------------------ both


@dataclass(slots=True)
class _Draft:
    action: str
    seen: list[str]
    at: datetime | None


def _turns(drafts: Sequence[_Draft], segment: int, first: int) -> tuple[Turn, ...]:
    ends = [*(d.at for d in drafts[1:]), None][: len(drafts)]
    return tuple(
        Turn(
            index=first + n,
            action=_short(draft.action),
            observation=_short(_joined(draft.seen)),
            exit_code=None,
            segment=segment,
            duration_s=max((end - draft.at).total_seconds(), 0.0) if end and draft.at else 0.0,
        )
        for n, (draft, end) in enumerate(zip(drafts, ends, strict=True))
    )


def _call(name: Any, arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # what a model wrote as arguments need not be JSON
            return f"{name}({arguments})"
    if isinstance(arguments, dict):
        for key in COMMANDS:
            if isinstance(arguments.get(key), str):
                return str(arguments[key])
    try:
        return f"{name}({json.dumps(arguments, ensure_ascii=False)})"
    except RecursionError:
        return f"{name}(…)"


def _content(value: Any) -> str:
    """Text of a string or of content parts (1.6 on); a picture is named, not kept."""
    if isinstance(value, str):
        return value
    texts = []
    for part in value if isinstance(value, list) else ():
        if isinstance(part, dict):
            text = part.get("text")
            texts.append(text if isinstance(text, str) else f"[{part.get('type', 'part')}]")
    return "\n".join(texts)


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(t for t in texts if t)


def _short(text: str) -> str:
    if len(text) <= TEXT_CHARS:
        return text
    half = TEXT_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _moment(value: Any) -> datetime | None:
    """A time of the ISO kind with its zone; None otherwise, for durations of two kinds cannot be mixed."""
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:  # a step without a readable time has no duration
        return None
    return found if found.tzinfo else None
