"""The learner that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stages.backends.protocols import Learner
from stages.config import LearnerConfig

if TYPE_CHECKING:
    from stages.backends.learner.megatron.layout import Layout


def check_model(config: LearnerConfig, model: Path) -> None:
    """Raises ConfigError or ModelError for a layout that does not fit the model, or an architecture without a mapping.

    Reads config.json only and loads neither torch nor Megatron.
    """
    if config.backend == "megatron":
        from stages.backends.learner.megatron.facts import read_facts

        layout = read_layout(config)
        layout.check(layout.processes, read_facts(model))


def read_layout(config: LearnerConfig) -> Layout:
    from stages.backends.learner.megatron.layout import Layout

    sizes = config.layout
    return Layout(
        tensor=sizes.tensor_model_parallel_size,
        pipeline=sizes.pipeline_model_parallel_size,
        context=sizes.context_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        data=sizes.data_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        distributed_optimizer=sizes.use_distributed_optimizer,
    )


def build_learner(config: LearnerConfig, *, seed: int) -> Learner:
    """Holds no model and no process yet. Raises ConfigError when this machine cannot run it."""
    shared = {
        "max_tokens_per_gpu": config.max_tokens_per_gpu,
        "log_probs_chunk_size": config.log_probs_chunk_size,
        "dtype": config.dtype,
        "seed": seed,
        "gradient_checkpointing": config.gradient_checkpointing,
        "offload": config.offload,
        "use_rollout_routing_replay": config.use_rollout_routing_replay,
    }
    if config.backend == "megatron":
        from stages.backends.learner.megatron.remote import RemoteLearner

        return RemoteLearner(
            layout=read_layout(config), device=config.device, options=shared, num_threads=config.num_threads
        )
    from stages.backends.learner.torch_learner import TorchLearner

    return TorchLearner(device=config.device, num_threads=config.num_threads, **shared)  # type: ignore[arg-type]
