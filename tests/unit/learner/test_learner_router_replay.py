"""R3 in the torch learner: the sampler's experts, live gate weights (spec §6.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import BatchError

Make = Callable[..., TorchLearner]
Batch = Callable[..., list[TrainSequence]]
Sampled = Callable[[Path, list[TrainSequence]], list[TrainSequence]]
CLIP = {"eps_clip": 0.3, "eps_clip_high": 5.0}


def ready(learner: TorchLearner, folder: Path) -> TorchLearner:
    learner.load(folder, None)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    return learner


def test_replaying_the_live_choice_changes_nothing_in_float32(
    moe_dir: Path, make_learner: Make, make_batch: Batch, sampled: Sampled
):
    batch = sampled(moe_dir, make_batch(6))
    m = ready(make_learner(), moe_dir).actor_step(batch, **CLIP)
    assert m["train/train_rollout_logprob_abs_diff"] <= 1e-5
    assert m["train/replayed_token_share"] == 1.0
    assert m["train/route_flip_share"] == 0.0


def test_forced_routes_change_the_loss_and_train_the_router(
    moe_dir: Path, make_learner: Make, make_batch: Batch, sampled: Sampled
):
    batch = sampled(moe_dir, make_batch(6))
    forced = [
        replace(s, rollout_routed_experts=np.broadcast_to(np.int32([0, 1]), s.rollout_routed_experts.shape))
        for s in batch
    ]
    learner = ready(make_learner(), moe_dir)
    plain, other = learner.log_probs(batch), learner.log_probs(forced)
    assert max(np.abs(a - b).max() for a, b in zip(plain, other, strict=True)) > 0.05
    before = {k: v.clone() for k, v in learner.actor.state_dict().items()}
    m = learner.actor_step(forced, **CLIP)
    assert m["train/route_flip_share"] > 0.3
    after = learner.actor.state_dict()
    gates = [k for k in after if k.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    assert all(not torch.equal(after[k], before[k]) for k in gates)
    for k in after:
        if k.endswith("experts.down_proj"):
            assert not torch.equal(after[k][:2], before[k][:2])
            assert torch.equal(after[k][2:], before[k][2:])  # experts 2 and 3 saw no token


def test_replay_survives_recomputation_and_micro_batching(
    moe_dir: Path, make_learner: Make, make_batch: Batch, sampled: Sampled
):
    forced = [
        replace(s, rollout_routed_experts=np.broadcast_to(np.int32([2, 0]), s.rollout_routed_experts.shape))
        for s in sampled(moe_dir, make_batch(6))
    ]
    results = [
        ready(make_learner(**kwargs), moe_dir).actor_step(forced, **CLIP)
        for kwargs in ({}, {"gradient_checkpointing": True}, {"max_tokens_per_gpu": 4096}, {"log_probs_chunk_size": 3})
    ]
    for other in results[1:]:
        assert other["actor/grad_norm"] == pytest.approx(results[0]["actor/grad_norm"], rel=1e-5)
        assert other["train/pg_loss"] == pytest.approx(results[0]["train/pg_loss"], rel=1e-5)


def test_sequences_without_routes_are_routed_live(
    moe_dir: Path, make_learner: Make, make_batch: Batch, sampled: Sampled
):
    batch = sampled(moe_dir, make_batch(6))
    half = [replace(s, rollout_routed_experts=None) if i % 2 else s for i, s in enumerate(batch)]
    learner = ready(make_learner(), moe_dir)
    for a, b in zip(learner.log_probs(batch), learner.log_probs(half), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert 0 < learner.actor_step(half, **CLIP)["train/replayed_token_share"] < 1
    off = ready(make_learner(use_rollout_routing_replay=False), moe_dir)
    assert "train/replayed_token_share" not in off.actor_step(batch, **CLIP)


def test_a_dense_model_ignores_routes(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    batch = make_batch()
    routed = [replace(s, rollout_routed_experts=np.zeros((len(s.tokens) - 1, 2, 2), np.int32)) for s in batch]
    plain, with_routes = (ready(make_learner(), tiny_dir).actor_step(b, **CLIP) for b in (batch, routed))
    assert plain == with_routes


@pytest.mark.parametrize("shape, fill, message", [((3, 2), 0, "different models"), ((2, 2), 9, "outside 0…3")])
def test_routes_of_another_model_are_refused(
    moe_dir: Path, make_learner: Make, make_batch: Batch, shape: tuple[int, int], fill: int, message: str
):
    bad = [
        replace(s, rollout_routed_experts=np.full((len(s.tokens) - 1, *shape), fill, np.int32)) for s in make_batch()
    ]
    with pytest.raises(BatchError, match=message):
        ready(make_learner(), moe_dir).actor_step(bad, **CLIP)


def test_replay_lowers_the_paired_gap_of_a_bf16_learner(
    wide_moe_dir: Path, make_learner: Make, make_batch: Batch, sampled: Sampled
):
    """Sampler in float32, learner in bfloat16, the same weights (spec §6.3)."""
    batch = sampled(wide_moe_dir, make_batch(220, longest=96))
    masked = [s.loss_mask for s in batch]
    assert sum(int(m.sum()) for m in masked) >= 5000
    gaps, flips = {}, None
    for replayed in (False, True):
        learner = make_learner(dtype="bfloat16", max_tokens_per_gpu=4096, use_rollout_routing_replay=replayed)
        learner.load(wide_moe_dir, None)
        found = learner.log_probs(batch)
        gaps[replayed] = np.concatenate(
            [np.abs(f - s.rollout_log_probs)[m] for f, s, m in zip(found, batch, masked, strict=True)]
        )
        if learner._replay is not None:
            flips = learner._replay.counts.flip_share
    assert flips is not None
    assert flips >= 0.01
    assert gaps[True].mean() < gaps[False].mean()
    paired = gaps[False] - gaps[True]
    assert paired.mean() > 3 * paired.std() / np.sqrt(len(paired))  # not by chance
    print(f"flips {flips:.3%}, gap {gaps[False].mean():.5f} without, {gaps[True].mean():.5f} with replay")
