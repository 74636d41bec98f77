"""What the parallel learner needs of a model's config.json, and the architectures that it refuses. Loads no Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import ModelError

KNOWN = ("qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the learner needs of a config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    context_len: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    num_experts: int = 0  # 0: dense
    top_k: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True


def read_facts(folder: Path) -> ModelFacts:
    """Raises ModelError for a missing config or an architecture that the weight mapping does not cover."""
    try:
        c: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {e}") from e
    kind = c.get("model_type")
    if kind not in KNOWN:
        raise ModelError(
            f"{folder}: model_type {kind!r} has no Megatron mapping here ({', '.join(KNOWN)} have); use the torch learner"
        )
    rope = c.get("rope_parameters") or {"rope_theta": c.get("rope_theta", 10000.0), **(c.get("rope_scaling") or {})}
    unsupported = {
        "rope scaling": rope.get("rope_type", "default") != "default",
        "attention bias": bool(c.get("attention_bias")),
        "sliding window": bool(c.get("use_sliding_window")),
        "dense layers among MoE layers": bool(c.get("mlp_only_layers")) or c.get("decoder_sparse_step", 1) != 1,
        "an activation other than silu": c.get("hidden_act", "silu") != "silu",
    }
    if odd := [what for what, present in unsupported.items() if present]:
        raise ModelError(f"{folder}: {odd[0]} is not supported by the Megatron learner; use the torch learner")
    moe = kind == "qwen3_moe"
    return ModelFacts(
        model_type=kind,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        intermediate_size=c["intermediate_size"],
        context_len=c["max_position_embeddings"],
        rms_norm_eps=c["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        tied=bool(c.get("tie_word_embeddings")),
        num_experts=(c.get("num_experts") or c.get("num_local_experts") or 0) if moe else 0,
        top_k=c.get("num_experts_per_tok", 0) if moe else 0,
        moe_intermediate_size=c.get("moe_intermediate_size", 0) if moe else 0,
        norm_topk_prob=bool(c.get("norm_topk_prob", True)),
    )
