"""Qwen3 weights from a Hugging Face folder into the decoder's layout: fused projections, interleaved rotary pairs.

Shapes: E embedding size, H query heads, G key/value heads, D head size, F MLP size, X experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stages.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. RMSNorm gains are folded into the projection that follows them."""

    qkv: torch.Tensor  # [E, (H + 2G) D]
    qk_norm: torch.Tensor  # [H + G, D], the query part already divided by sqrt(D)
    out: torch.Tensor  # [H D, E]
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    gate_up: torch.Tensor  # [E, 2F]
    down: torch.Tensor  # [F, E]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    router: torch.Tensor  # [E, X]
    gate_up: tuple[torch.Tensor, ...]  # X of [E, 2F]
    down: tuple[torch.Tensor, ...]  # X of [F, E]
    top_k: int
    normalise: bool  # divide the chosen experts' probabilities by their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Weights:
    embedding: torch.Tensor  # [V, E]
    head: torch.Tensor  # [E, V], the final norm folded in
    layers: tuple[Layer, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    experts_per_token: int  # 0: dense

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]


def is_fast(config: Any) -> bool:
    """True when the fused decoder computes exactly this architecture."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in ("qwen3", "qwen3_moe")
        and rope.get("rope_type", "default") == "default"
        and not getattr(config, "attention_bias", False)
        and not (getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None))
        and config.hidden_act == "silu"
    )


def read_tensors(model_path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of `model.safetensors` or of the shards that its index names. Raises ModelError."""
    index = model_path / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = model_path / name
        if not path.is_file():
            raise ModelError(f"{path} is missing; the model folder is incomplete, copy or save it again")
        try:
            with safe_open(path, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensors[key] = f.get_tensor(key)
        except SafetensorError as e:
            raise ModelError(f"{path} is not a safetensors file ({e}); copy or save it again") from e
    return tensors


def load_qwen3(model_path: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> Qwen3Weights:
    """Raises ModelError for a missing tensor or one of another shape."""
    source = _Source(read_tensors(model_path), model_path, dtype, device)
    hidden, heads, kv, hd = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    embedding = source.take("model.embed_tokens.weight", (config.vocab_size, hidden))
    tied = config.tie_word_embeddings and "lm_head.weight" not in source.tensors
    head = embedding if tied else source.take("lm_head.weight", (config.vocab_size, hidden))
    final = source.take("model.norm.weight", (hidden,))
    pairs = torch.arange(hd).view(2, hd // 2).t().reshape(-1)  # (i, i + D/2) side by side: one complex number each

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}."
        n1, n2 = (source.take(f"{at}{n}.weight", (hidden,)) for n in ("input_layernorm", "post_attention_layernorm"))
        q = source.take(f"{at}self_attn.q_proj.weight", (heads * hd, hidden)).view(heads, hd, hidden)[:, pairs]
        k = source.take(f"{at}self_attn.k_proj.weight", (kv * hd, hidden)).view(kv, hd, hidden)[:, pairs]
        v = source.take(f"{at}self_attn.v_proj.weight", (kv * hd, hidden))
        qn, kn = (source.take(f"{at}self_attn.{n}_norm.weight", (hd,))[pairs] for n in "qk")
        return Layer(
            qkv=(torch.cat([q.reshape(-1, hidden), k.reshape(-1, hidden), v]) * n1).t().contiguous(),
            qk_norm=torch.cat([(qn * hd**-0.5).expand(heads, hd), kn.expand(kv, hd)]).contiguous(),
            out=source.take(f"{at}self_attn.o_proj.weight", (hidden, heads * hd)).t().contiguous(),
            mlp=_experts(source, config, at, n2) if _has_experts(config, i) else _mlp(source, config, f"{at}mlp.", n2),
        )

    return Qwen3Weights(
        embedding=embedding,
        head=(head * final).t().contiguous(),
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
        query_heads=heads,
        kv_heads=kv,
        head_dim=hd,
        eps=config.rms_norm_eps,
        rope_theta=float(_rope_theta(config)),
        experts_per_token=config.num_experts_per_tok if config.model_type == "qwen3_moe" else 0,
    )


class _Source:
    """Tensors of one folder; every request is checked for presence and shape."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], path: Path, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tensors, self.path, self.dtype, self.device = tensors, path, dtype, device

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: tensor {name} is missing; the weights belong to another architecture")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.path}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.to(self.device, self.dtype)


def _rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_theta") or config.rope_theta


def _has_experts(config: Any, layer: int) -> bool:
    if config.model_type != "qwen3_moe" or layer in (config.mlp_only_layers or ()):
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _mlp(source: _Source, config: Any, at: str, norm: torch.Tensor) -> Mlp:
    return _gated(source, at, config.hidden_size, config.intermediate_size, norm)


def _gated(source: _Source, at: str, hidden: int, width: int, norm: torch.Tensor) -> Mlp:
    gate, up = (source.take(f"{at}{n}_proj.weight", (width, hidden)) for n in ("gate", "up"))
    down = source.take(f"{at}down_proj.weight", (hidden, width))
    return Mlp(gate_up=(torch.cat([gate, up]) * norm).t().contiguous(), down=down.t().contiguous())


def _experts(source: _Source, config: Any, at: str, norm: torch.Tensor) -> Experts:
    router = source.take(f"{at}mlp.gate.weight", (config.num_experts, config.hidden_size))
    width = config.moe_intermediate_size
    each = [_gated(source, f"{at}mlp.experts.{x}.", config.hidden_size, width, norm) for x in range(config.num_experts)]
    return Experts(
        router=(router * norm).t().contiguous(),
        gate_up=tuple(e.gate_up for e in each),
        down=tuple(e.down for e in each),
        top_k=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
    )
