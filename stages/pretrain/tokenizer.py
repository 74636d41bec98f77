"""The embedded model's tokenizer: byte-level BPE in which a name is the same two pieces wherever it stands.

A 0.9 M-parameter model can copy a name that it never saw only if the name's pieces are always the same. Spaces therefore
ride on the known word or the punctuation beside them, and letters that form no known word split into pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stages.pretrain.corpus import Episode
from stages.tasks.names import NAMES

VOCAB_SIZE = 736
PAD, BOS, ACT, END, BOOK, PLAN, LINE = "<pad>", "<bos>", "<act>", "<eoa>", "<book>", "<plan>", "<line>"
SPECIAL_TOKENS = [PAD, BOS, ACT, END, BOOK, PLAN, LINE]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<act>{{ m['content'] }}<eoa>{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<act>{% endif %}"
)
PROMPTS = {
    "act": "{instruction}",
    "act_with_runbook": "{instruction}" + BOOK + "{runbook}",
    "plan": PLAN,
    "runbook_separator": LINE,
}


def texts_of(episodes: Sequence[Episode]) -> list[str]:
    """Every text that the model reads or writes."""
    return [t for e in episodes for t in (e.instruction, *e.runbook, *(x for turn in e.turns for x in turn))]


def build_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Train on `texts` and write tokenizer.json, tokenizer_config.json (with the chat template) and rsi_prompts.json."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern(texts)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    (folder / "rsi_prompts.json").write_text(json.dumps(PROMPTS, indent=2) + "\n", encoding="utf-8")


def _pattern(texts: Iterable[str]) -> str:
    names = {n for group in NAMES.values() for n in group}
    words: set[str] = set()
    extensions: set[str] = set()
    for text in texts:
        extensions.update(re.findall(r"\.([a-z]{2,4})\b", text))
        words.update(w for w in re.findall(r"[A-Za-z]+", text) if len(w) > 1 and w not in names)
    by_length = sorted(words, key=lambda w: (-len(w), w))
    return (
        r"\.(?:" + "|".join(sorted(extensions, key=lambda e: (-len(e), e))) + r")\b ?"
        r"| ?\b(?:" + "|".join(by_length) + r")\b ?"
        r"| ?'s/\^?| ?-[a-z]|[a-z]{2}|[A-Z]?[a-z]+|[0-9]{3} ?|[0-9] ?| ?[^a-zA-Z0-9 ]+ ?| "
    )
