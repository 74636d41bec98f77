"""A sampler that says what a script says, with a byte-level tokenizer that can say anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.backends.protocols import GenerateAnswer, GenerateRequest
from stages.chat import Chat

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_chat(folder: Path) -> Chat:
    """A chat side without a model: one token per byte, Qwen's turn markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return Chat(folder)


def keys(*commands: str, done: bool = False, wait: float = 0.1) -> str:
    """One flawless Terminus-2 reply."""
    rows = [{"keystrokes": c, "duration": wait} for c in commands]
    return json.dumps({"analysis": "a", "plan": "p", "commands": rows, "task_complete": done})


class ScriptedSampler:
    """`script` gets the last message of a prompt, and the whole prompt; it returns the reply, or (reply, finish reason)."""

    weight_version = "script"
    vocab_size = 300

    def __init__(
        self, chat: Chat, script: Callable[[str, str], str | tuple[str, str]], *, context_len: int = 200_000
    ) -> None:
        self._chat, self._script, self.context_len = chat, script, context_len
        self.requests: list[GenerateRequest] = []
        self.waves: list[int] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateAnswer]:
        self.waves.append(len(requests))
        return [self._answer(r) for r in requests]

    def _answer(self, request: GenerateRequest) -> GenerateAnswer:
        self.requests.append(request)
        prompt = self._chat.decode(request.input_ids)
        said = self._script(prompt.rsplit("<|im_start|>user\n", 1)[1].partition("<|im_end|>")[0], prompt)
        text, reason = (said, "stop") if isinstance(said, str) else said
        ids = tuple(self._chat.encode(text)) + (self._chat.stop_token_ids if reason == "stop" else ())
        return GenerateAnswer(
            rid=request.rid,
            output_ids=ids,
            output_token_logprobs=tuple(-0.25 for _ in ids),
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            weight_version=self.weight_version,
        )

    async def release(self, rids: Sequence[str]) -> None:
        return None

    async def update_weights_from_disk(self, model_path: Path, weight_version: str) -> None:
        self.weight_version = weight_version

    async def aclose(self) -> None:
        return None
