"""Pre-training of the embedded model: Muon for the matrices, AdamW for the rest.

AdamW alone had not learned to copy names after 600 steps; Muon has after 200.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from stages.pretrain.sequences import Example, batches

ROUND = 200  # batches drawn together, so that batches of similar length can be formed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Size of the embedded model. Experts > 0 makes the Qwen3-MoE variant (untied embeddings, for R3 work)."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    context: int = 1024
    experts: int = 0
    experts_per_token: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    steps: int = 900
    copy_steps: int = 80  # the first steps are copying drills
    batch_size: int = 32
    lr: float = 5e-3
    warmup_steps: int = 40
    final_lr_fraction: float = 0.1
    act: float = 0.60  # shares of the episode kinds
    plan: float = 0.15
    follow: float = 0.25


def new_model(shape: ModelShape, vocab_size: int, seed: int) -> Any:
    """A random Qwen3 or Qwen3-MoE causal LM."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 3,
    }
    if shape.experts:
        config = Qwen3MoeConfig(
            **common,
            num_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.intermediate_size // shape.experts_per_token,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
        return Qwen3MoeForCausalLM(config)
    return Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))


def train(
    model: Any,
    kinds: Mapping[str, Sequence[Example]],
    drills: Sequence[Example],
    recipe: TrainRecipe,
    *,
    seed: int,
    save_at: Sequence[int],
    out: Path,
) -> Iterator[tuple[int, float]]:
    """Yields (step, loss) and writes HF folders `out/step-N` at the steps in `save_at`."""
    schedule = _schedule(kinds, recipe, seed)
    optimizers = _optimizers(model, recipe.lr)
    model.train()
    for step in range(recipe.steps):
        size = recipe.batch_size
        batch = drills[step * size : (step + 1) * size] if step < recipe.copy_steps else next(schedule)
        warm = min(1.0, (step + 1) / recipe.warmup_steps)
        lr = recipe.lr * warm * (1 - (1 - recipe.final_lr_fraction) * step / recipe.steps)
        loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step + 1, float(loss.detach())
        if step + 1 in save_at:
            model.save_pretrained(out / f"step-{step + 1}")


def _schedule(kinds: Mapping[str, Sequence[Example]], recipe: TrainRecipe, seed: int) -> Iterator[list[Example]]:
    """Batches without end; every round of 200 holds each kind's share, and an example comes again only once its kind is
    used up."""
    rng = random.Random(seed)
    shares = {"act": recipe.act, "plan": recipe.plan, "follow": recipe.follow}
    left: dict[str, list[Example]] = {kind: [] for kind in shares}
    while True:
        pool: list[Example] = []
        for kind, share in shares.items():
            wanted = round(ROUND * recipe.batch_size * share)
            while len(left[kind]) < wanted:
                left[kind] += rng.sample(list(kinds[kind]), len(kinds[kind]))
            pool += left[kind][:wanted]
            del left[kind][:wanted]
        rng.shuffle(pool)
        yield from batches(pool, recipe.batch_size, rng)


def _optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def next_token_loss(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens of a batch; right padding needs no mask under causal attention."""
    width = max(len(e.tokens) for e in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        mask[row, : len(example.mask)] = torch.tensor(example.mask)
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    picked = mask[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[picked]), tokens[:, 1:][picked])
