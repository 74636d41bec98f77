"""The embedded sampler: a model in this process, behind the same protocol as SGLang servers.

One call of `generate` is one wave. The computation runs in a single worker thread, so the event loop keeps serving
sandboxes, and calls are computed one after the other in the order in which they were made. The same calls on the same
machine type, torch build and thread count give the same bits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stages.backends.protocols import GenerateAnswer, GenerateRequest
from stages.backends.sampler.anymodel import TransformersDecoder
from stages.backends.sampler.engine import ROWS_PER_BLOCK, CachedDecoder
from stages.backends.sampler.folder import read_config, require_tokenizer
from stages.backends.sampler.wave import run_wave
from stages.backends.sampler.weights import is_fast, load_qwen3
from stages.backends.sampler.wire import EXPERT_COUNTS, check_requests, to_sglang
from stages.errors import ModelError, SamplerError


class EmbeddedSampler:
    """The `Sampler` protocol on torch. Qwen3 (dense and MoE) takes the fast decoder, other causal models transformers'.

    `context_len` defaults to the model's; `max_slots` bounds the attempts whose caches are kept (one wave must fit);
    `num_threads` sets torch's intra-operation threads for the worker (and, by torch's design, for threads that start
    later). Raises ModelError for a folder without tokenizer, config or weights, or of an impossible architecture.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        weight_version: str = "base",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        num_threads: int | None = None,
        max_slots: int = 1024,
        context_len: int | None = None,
        rows_per_block: int = ROWS_PER_BLOCK,
    ) -> None:
        require_tokenizer(model_path)
        self._dtype, self._device = dtype, torch.device(device)
        self._config = config = read_config(model_path)
        limit = getattr(config, "max_position_embeddings", None)
        if context_len is not None and limit is not None and context_len > limit:
            raise ModelError(f"context_len={context_len} exceeds max_position_embeddings={limit} of {model_path}")
        if context_len is None and limit is None:
            raise ModelError(f"{model_path}: config.json names no max_position_embeddings; pass context_len")
        self.context_len = int(context_len or limit or 0)
        self._decoder: CachedDecoder | TransformersDecoder
        if is_fast(config):
            weights = load_qwen3(model_path, config, dtype=dtype, device=self._device)
            self._decoder = CachedDecoder(
                weights, context_len=self.context_len, max_slots=max_slots, rows_per_block=rows_per_block
            )
        else:
            self._decoder = TransformersDecoder(
                model_path, config, context_len=self.context_len, dtype=dtype, device=self._device
            )
        self.vocab_size = self._decoder.vocab_size
        self.model_path = model_path
        self.weight_version = weight_version
        start = (lambda: torch.set_num_threads(num_threads)) if num_threads else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sampler", initializer=start)

    @property
    def model_type(self) -> str:
        return str(self._config.model_type)

    @property
    def architectures(self) -> list[str]:
        return list(self._config.architectures or ())

    @property
    def is_moe(self) -> bool:
        """True when `return_routed_experts` brings routes."""
        return self._decoder.routed_shape is not None

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateAnswer]:
        """One lockstep wave, answers in request order. Raises SamplerError for a request that cannot be served.

        Cancelling the awaiting task stops the wave at the next token.
        """
        self.check(requests)
        if not requests:
            return []
        cancelled = threading.Event()
        job = self._worker.submit(lambda: run_wave(self._decoder, requests, self.weight_version, cancelled.is_set))
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def release(self, rids: Sequence[str]) -> None:
        await self._submit(lambda: self._decoder.release(rids))

    async def update_weights_from_disk(self, model_path: Path, weight_version: str) -> None:
        """Load other weights of the same architecture; every cache is dropped. Raises ModelError and keeps the old ones."""
        await self._submit(lambda: self._update(model_path, weight_version))

    async def aclose(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    def check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises SamplerError naming the request, the value and what is allowed."""
        check_requests(requests, self.vocab_size, self.context_len)
        if any(r.return_routed_experts for r in requests) and not self.is_moe and self._has_experts():
            raise SamplerError(
                f"{self._config.model_type}: routed experts of this mixture-of-experts model are not available from the"
                " embedded sampler; use SGLang, or switch rollout routing replay off"
            )

    @staticmethod
    def to_sglang(answer: GenerateAnswer, *, text: str | None = None, e2e_latency_s: float = 0.0) -> dict[str, Any]:
        """An answer with the names, shapes and nulls of a real SGLang answer."""
        return to_sglang(answer, text=text, e2e_latency_s=e2e_latency_s)

    def _has_experts(self) -> bool:
        return any(getattr(self._config, name, 0) for name in EXPERT_COUNTS)

    def _update(self, model_path: Path, weight_version: str) -> None:
        config = read_config(model_path)
        if config.model_type != self._config.model_type or config.vocab_size != self._config.vocab_size:
            raise ModelError(
                f"{model_path} is {config.model_type} with {config.vocab_size} ids, the sampler runs"
                f" {self._config.model_type} with {self._config.vocab_size}; start a new sampler for another architecture"
            )
        if isinstance(self._decoder, CachedDecoder):
            self._decoder.load(load_qwen3(model_path, config, dtype=self._dtype, device=self._device))
        else:
            self._decoder = TransformersDecoder(
                model_path, config, context_len=self.context_len, dtype=self._dtype, device=self._device
            )
        self._config, self.model_path, self.weight_version = config, model_path, weight_version

    async def _submit(self, job: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._worker.submit(job))
