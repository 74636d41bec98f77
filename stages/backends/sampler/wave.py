"""The token loop: one wave of requests from prompts to answers. Nothing in it loops over rows in Python.

Shapes: B rows of a block, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from stages.backends.protocols import GenerateAnswer, GenerateRequest
from stages.backends.sampler.engine import Block
from stages.backends.sampler.sampling import RowParams, choose, uniforms
from stages.backends.sampler.wire import GREEDY_BELOW, is_truncated
from stages.errors import SamplerError

COMPACT_BELOW = 7 / 8  # living share of a block under which finished rows are dropped
UNIFORMS_AHEAD = 256  # random numbers computed at once, per row


class Decoder(Protocol):
    """What the loop needs: `CachedDecoder` (fast) and `TransformersDecoder` (any model)."""

    vocab_size: int
    context_len: int
    device: torch.device
    routed_shape: tuple[int, int] | None  # (L, K) of a mixture of experts whose routes are known

    def open(self, rids: Sequence[str], prompts: Sequence[np.ndarray], room: int) -> list[Block]: ...

    def prefill(self, block: Block) -> torch.Tensor: ...

    def step(self, block: Block, ids_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor: ...

    def compact(self, block: Block, alive_B: np.ndarray, used: int) -> np.ndarray: ...

    def close(self, rid: str, ids: np.ndarray) -> None: ...

    def routed_experts(self, rid: str, start: int, end: int) -> np.ndarray | None: ...

    def release(self, rids: Sequence[str]) -> None: ...


@torch.inference_mode()
def run_wave(
    decoder: Decoder, requests: Sequence[GenerateRequest], weight_version: str, cancelled: Callable[[], bool]
) -> list[GenerateAnswer]:
    """Answers in request order. Raises SamplerError when `cancelled()` becomes true; the caches of the wave are then lost."""
    rids = [r.rid for r in requests]
    prompts = [np.asarray(r.input_ids, dtype=np.int64) for r in requests]
    answers: list[GenerateAnswer | None] = [None] * len(requests)
    try:
        room = max(r.sampling_params.max_new_tokens for r in requests)
        for block in decoder.open(rids, prompts, room):
            for index, answer in _run_block(decoder, block, requests, weight_version, cancelled):
                answers[index] = answer
    except BaseException:
        decoder.release(rids)  # what their slots hold is not known any more
        raise
    return [a for a in answers if a is not None]


def _run_block(
    decoder: Decoder,
    block: Block,
    requests: Sequence[GenerateRequest],
    weight_version: str,
    cancelled: Callable[[], bool],
) -> list[tuple[int, GenerateAnswer]]:
    device = decoder.device
    rows = block.order.copy()
    mine = [requests[i] for i in rows]
    prompts = block.prompts
    logits = decoder.prefill(block)
    params = RowParams.of([r.sampling_params for r in mine], device)
    limit = torch.tensor([r.sampling_params.max_new_tokens for r in mine], device=device)
    longest = int(limit.max())
    stops = _stop_table(mine, device)
    seeds = np.array([r.sampling_params.sampling_seed for r in mine], dtype=np.int64)
    prompt_len = torch.tensor([len(p) for p in prompts], device=device)
    who = torch.arange(len(rows), device=device)  # row of the buffers that a living row writes
    ids_BN = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
    logp_BN = torch.zeros(len(rows), longest, device=device)
    support_BN = torch.zeros(len(rows), longest, device=device) if params.has_support else None
    length = limit.clone()  # of every buffer row; smaller once a stop token came
    alive = limit > 0
    random = torch.empty(0, device=device)
    step = 0
    while bool(alive.any()):
        if cancelled():
            raise SamplerError("the wave was cancelled")
        if step % UNIFORMS_AHEAD == 0:
            count = min(UNIFORMS_AHEAD, longest - step)
            random = torch.from_numpy(uniforms(seeds[who.cpu().numpy()], step, count)).to(device)
        ids, logp, support = choose(logits, random[:, step % UNIFORMS_AHEAD], params)
        ids_BN[who, step] = ids
        logp_BN[who, step] = logp
        if support_BN is not None and support is not None:
            support_BN[who, step] = support
        step += 1
        stopped = (ids[:, None] == stops).any(1) & alive
        length[who] = torch.where(stopped, step, length[who])
        alive = alive & ~stopped & (limit > step)
        living = int(alive.sum())
        if living == 0:
            break
        if living <= COMPACT_BELOW * len(ids):
            used = int(prompt_len.max()) + step
            keep = torch.from_numpy(decoder.compact(block, alive.cpu().numpy(), used)).to(device)
            who, ids, alive, limit, stops, prompt_len = (t[keep] for t in (who, ids, alive, limit, stops, prompt_len))
            random, params = random[keep], params.take(keep)
        # a finished row that was not dropped yet repeats its last position; nothing reads what it writes
        logits = decoder.step(block, ids, prompt_len + torch.minimum(limit, torch.tensor(step, device=device)) - 1)
    return _answers(decoder, block, rows, mine, prompts, (ids_BN, logp_BN, support_BN, length), weight_version)


def _answers(
    decoder: Decoder,
    block: Block,
    rows: np.ndarray,
    requests: Sequence[GenerateRequest],
    prompts: Sequence[np.ndarray],
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    weight_version: str,
) -> list[tuple[int, GenerateAnswer]]:
    ids_BN, logp_BN, support_BN, length_B = (None if t is None else t.cpu().numpy() for t in buffers)
    assert ids_BN is not None
    assert logp_BN is not None
    assert length_B is not None
    answers = []
    for j, (index, request, prompt) in enumerate(zip(rows, requests, prompts, strict=True)):
        n, p = int(length_B[j]), request.sampling_params
        ids = ids_BN[j, :n]
        decoder.close(request.rid, np.concatenate([prompt, ids[:-1]]))
        routed = None
        if request.return_routed_experts:
            routed = decoder.routed_experts(request.rid, request.routed_experts_start_len, len(prompt) + n - 1)
        truncated = is_truncated(request) or p.temperature < GREEDY_BELOW
        answers.append(
            (
                int(index),
                GenerateAnswer(
                    rid=request.rid,
                    output_ids=tuple(ids.tolist()),
                    output_token_logprobs=tuple(logp_BN[j, :n].tolist()),
                    finish_reason="stop" if n and int(ids[-1]) in p.stop_token_ids else "length",
                    prompt_tokens=len(prompt),
                    cached_tokens=block.cached[j],
                    weight_version=weight_version,
                    output_token_sampling_logprobs=(
                        tuple(support_BN[j, :n].tolist()) if truncated and support_BN is not None else None
                    ),
                    routed_experts=routed,
                ),
            )
        )
    return answers


def _stop_table(requests: Sequence[GenerateRequest], device: torch.device) -> torch.Tensor:
    """Stop ids of every row, int64 [B, most], padded with -1 (no id)."""
    most = max(1, max(len(r.sampling_params.stop_token_ids) for r in requests))
    table = [
        [*r.sampling_params.stop_token_ids] + [-1] * (most - len(r.sampling_params.stop_token_ids)) for r in requests
    ]
    return torch.tensor(table, device=device)
