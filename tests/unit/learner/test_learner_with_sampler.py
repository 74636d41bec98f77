"""Token in, token out and R3 from the embedded sampler to the learner (spec §6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import GenerateRequest, OptimConfig, SamplingParams, TrainSequence
from stages.backends.sampler.embedded import EmbeddedSampler

Make = Callable[..., TorchLearner]


def rollouts(folder: Path, *, routed: bool, temperature: float, n: int = 24) -> list[TrainSequence]:
    """What the sampler returned, as a batch: sampled ids, their log-probs and, for MoE, the experts of every token."""
    rng = np.random.default_rng(0)
    requests = [
        GenerateRequest(
            rid=f"r{i}",
            input_ids=[int(x) for x in rng.integers(0, 61, int(rng.integers(4, 20)))],
            sampling_params=SamplingParams(max_new_tokens=40, temperature=temperature, sampling_seed=i),
            return_routed_experts=routed,
        )
        for i in range(n)
    ]

    async def sample() -> list:
        sampler = EmbeddedSampler(folder, num_threads=1)
        try:
            return await sampler.generate(requests)
        finally:
            await sampler.aclose()

    batch = []
    for request, answer in zip(requests, asyncio.run(sample()), strict=True):
        prompt, sampled = list(request.input_ids), list(answer.output_ids)
        zeros = np.zeros(len(prompt), np.float32)
        batch.append(
            TrainSequence(
                tokens=np.array(prompt + sampled, np.int32),
                loss_mask=np.arange(len(prompt) + len(sampled)) >= len(prompt),
                rollout_log_probs=np.concatenate([zeros, np.array(answer.output_token_logprobs, np.float32)]),
                advantages=np.ones(len(prompt) + len(sampled), np.float32),
                rollout_routed_experts=answer.routed_experts,
            )
        )
    return batch


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_dense_samplers_log_probs_are_the_learners(tiny_dir: Path, make_learner: Make, temperature: float):
    batch = rollouts(tiny_dir, routed=False, temperature=temperature)
    learner = make_learner()
    learner.load(tiny_dir, None)
    for seq, found in zip(batch, learner.log_probs(batch, temperature=temperature), strict=True):
        np.testing.assert_allclose(found, seq.rollout_log_probs, atol=1e-5)


def test_the_moe_samplers_routes_are_replayed(moe_dir: Path, make_learner: Make):
    batch = rollouts(moe_dir, routed=True, temperature=1.0)
    assert all(s.rollout_routed_experts.shape == (len(s.tokens) - 1, 2, 2) for s in batch)
    learner = make_learner()
    learner.load(moe_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    m = learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)
    assert m["train/train_rollout_logprob_abs_diff"] <= 1e-5
    assert m["train/replayed_token_share"] == 1.0
    assert m["train/route_flip_share"] <= 0.001  # float32 on both sides


def test_a_bf16_learner_is_nearer_the_sampler_with_its_routes(wide_moe_dir: Path, make_learner: Make):
    batch = rollouts(wide_moe_dir, routed=True, temperature=1.0, n=130)
    masked = np.concatenate([s.loss_mask for s in batch])
    assert masked.sum() >= 5000
    old = np.concatenate([s.rollout_log_probs for s in batch])
    gap = {}
    for replayed in (False, True):
        learner = make_learner(dtype="bfloat16", max_tokens_per_gpu=4096, use_rollout_routing_replay=replayed)
        learner.load(wide_moe_dir, None)
        gap[replayed] = np.abs(np.concatenate(learner.log_probs(batch)) - old)[masked].mean()
    assert gap[True] < gap[False]
