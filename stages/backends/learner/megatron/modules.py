"""The modules that this learner brings to Megatron's spec system, and the two models built from them.

Shapes: s tokens of this rank's stream, n tokens of the whole stream, H hidden size.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import nn


class RMSNorm(nn.Module):
    """torch's RMSNorm, allowed under sequence parallelism (core's WrappedTorchNorm is not)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  # read by core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def zigzag(length: int, context: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that a context-parallel rank holds: chunk r and chunk 2·CP−1−r (balanced causal work)."""
    positions = torch.arange(length)
    if context == 1:
        return positions
    chunks = positions.chunk(2 * context)
    return torch.cat([chunks[rank], chunks[2 * context - 1 - rank]])


class CoreAttention(MegatronModule):
    """Causal attention over a packed stream, with all-gather context parallelism. Replaces Transformer Engine's."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        groups = kwargs.get("pg_collection")
        self.cp_group = groups.cp if groups is not None and hasattr(groups, "cp") else mpu.get_context_parallel_group()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[s, heads, d] each → [s, 1, heads · d]."""
        query, key, value = (t if t.dim() == 3 else t.squeeze(1) for t in (query, key, value))
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        share, local, out = len(query), 0, []
        for length in (b - a for a, b in itertools.pairwise(ends)):
            rows = slice(local, local + length // size)
            # keys of one sequence lie in `size` pieces, one in each rank's share of the gathered stream
            at = torch.cat([torch.arange(rows.start, rows.stop) + r * share for r in range(size)]).to(query.device)
            k_at = torch.cat([zigzag(length, size, r) for r in range(size)]).to(query.device)
            q_at = zigzag(length, size, rank).to(query.device)
            q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[at], value[at]))
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if size == 1 else q_at[:, None] >= k_at[None],
                is_causal=size == 1,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out.append(attended[0].transpose(0, 1))
            local = rows.stop
        return torch.cat(out).flatten(1)[:, None]


class ValueHead(nn.Linear):
    """Scalar head on gathered hidden states (spec §2.2): every tensor-parallel rank computes the same."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Backbone(GPTModel):
    """A GPT that answers hidden states [s, 1, H]; heads read only the rows that a loss needs."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def block_spec(config: Any, *, transformer_engine: bool) -> Any:
    """Layers of Qwen3 dense or MoE. `transformer_engine`: core's own fused spec (needs CUDA and its package)."""
    experts = config.num_moe_experts
    if transformer_engine:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=bool(experts), qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def build_model(
    config: Any, *, vocab_size: int, context_len: int, rope: float, tied: bool, value: bool, te: bool
) -> Backbone:
    """This pipeline stage's part of the actor, or (`value`) of the critic with its head on the last stage."""
    model = Backbone(
        config,
        block_spec(config, transformer_engine=te),
        vocab_size=vocab_size,
        max_sequence_length=context_len,
        position_embedding_type="rope",
        rotary_base=int(rope),
        share_embeddings_and_output_weights=tied and not value,
        parallel_output=True,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    )
    if value and model.post_process:
        model.output_layer = ValueHead(config)
    return model


def whole_hidden(model: Backbone, hidden_s1H: torch.Tensor, *, vocabulary: bool) -> torch.Tensor:
    """[n, H] of this context-parallel rank, ready for a head.

    `vocabulary`: the head's output is split over tensor-parallel ranks, so gradients of the copies are summed.
    """
    group = mpu.get_tensor_model_parallel_group()
    hidden_s1H = hidden_s1H.to(model.config.params_dtype)  # core hands the last stage's output over in float32
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_s1H, tensor_parallel_output_grad=vocabulary, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_s1H, group=group) if vocabulary else hidden_s1H
    return hidden[:, 0]
