"""Megatron's TransformerConfig from what a config.json says (Qwen3 dense and MoE)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from stages.backends.learner.megatron.facts import ModelFacts
from stages.backends.learner.megatron.layout import Layout


def transformer_config(
    facts: ModelFacts, layout: Layout, *, bf16: bool, recompute: bool, transformer_engine: bool
) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    more: dict[str, Any] = {}
    if facts.num_experts:
        more |= {
            "num_moe_experts": facts.num_experts,
            "moe_router_topk": facts.top_k,
            "moe_ffn_hidden_size": facts.moe_intermediate_size,
            "moe_router_load_balancing_type": "none",  # coefficient 0 (spec §5)
            "moe_router_pre_softmax": not facts.norm_topk_prob,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": transformer_engine,
        }
    if recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=facts.num_hidden_layers,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.num_attention_heads,
        num_query_groups=facts.num_key_value_heads,
        kv_channels=facts.head_dim,
        ffn_hidden_size=facts.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=facts.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="transformer_engine" if transformer_engine else "local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        calculate_per_token_loss=True,  # losses are sums; core divides by the count over every rank
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=True,
        **more,
    )
