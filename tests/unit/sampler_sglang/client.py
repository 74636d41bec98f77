"""Our client on replay servers: requests, and one call from start to close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler.sglang import SGLangSampler
from tests.unit.sglang_replay import Replay

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
PROMPT = [261, 306, 300, 302]


def request(rid: str = "a", ids: list[int] = PROMPT, new: int = 6, **more: Any) -> GenerateRequest:
    routed = {k: more.pop(k) for k in ("return_routed_experts", "routed_experts_start_len") if k in more}
    return GenerateRequest(rid=rid, input_ids=ids, sampling_params=SamplingParams(max_new_tokens=new, **more), **routed)


def use(replays: list[Replay], folder: Path, job: Callable[[SGLangSampler], Any], **options: Any) -> Any:
    async def main() -> Any:
        sampler = SGLangSampler([r.url for r in replays], model_path=folder, **options)
        try:
            return await job(sampler)
        finally:
            await sampler.aclose()

    return asyncio.run(main())


def ask(replay: Replay, folder: Path, *requests: GenerateRequest, **options: Any) -> list[GenerateAnswer]:
    return use([replay], folder, lambda s: s.generate(requests), **options)


def with_logprobs(body: dict[str, Any]) -> None:
    """Some recordings did not ask for log-probs; the client always does."""
    body["meta_info"].setdefault("output_token_logprobs", [[-1.0, i, None] for i in body["output_ids"]])
