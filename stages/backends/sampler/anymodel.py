"""Any Hugging Face causal language model as a decoder: simple and right, not fast.

It computes the whole prompt at every call (`cached_tokens` is 0) in one left-padded batch, with the model's own cache
while it decodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.backends.sampler.engine import Block
from stages.errors import ModelError


class TransformersDecoder:
    """See `Decoder` in wave.py for the contract."""

    routed_shape: tuple[int, int] | None = None

    def __init__(
        self, model_path: Path, config: Any, *, context_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, config=config, dtype=dtype)
        except (OSError, ValueError, RuntimeError, KeyError) as e:
            raise ModelError(
                f"{model_path}: {config.model_type} weights cannot be loaded as a causal language model: {e}"
            ) from e
        self._model = model.to(device).eval()
        self.context_len = context_len
        self.device = device
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        self._accepts = set(inspect.signature(self._model.forward).parameters)
        self._cache_name = "cache" if "cache" in self._accepts else "past_key_values"  # renamed in transformers 5.24
        self._cache: Any = None
        self._seen: torch.Tensor = torch.empty(0)

    def open(self, rids: Sequence[str], prompts: Sequence[np.ndarray], room: int) -> list[Block]:
        rows = len(rids)
        return [Block(order=np.arange(rows), prompts=list(prompts), cached=[0] * rows)]

    @torch.inference_mode()
    def prefill(self, block: Block) -> torch.Tensor:
        """Logits after every prompt, float32 [B, V]."""
        width = max(len(p) for p in block.prompts)
        ids = torch.zeros(len(block.prompts), width, dtype=torch.int64)
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(block.prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            seen[row, width - len(prompt) :] = 1
        self._cache, self._seen = None, seen.to(self.device)
        return self._forward(ids.to(self.device), (seen.cumsum(-1) - 1).clamp(min=0).to(self.device))

    @torch.inference_mode()
    def step(self, block: Block, ids_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Feed one token to every row; returns the next logits, float32 [B, V]."""
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(ids_B), 1)], -1)
        return self._forward(ids_B[:, None], positions_B[:, None])

    def compact(self, block: Block, alive_B: np.ndarray, used: int) -> np.ndarray:
        """Finished rows stay: not every model's cache can drop them."""
        return np.arange(len(alive_B))

    def close(self, rid: str, ids: np.ndarray) -> None:
        self._cache = None

    def routed_experts(self, rid: str, start: int, end: int) -> np.ndarray | None:
        return None

    def release(self, rids: Sequence[str]) -> None:
        self._cache = None

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        extra: dict[str, Any] = {"position_ids": positions} if "position_ids" in self._accepts else {}
        if "logits_to_keep" in self._accepts:
            extra["logits_to_keep"] = 1
        if self._cache is not None:
            extra[self._cache_name] = self._cache
        out = self._model(input_ids=ids, attention_mask=self._seen, use_cache=True, **extra)
        self._cache = getattr(out, self._cache_name)
        return out.logits[:, -1].float()
