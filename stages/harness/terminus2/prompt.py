"""Wording of the Terminus-2 protocol: the first message, what follows a reply, and the cap on terminal output."""

from __future__ import annotations

import re

from stages.domain import Runbook
from stages.harness.terminus2.parser import Parsed

FIRST = """You are an AI assistant that solves tasks on the command line of a Linux machine. You are given a task and what \
the terminal shows; you solve the task by sending batches of keystrokes.

Reply with one JSON object of this form:

{
  "analysis": "What does the terminal show? What is done, what is still to do?",
  "plan": "What will you send next, and what do you expect of each command?",
  "commands": [
    {"keystrokes": "ls -la\\n", "duration": 0.1},
    {"keystrokes": "cd project\\n", "duration": 0.1}
  ],
  "task_complete": false
}

Required fields:
- "analysis": your analysis of the present state
- "plan": your plan for the next steps
- "commands": array of command objects; may be empty to wait without doing anything

Optional field:
- "task_complete": true when the task is done (default false). You will be asked to confirm it.

Command object:
- "keystrokes": exactly what is typed into the terminal (required). End a command with a newline (\\n), or it is not \
executed. tmux names type special keys: C-c for Ctrl+C, C-d for Ctrl+D, Escape, Enter.
- "duration": seconds to wait before the next command is typed (default 1.0). Use 0.1 for immediate commands (cd, ls, \
cat), 1.0 for ordinary ones (gcc, find), more for slow ones (make, long scripts). Prefer short waits: you can wait again \
with {"keystrokes": "", "duration": 10.0}. Never more than 60 seconds.

Text around the JSON object is tolerated with a warning. The JSON must be valid: escape quotes and backslashes in strings.

Task Description:
{instruction}
{runbook}
Current terminal state:
{screen}
"""
_RUNBOOK = "\nFollow this runbook; where it says `it`, use what you read:\n{runbook}\n"


def runbook_block(lines: list[str]) -> str:
    """The part of the first message that holds a runbook; what distillation without the runbook takes out again."""
    return fill(_RUNBOOK, runbook="\n".join(lines))


def first_message(instruction: str, screen: str, runbook: list[str] | None = None) -> str:
    """`instruction`, `screen` and the lines of a runbook are clean already."""
    return fill(FIRST, instruction=instruction, screen=screen, runbook=runbook_block(runbook) if runbook else "")


def fill(template: str, **values: str) -> str:
    """Every `{name}` of the template by its value, in one pass: no value can smuggle a placeholder in."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in values), lambda m: values[m[0][1:-1]], template)


def runbook_lines(runbook: Runbook | None) -> list[str] | None:
    return [line.text for line in runbook.lines] if runbook else None


def terminal_state(text: str, *, fresh: bool) -> str:
    return f"New Terminal Output:\n{text}" if fresh else f"Current Terminal Screen:\n{text}"


def after_error(parsed: Parsed) -> str:
    return (
        f"Previous response had parsing errors:\n{parsed.feedback}\n\n"
        "Please fix these issues and provide a proper JSON response."
    )


def after_commands(parsed: Parsed, state: str) -> str:
    return f"Previous response had warnings:\n{parsed.feedback}\n\n{state}" if parsed.warnings else state


def after_cut() -> str:
    return (
        "ERROR!! NONE of the actions you just requested were performed because your response exceeded the output limit. "
        "Re-issue this request, breaking it into chunks each of which is well below the limit."
    )


def confirm(state: str) -> str:
    return (
        f"Current terminal state:\n{state}\n\n"
        "Are you sure you want to mark the task as complete? This will trigger your solution to be graded and you won't be "
        'able to make any further corrections. If so, include "task_complete": true in your JSON response again.'
    )


def limited(text: str, limit_bytes: int) -> str:
    """Head and tail of a long text, in UTF-8 bytes, with a line that counts what is left out."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    half = limit_bytes // 2
    head, tail = data[:half].decode("utf-8", "ignore"), data[len(data) - half :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... output limited to {limit_bytes} bytes; {left_out} interior bytes omitted ...]\n{tail}"
