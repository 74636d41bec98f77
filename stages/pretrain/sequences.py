"""Episodes and copying drills as token sequences with a loss mask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stages.chat import Chat, Message
from stages.domain import Runbook, RunbookLine
from stages.pretrain.corpus import Episode
from stages.pretrain.tokenizer import ACT, END
from stages.tasks.names import NameSource, Partition


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and which of them are trained on (the agent's replies)."""

    tokens: list[int]
    mask: list[bool]


def encode_episode(chat: Chat, episode: Episode) -> Example:
    """`act`, `follow`: every reply is trained on. `plan`: the runbook alone, after the transcript."""
    book = None
    if episode.kind == "follow":
        book = Runbook(
            id="",
            task_id="",
            source_trajectory_id="",
            planner="",
            lines=tuple(RunbookLine(text=x) for x in episode.runbook),
        )
    messages: list[Message] = [chat.task_message(episode.instruction, book)]
    for command, observation in episode.turns:
        messages.append({"role": "assistant", "content": command})
        if command != "done":
            messages.append(chat.observation_message(observation))
    if episode.kind == "plan":
        messages.append(chat.plan_message())
        messages.append({"role": "assistant", "content": chat.prompts.runbook_separator.join(episode.runbook)})
    return _masked(chat, messages, last_only=episode.kind == "plan")


def copy_drill(chat: Chat, rng: random.Random) -> Example:
    """Names to repeat, in order or not: without it, copying is learned late or never."""
    names = NameSource(rng, Partition.TRAIN)
    words = [names() + rng.choice(("", ".txt", ".log", ".csv", ".conf", ".sh")) for _ in range(rng.randint(3, 8))]
    order = words[:] if rng.random() < 0.5 else rng.sample(words, len(words))
    messages: list[Message] = [chat.task_message(rng.choice(("", "make ", "write ")) + " then ".join(words))]
    for word in order:
        messages.append({"role": "assistant", "content": rng.choice(("cat ", "mkdir ", "echo ", "ls ")) + word})
    return _masked(chat, messages, last_only=False)


def _masked(chat: Chat, messages: Sequence[Message], *, last_only: bool) -> Example:
    tokens = chat.encode(chat.render(messages, generate=False))
    (act,), (end,) = chat.encode(ACT), chat.encode(END)
    mask, inside = [], False
    for token in tokens:
        mask.append(inside)
        inside = token == act or (inside and token != end)
    if last_only:
        start = len(tokens) - tokens[::-1].index(act)
        mask = [m and i >= start for i, m in enumerate(mask)]
    return Example(tokens, mask)


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> list[list[Example]]:
    """Batches of similar length, in random order."""
    order = list(examples)
    rng.shuffle(order)
    out = []
    for start in range(0, len(order), size * 20):
        block = sorted(order[start : start + size * 20], key=lambda e: len(e.tokens))
        out += [block[i : i + size] for i in range(0, len(block), size)]
    rng.shuffle(out)
    return out
