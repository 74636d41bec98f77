"""The actor: a Hugging Face causal language model in a local folder, with its tokenizer files.

Shapes: N masked tokens, H hidden size, V vocabulary, C tokens of one log-probability chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from stages.errors import ModelError

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
    "*.tiktoken",
    "spiece.model",
    "rsi_prompts.json",  # the wording that goes with the template (`stages.chat`)
)


class TokenScores(NamedTuple):
    log_probs_N: torch.Tensor  # float32, log_softmax(logits / temperature) at the target
    entropy_N: torch.Tensor  # float32, nats, no gradient


def load_actor(folder: Path, *, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Loads weights in float32 (the master copy) with every dropout off: π_train must be π_infer.

    Raises ModelError for a folder without config, weights or tokenizer, an architecture that `transformers` cannot build,
    or one whose logits are more than its output embedding of the last hidden state (log-probabilities would be wrong).
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no .safetensors weights; convert them with save_pretrained")
    if not tokenizer_files(folder):
        raise ModelError(f"{folder} has no tokenizer files; a checkpoint of it could not be sampled from")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        hf_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            **experts(config),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {e}") from e
    disable_dropout(model)
    _check_head(model, folder)
    return model


def experts(config: PreTrainedConfig) -> dict[str, str]:
    """Keyword arguments that give a MoE model the plain expert loop: deterministic, and the same on every device."""
    return {"experts_implementation": "eager"} if getattr(config, "num_experts", None) else {}


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Name -> content of every tokenizer file: kept in memory, so that a checkpoint can outlive the folder it came from."""
    found = sorted({p for pattern in TOKENIZER_PATTERNS for p in folder.glob(pattern) if p.is_file()})
    return {p.name: p.read_bytes() for p in found}


def save_actor(actor: PreTrainedModel, folder: Path, tokenizer: dict[str, bytes]) -> None:
    actor.save_pretrained(folder)
    for name, content in tokenizer.items():
        (folder / name).write_bytes(content)


def disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def context_len(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 2**31)


def token_scores(
    hidden_NH: torch.Tensor, targets_N: torch.Tensor, head: nn.Module, *, chunk: int, temperature: float = 1.0
) -> TokenScores:
    """Log-probability and entropy of each target, `chunk` rows of logits at a time.

    With several chunks and a gradient, logits are recomputed in the backward pass: at most one chunk [C, V] exists.
    """

    def score(h_CH: torch.Tensor, y_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = head(h_CH).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        with torch.no_grad():
            entropy_C = -(logp_CV.exp() * logp_CV).sum(-1)
        return logp_CV.gather(1, y_C[:, None]).squeeze(1), entropy_C

    n = len(targets_N)
    if n <= chunk or not torch.is_grad_enabled():
        parts = [score(hidden_NH[i : i + chunk], targets_N[i : i + chunk]) for i in range(0, n, chunk)]
    else:
        parts = [
            checkpoint(
                score, hidden_NH[i : i + chunk], targets_N[i : i + chunk], use_reentrant=False, preserve_rng_state=False
            )
            for i in range(0, n, chunk)
        ]
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


@torch.no_grad()
def _check_head(model: PreTrainedModel, folder: Path) -> None:
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{folder}: the model has no output embeddings, so it has no token probabilities")
    ids = torch.arange(min(4, int(model.config.vocab_size)))[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-4):
        raise ModelError(
            f"{folder}: {type(model).__name__} changes its logits after the output embedding (soft-cap or scale); "
            "this learner would compute wrong log-probabilities and does not train it"
        )
