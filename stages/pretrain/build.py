"""`rsi model build`: corpus, tokenizer, pre-training and the choice of Base on the validation suite. Deterministic."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
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
    save_at: tuple[int, ...] = (600, 750, 900)  # candidates for Base
    num_threads: int = 1  # two threads on a busy machine wait for each other more than they compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Tokenizer and examples of a recipe."""

    tokenizer: Path
    chat: Chat
    kinds: dict[str, list[Example]]
    drills: list[Example]


def prepare(out: Path, recipe: BuildRecipe) -> Material:
    """Runs the scripted operators in bash, trains the tokenizer on what they read and wrote, encodes everything."""
    episodes = build_corpus(
        seed=recipe.seed, n_act=recipe.acts, n_plan=recipe.plans, n_follow=recipe.follows, workers=2
    )
    tokenizer = out / "tokenizer"
    build_tokenizer(texts_of(episodes[:TOKENIZER_EPISODES]), tokenizer)
    chat = Chat(tokenizer)
    kinds: dict[str, list[Example]] = {"act": [], "plan": [], "follow": []}
    for episode in episodes:
        kinds[episode.kind].append(encode_episode(chat, episode))
    rng = random.Random(recipe.seed)
    drills = [copy_drill(chat, rng) for _ in range(recipe.training.copy_steps * recipe.training.batch_size)]
    return Material(tokenizer=tokenizer, chat=chat, kinds=kinds, drills=drills)


def build_base(out: Path, recipe: BuildRecipe | None = None) -> Iterator[str]:
    """Builds every candidate below `out` (`step-N/`, complete Hugging Face folders). Yields lines of progress."""
    recipe = recipe or BuildRecipe()
    _deterministic(recipe)
    started = time.monotonic()
    material = prepare(out, recipe)
    model = new_model(recipe.shape, material.chat.vocab_size, recipe.seed)
    size = sum(p.numel() for p in model.parameters())
    yield (
        f"{sum(map(len, material.kinds.values()))} episodes run in bash; {material.chat.vocab_size} tokens; "
        f"{size / 1e6:.2f} M parameters; {time.monotonic() - started:.0f} s"
    )
    losses: list[float] = []
    for step, loss in train(
        model, material.kinds, material.drills, recipe.training, seed=recipe.seed, save_at=recipe.save_at, out=out
    ):
        losses.append(loss)
        if step % 50 == 0:
            mean = sum(losses[-50:]) / 50
            yield f"step {step}/{recipe.training.steps}: loss {mean:.3f}, {time.monotonic() - started:.0f} s"
    for step in recipe.save_at:
        _complete(out / f"step-{step}", material.tokenizer)


def continue_base(base: Path, out: Path, recipe: BuildRecipe, *, seconds: float) -> Iterator[str]:
    """The control: Base pre-trained on for `seconds` of wall time, at the recipe's last learning rate, on its corpus."""
    from transformers import AutoModelForCausalLM

    _deterministic(recipe)
    material = prepare(out, recipe)
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    rate = recipe.training.lr * recipe.training.final_lr_fraction
    flat = replace(recipe.training, lr=rate, final_lr_fraction=1.0, copy_steps=0, steps=100_000)
    started = time.monotonic()
    steps = 0
    for steps, loss in train(model, material.kinds, [], flat, seed=recipe.seed + 1, save_at=(), out=out):
        if steps % 100 == 0:
            yield f"control: {steps} further steps, loss {loss:.3f}, {time.monotonic() - started:.0f} of {seconds:.0f} s"
        if time.monotonic() - started >= seconds:
            break
    model.save_pretrained(out / "control")
    _complete(out / "control", material.tokenizer)
    yield f"control: {steps} further steps in {seconds:.0f} s"


def _deterministic(recipe: BuildRecipe) -> None:
    import torch

    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


def _complete(folder: Path, tokenizer: Path) -> None:
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / file.name)


def write_recipe(folder: Path, recipe: BuildRecipe, facts: dict[str, Any]) -> None:
    """`rsi_recipe.json` beside the weights: recipe, digest, validation scores of the candidates."""
    record = {"recipe": asdict(recipe), "weights_sha256": digest_weights(folder), **facts}
    (folder / "rsi_recipe.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
