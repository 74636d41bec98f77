"""Summarisation in three sub-calls: a summary, questions about what it leaves out, and their answers (spec §3.4, §7).

The next segment starts with the first message, the summary, the questions and the answers. Pure: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.chat import Message
from stages.harness.terminus2.prompt import fill

KINDS = ("summary", "questions", "answers")

_SUMMARY = """You are about to hand your work over to another AI agent. Write a comprehensive summary of what you have done \
so far on this task.

Original Task: {instruction}

Cover, from the conversation above:
1. **Major Actions Completed**: each significant command, and what you learned from it.
2. **Important Information Learned**: findings, file locations, configurations, error messages, state of the system.
3. **Challenging Problems Addressed**: what went wrong and how you resolved it.
4. **Current Status**: exactly where you are in the task.

The next agent knows nothing but what you write here."""
_QUESTIONS = """You are picking up work from a previous AI agent on this task:

**Original Task:** {instruction}

**Summary from Previous Agent:**
{summary}

**Current Terminal Screen:**
{screen}

Begin by asking several questions (at least five) about the current state of the solution that the summary does not answer. \
After that you are on your own, so ask everything you need to know."""
_ANSWERS = "The next agent has a few questions for you, please answer each of them one by one in detail:\n\n{questions}"
_HANDOVER = """Here are the answers the other agent provided.

{answers}

Continue working on this task from where the previous agent left off. You can no longer ask questions. Please follow the \
spec to interact with the terminal."""


class Compaction:
    """One summarisation under way: `prompt` the model, give its reply to `answer`, until `done`; then take `messages`.

    `history` is the whole conversation, first message first; texts are clean already.
    """

    def __init__(self, history: Sequence[Message], *, instruction: str, screen: str) -> None:
        self._history, self._instruction, self._screen = list(history), instruction, screen
        self._replies: list[str] = []

    @property
    def done(self) -> bool:
        return len(self._replies) == len(KINDS)

    @property
    def kind(self) -> str:
        """Of the sub-call that is due."""
        return KINDS[len(self._replies)]

    def prompt(self) -> list[Message]:
        """Messages of the sub-call that is due."""
        if self.kind == "questions":
            return [_user(self._questions_prompt())]
        asked = _joined(self._history, _user(fill(_SUMMARY, instruction=self._instruction)))
        if self.kind == "summary":
            return asked
        reply: Message = {"role": "assistant", "content": self._replies[0]}
        return [*asked, reply, _user(fill(_ANSWERS, questions=self._replies[1]))]

    def answer(self, reply: str) -> None:
        """The reply to `prompt`."""
        self._replies.append(reply)

    def shrink(self) -> bool:
        """Leave the newest exchange out of the history, for a prompt that does not fit. False: there is none to leave out."""
        if self.kind == "questions" or len(self._history) < 3:
            return False
        self._history = self._history[:-2]
        return True

    def messages(self) -> list[Message]:
        """What the next segment starts with. Roles alternate, since some chat templates refuse anything else."""
        opening: Message = {
            "role": "user",
            "content": f"{self._history[0]['content']}\n\n{self._questions_prompt()}",
        }
        questions: Message = {"role": "assistant", "content": self._replies[1]}
        return [opening, questions, _user(fill(_HANDOVER, answers=self._replies[2]))]

    def _questions_prompt(self) -> str:
        return fill(_QUESTIONS, instruction=self._instruction, summary=self._replies[0], screen=self._screen)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _joined(history: Sequence[Message], last: Message) -> list[Message]:
    """`history` and one more user message; after a user message it becomes part of that one."""
    if history and history[-1]["role"] == "user":
        return [*history[:-1], _user(f"{history[-1]['content']}\n\n{last['content']}")]
    return [*history, last]
