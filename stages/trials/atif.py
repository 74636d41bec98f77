"""One attempt's turns as ATIF documents: `agent/trajectory.json`, and a continuation per further segment."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from stages.domain import Turn
from stages.leaks.signatures import first_of_each_place, secrets

VERSION = "ATIF-v1.8"
FIRST = "trajectory.json"
REMOVED = "[secret removed]"


def redacted(text: str, public: str = "") -> str:
    """`text` without keys, tokens and passwords that do not stand in `public`, the task's own instruction."""
    out, at = [], 0
    for match in first_of_each_place(list(secrets(text, public))):
        out += [text[at : match.start], REMOVED]
        at = match.end
    return "".join(out) + text[at:]


def atif_documents(
    turns: Sequence[Turn],
    *,
    session_id: str,
    agent: str,
    version: str,
    model: str,
    instruction: str,
    started: datetime,
    clean: Callable[[str], str],
) -> dict[str, dict[str, Any]]:
    """File name → document. Every text of a turn passes through `clean`."""
    parts = [list(group) for _, group in groupby(turns, key=lambda t: t.segment)] or [[]]
    names = [FIRST, *(f"trajectory.cont-{n}.json" for n in range(1, len(parts)))]
    out: dict[str, dict[str, Any]] = {}
    at = started
    for n, (name, part) in enumerate(zip(names, parts, strict=True)):
        steps: list[dict[str, Any]] = []
        if n == 0:
            steps.append({"step_id": 1, "timestamp": at.isoformat(), "source": "user", "message": clean(instruction)})
        for turn in part:
            steps.append({"step_id": len(steps) + 1, "timestamp": at.isoformat(), **_step(turn, clean)})
            at += timedelta(seconds=turn.duration_s)
        document: dict[str, Any] = {
            "schema_version": VERSION,
            "session_id": session_id,
            "agent": {"name": agent, "version": version, "model_name": model},
            "steps": steps,
            "final_metrics": {
                "total_completion_tokens": sum(t.end - t.start for t in part),
                "total_steps": len(steps),
            },
        }
        if n + 1 < len(parts):
            document["continued_trajectory_ref"] = names[n + 1]
        out[name] = document
    return out


def _step(turn: Turn, clean: Callable[[str], str]) -> dict[str, Any]:
    """A command of the shell is a tool call, so that viewers show it as one; anything else is what the model said."""
    step: dict[str, Any] = {"source": "agent", "message": "", "llm_call_count": 1}
    call = f"turn-{turn.index}"
    result: dict[str, Any] = {"content": clean(turn.observation)}
    if turn.exit_code is None and not turn.timed_out:
        step["message"] = clean(turn.action)
    else:
        step["tool_calls"] = [
            {"tool_call_id": call, "function_name": "bash", "arguments": {"command": clean(turn.action)}}
        ]
        result |= {"source_call_id": call, "extra": {"exit_code": turn.exit_code, "timed_out": turn.timed_out}}
    if turn.observation or "tool_calls" in step:
        step["observation"] = {"results": [result]}
    if turn.end > turn.start:
        step["metrics"] = {"completion_tokens": turn.end - turn.start}
    return step


def as_json(document: Any) -> str:
    """UTF-8 text without NaN, whatever a sandbox printed: half a surrogate pair becomes U+FFFD."""
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    return text.encode("utf-8", "replace").decode() + "\n"
