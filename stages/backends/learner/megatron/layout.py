"""How a model is spread over processes, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Megatron's parallel sizes. `data` counts for those who start processes; elsewhere it is what the world size leaves."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    sequence_parallel: bool = False  # shards activations between tensor-parallel regions
    distributed_optimizer: bool = False  # shards moments over data parallelism

    def __str__(self) -> str:
        sizes = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "CP": self.context,
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "DP": self.data,
        }
        named = [f"{k}{v}" for k, v in sizes.items() if v > 1]
        named += ["SP"] * self.sequence_parallel + ["dist-opt"] * self.distributed_optimizer
        return "+".join(named) or "one process"

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def processes(self) -> int:
        return self.model_parallel * self.data

    def check(self, world_size: int, config: Any) -> None:
        """Raises ConfigError when the processes or the model (a Hugging Face config) do not fit the layout."""
        if world_size % self.model_parallel:
            raise ConfigError(
                f"layout {self} needs a multiple of {self.model_parallel} processes (GPUs), but there are {world_size}; "
                "use fewer ways or start more processes"
            )
        experts = int(getattr(config, "num_experts", 0) or 0)
        if self.expert * self.expert_tensor * self.pipeline > 1 and world_size % (
            self.expert * self.expert_tensor * self.pipeline
        ):
            raise ConfigError(f"layout {self}: {world_size} processes cannot hold EP × ETP × PP groups")
        if self.expert > 1 and not experts:
            raise ConfigError(f"layout {self}: the model is dense and has no experts to spread")
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError("sequence parallelism needs tensor parallelism (TP > 1)")
        if experts and self.tensor > 1 and not self.sequence_parallel:
            raise ConfigError("a mixture of experts under tensor parallelism needs sequence_parallel = true")
        if experts and self.expert == 1 and self.expert_tensor != self.tensor:
            raise ConfigError(
                f"layout {self}: without expert parallelism, expert_tensor must equal tensor ({self.tensor}); "
                "core 0.16 would not sum expert gradients over tensor-parallel ranks"
            )
        for what, total, ways in (
            ("attention heads", config.num_attention_heads, self.tensor),
            ("key-value heads", config.num_key_value_heads, self.tensor),
            ("layers", config.num_hidden_layers, self.pipeline),
            ("experts", experts, self.expert),
            ("feed-forward width", config.intermediate_size, self.tensor),
            ("vocabulary rows", 128, self.tensor),  # weights.VOCAB_MULTIPLE
        ):
            if total % ways:
                raise ConfigError(f"layout {self}: {total} {what} cannot be divided by {ways}")
