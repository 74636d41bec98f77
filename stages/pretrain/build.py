"""`rsi model build`: corpus, tokenizer, pre-training and the choice of Base on the validation suite. Deterministic."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stages.backends.learner.checkpoint import digest_weights
from stages.chat import Chat
from stages.pretrain.corpus import build_corpus
from stages.pretrain.sequences import Example, copy_drill, encode_episode
from stages.pretrain.tokenizer import build_tokenizer, texts_of
from stages.pretrain.train import ModelShape, TrainRecipe, new_model, train

TOKENIZER_EPISODES = 4000  # enough to see every word


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """Everything that decides the bytes of Base."""

    seed: int = 0
    acts: int = 8400
    plans: int = 3500
    follows: int = 3500
    shape: ModelShape = field(default_factory=ModelShape)
    training: TrainRecipe = field(default_factory=TrainRecipe)
    save_at: tuple[int, ...] = (750, 900, 1050)  # candidates for Base
    num_threads: int = 1  # two threads on a busy machine wait for each other more than they compute


def build_base(out: Path, recipe: BuildRecipe | None = None) -> Iterator[str]:
    """Builds every candidate below `out` (`step-N/`, complete Hugging Face folders). Yields lines of progress."""
    import torch

    recipe = recipe or BuildRecipe()
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    started = time.monotonic()
    episodes = build_corpus(
        seed=recipe.seed, n_act=recipe.acts, n_plan=recipe.plans, n_follow=recipe.follows, workers=2
    )
    yield f"corpus: {len(episodes)} episodes run in bash, {time.monotonic() - started:.0f} s"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = out / "tokenizer"
    build_tokenizer(texts_of(episodes[:TOKENIZER_EPISODES]), tokenizer)
    chat = Chat(tokenizer)
    kinds: dict[str, list[Example]] = {"act": [], "plan": [], "follow": []}
    for episode in episodes:
        kinds[episode.kind].append(encode_episode(chat, episode))
    rng = random.Random(recipe.seed)
    drills = [copy_drill(chat, rng) for _ in range(recipe.training.copy_steps * recipe.training.batch_size)]
    model = new_model(recipe.shape, chat.vocab_size, recipe.seed)
    size = sum(p.numel() for p in model.parameters())
    yield f"tokenizer: {chat.vocab_size} entries; model: {size / 1e6:.2f} M parameters, {time.monotonic() - started:.0f} s"
    losses: list[float] = []
    for step, loss in train(model, kinds, drills, recipe.training, seed=recipe.seed, save_at=recipe.save_at, out=out):
        losses.append(loss)
        if step % 50 == 0:
            yield f"step {step}/{recipe.training.steps}: loss {sum(losses[-50:]) / 50:.3f}, {time.monotonic() - started:.0f} s"
    for step in recipe.save_at:
        for file in tokenizer.iterdir():
            shutil.copy(file, out / f"step-{step}" / file.name)


def write_recipe(folder: Path, recipe: BuildRecipe, facts: dict[str, Any]) -> None:
    """`rsi_recipe.json` beside the weights: recipe, digest, validation scores of the candidates."""
    record = {"recipe": asdict(recipe), "weights_sha256": digest_weights(folder), **facts}
    (folder / "rsi_recipe.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
