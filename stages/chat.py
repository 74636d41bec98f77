"""A model folder's text side: tokenizer, chat template and prompts.

Any Hugging Face causal LM with a chat template works. A folder may hold `rsi_prompts.json` with its own wording of the
four prompts below; the embedded model does, since its vocabulary has a token for each.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from stages.domain import Runbook
from stages.errors import ModelError
from stages.sanitise import neutralise

_LIST_MARK = re.compile(r"^\s*(?:[-*]|\d+[.)])\s+")

Message = dict[str, str]  # {"role": "user" | "assistant", "content": …}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Wording. `{instruction}` and `{runbook}` are replaced by neutralised text."""

    act: str = (
        "You work in a Linux shell. Reply with one shell command per turn and nothing else; "
        "you then see its output. Reply with the single word done when the task is finished.\n\nTask: {instruction}"
    )
    act_with_runbook: str = (
        "You work in a Linux shell. Reply with one shell command per turn and nothing else; "
        "you then see its output. Reply with the single word done when the task is finished. "
        "Follow the runbook; where it says `it`, use what you read.\n\nTask: {instruction}\n\nRunbook:\n{runbook}"
    )
    plan: str = (
        "Now write a short reusable runbook for this task: one command per line, only the steps that were needed, no "
        "values that you had to read from a file (write `it` instead), nothing about tests."
    )
    runbook_separator: str = "\n"


class Chat:
    """Tokenizer, template and prompts of one model folder. Also the ledger's `Codec`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            raise ModelError(f"{folder}: no tokenizer (tokenizer.json). Give a complete Hugging Face model folder.")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(f"{folder}: tokenizer_config.json has no chat_template. Add one; the loop talks in turns.")
        self._mark = f"\x00{secrets.token_hex(8)}\x00"
        self.prompts = _load_prompts(folder / "rsi_prompts.json")
        self._backend = self._tokenizer.backend_tokenizer
        self.special_tokens: tuple[str, ...] = tuple(
            str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special
        )
        specials = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._blank = specials | {
            i for i in range(len(self._tokenizer)) if i not in specials and not self.decode([i]).strip()
        }
        self._opening = ""
        self._opening = self._reply_opening()
        self.stop_token_ids = self._stop_tokens()

    def _reply_opening(self) -> str:
        """What the template puts before a reply that is asked for, and leaves out before one in the history.

        Qwen3 with thinking off: an empty block of thoughts. Left out it would make every next prompt a new chunk
        (spec §6.1), so `render` keeps it where it was sampled from.
        """
        before = self.render([{"role": "user", "content": "x"}])
        talk = [("user", "x"), ("assistant", self._mark), ("user", "x")]
        history = self.render([{"role": r, "content": c} for r, c in talk]).partition(self._mark)[0]
        return before.removeprefix(history) if before.startswith(history) else ""

    def _stop_tokens(self) -> tuple[int, ...]:
        """The control tokens with which the template ends an assistant message."""
        marker = "\x00REPLY\x00"
        text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}], generate=False)
        after = self.encode(text.partition(marker)[2])
        ids = [i for i in after[:1] if i in self._blank]
        eos = self._tokenizer.eos_token_id
        if eos is not None and eos not in ids:
            ids.append(eos)
        if not ids:
            raise ModelError("the chat template ends a reply with no control token and the tokenizer has no eos_token")
        return tuple(ids)

    # ------------------------------------------------------------------ codec

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def is_blank(self, token: int) -> bool:
        return token in self._blank

    def strip_stop(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Output ids without the stop token."""
        ids = tuple(ids)
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    # ---------------------------------------------------------------- prompts

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        marked = [
            {**m, "content": self._mark + m["content"]} if self._opening and m["role"] == "assistant" else m
            for m in messages
        ]
        text = str(
            self._tokenizer.apply_chat_template(
                marked, tokenize=False, add_generation_prompt=generate, enable_thinking=False
            )
        )
        first, *rest = text.split(self._mark) if self._opening else [text]
        for part in rest:  # some templates keep it in the last message
            first += part if first.endswith(self._opening) else self._opening + part
        return first

    def clean(self, text: str) -> str:
        """Text from outside (instructions, terminal output): no control token may hide in it."""
        return neutralise(text, self.special_tokens)

    def task_message(self, instruction: str, runbook: Runbook | None = None) -> Message:
        text = self.clean(instruction)
        if runbook is None:
            return {"role": "user", "content": self.prompts.act.replace("{instruction}", text)}
        book = self.prompts.runbook_separator.join(self.clean(line.text) for line in runbook.lines)
        content = self.prompts.act_with_runbook.replace("{runbook}", book).replace("{instruction}", text)
        return {"role": "user", "content": content}

    def observation_message(self, observation: str) -> Message:
        return {"role": "user", "content": self.clean(observation)}

    def plan_message(self) -> Message:
        return {"role": "user", "content": self.prompts.plan}

    def runbook_lines(self, raw: str) -> list[str]:
        """A planner's reply as lines, list markers removed."""
        lines = (_LIST_MARK.sub("", line).strip().strip("`") for line in raw.split(self.prompts.runbook_separator))
        return [line for line in lines if line]


def _load_prompts(path: Path) -> Prompts:
    if not path.exists():
        return Prompts()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    known = {f.name for f in fields(Prompts)}
    if not isinstance(values, dict) or (unknown := set(values) - known):
        raise ModelError(
            f"{path}: unknown prompts {sorted(unknown) if isinstance(values, dict) else values!r}; known: {sorted(known)}"
        )
    return Prompts(**values)
