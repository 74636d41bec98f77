"""Random models in Hugging Face folders, for the sampler's tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 211
KINDS = ("dense", "moe", "llama")
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # sharp enough that a wrong position or head shows
}


def save_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A random model with a stand-in tokenizer file. The MoE is untied and has one dense layer."""
    torch.manual_seed(seed)
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=True))
    elif kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **experts, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
