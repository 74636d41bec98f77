"""The torch learner's forward passes and updates against plain formulas on the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.backends.learner.checkpoint import read_manifest
from stages.backends.learner.offload import relocate
from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import BatchError, ConfigError, ModelError, UpdateError

SGD_LIKE = OptimConfig(lr=1e-3, clip_grad=1e9)
Make = Callable[..., TorchLearner]
Batch = Callable[..., list[TrainSequence]]


def reference_log_probs(folder: Path, seq: TrainSequence, temperature: float = 1.0) -> np.ndarray:
    """One sequence at a time, eager attention, the whole logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.from_numpy(seq.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
    out = np.zeros(len(seq.tokens), np.float32)
    for j in np.flatnonzero(seq.loss_mask):
        out[j] = logp[j - 1, seq.tokens[j]]
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_the_plain_model(tiny_dir: Path, make_learner: Make, make_batch: Batch, temperature: float):
    learner, batch = make_learner(log_probs_chunk_size=5), make_batch(4)
    learner.load(tiny_dir, None)
    for seq, got in zip(batch, learner.log_probs(batch, temperature=temperature), strict=True):
        np.testing.assert_allclose(got, reference_log_probs(tiny_dir, seq, temperature), atol=1e-5)


def test_a_fresh_critic_says_zero_and_shares_no_memory(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner, batch = make_learner(), make_batch()
    learner.load(tiny_dir, None)
    learner.init_critic()
    assert all(not v.any() for v in learner.values(batch))
    before = {k: v.clone() for k, v in learner.actor.state_dict().items()}
    learner.start_phase(actor=None, critic=OptimConfig(lr=1e-2, clip_grad=100.0))
    for _ in range(2):
        learner.critic_step(batch, value_clip=4.0)
    assert all(v[s.loss_mask].all() for v, s in zip(learner.values(batch), batch, strict=True))
    assert all(torch.equal(v, before[k]) for k, v in learner.actor.state_dict().items())


def gradients(learner: TorchLearner, update: Callable[[TorchLearner], object]) -> dict[str, torch.Tensor]:
    """Gradients of one update: what AdamW's first moment holds after its first step, divided by 1 − β1."""
    update(learner)
    opt = learner._actor_opt or learner._critic_opt
    assert opt is not None
    return {n: opt._adam.state[p]["exp_avg"] / 0.1 for n, p in opt._params.items()}


@pytest.mark.filterwarnings("ignore:.*exceed max_tokens_per_gpu")
@pytest.mark.parametrize("which", ["distil", "actor", "critic"])
def test_micro_batching_does_not_change_the_gradient(tiny_dir: Path, make_learner: Make, make_batch: Batch, which: str):
    batch, found = make_batch(), []
    for budget, chunk in ((4096, 4096), (64, 7), (1, 4096)):  # one micro-batch, several, one per sequence
        learner = make_learner(max_tokens_per_gpu=budget, log_probs_chunk_size=chunk)
        learner.load(tiny_dir, None)
        if which == "critic":
            learner.init_critic()
            torch.nn.init.constant_(learner.critic.head.weight, 0.1)
            learner.start_phase(actor=None, critic=SGD_LIKE)
            found.append(gradients(learner, lambda x: x.critic_step(batch, value_clip=0.5)))
            continue
        learner.start_phase(actor=SGD_LIKE, critic=None)
        if which == "distil":
            found.append(gradients(learner, lambda x: x.distil_step(batch, lr=1e-3)))
        else:
            found.append(gradients(learner, lambda x: x.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)))
    scale = max(float(g.abs().max()) for g in found[0].values())
    for other in found[1:]:
        for name, g in found[0].items():
            assert (g - other[name]).abs().max() < 1e-6 * max(1.0, scale), name


def test_the_policy_gradient_is_that_of_the_formula(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    batch = make_batch()
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.start_phase(actor=SGD_LIKE, critic=None)
    got = gradients(learner, lambda x: x.actor_step(batch, eps_clip=0.3, eps_clip_high=0.4))
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager").eval()
    terms = []
    for s in batch:
        ids = torch.from_numpy(s.tokens.astype(np.int64))
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        keep = torch.from_numpy(s.loss_mask[1:])
        rho = (logp - torch.from_numpy(s.rollout_log_probs[1:])).exp()[keep]
        adv = torch.from_numpy(s.advantages[1:])[keep]
        terms.append(torch.minimum(rho * adv, rho.clamp(0.7, 1.4) * adv))
    (-torch.cat(terms).mean()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-6, rtol=1e-4)


def test_distillation_sums_over_tokens_and_averages_over_trajectories(
    tiny_dir: Path, make_learner: Make, make_batch: Batch
):
    batch = make_batch(3)
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1.0), critic=None)
    expected = -sum(float(reference_log_probs(tiny_dir, s).sum()) for s in batch)
    before = learner.log_probs(batch)
    metrics = learner.distil_step(batch, lr=1e-3)
    assert metrics["distil/loss"] == pytest.approx(expected / 3, rel=1e-5)
    assert sum(map(np.sum, learner.log_probs(batch))) > sum(map(np.sum, before))
    assert learner.distil_step(batch, lr=0.0, trajectories=2)["distil/loss"] == pytest.approx(
        1.5 * learner.distil_step(batch, lr=0.0)["distil/loss"], rel=1e-6
    )


def test_metrics_before_the_first_update_say_nothing_moved(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    batch = make_batch()
    batch = [replace(s, rollout_log_probs=lp) for s, lp in zip(batch, learner.log_probs(batch), strict=True)]
    first = learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)
    assert first["train/train_rollout_logprob_abs_diff"] == 0.0
    assert (first["train/ratio_max"], first["train/ratio_p99"], first["train/ppo_kl"]) == (1.0, 1.0, 0.0)
    assert {first[f"train/clip_{a}_{b}"] for a in ("low", "high") for b in ("positive", "negative")} == {0.0}
    assert first["train/tokens"] == sum(int(s.loss_mask.sum()) for s in batch)
    second = learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)
    assert second["train/train_rollout_logprob_abs_diff"] > 0
    assert second["train/ppo_kl"] > 0
    assert second["train/ratio_max"] > second["train/ratio_p99"] > 1


def test_clip_shares_are_by_sign_of_the_advantage(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    batch = make_batch(2)
    shifted = []
    for s, lp, sign, shift in zip(batch, learner.log_probs(batch), (1, -1), (+1.0, -1.0), strict=True):
        shifted.append(replace(s, rollout_log_probs=lp + np.float32(shift), advantages=np.full_like(lp, sign)))
    m = learner.actor_step(shifted, eps_clip=0.3, eps_clip_high=1.0)
    assert [m[f"train/clip_{x}"] for x in ("low_positive", "low_negative", "high_positive", "high_negative")] == [
        1.0,
        0.0,
        0.0,
        1.0,
    ]
    only_positive = [replace(s, advantages=np.ones_like(s.advantages)) for s in batch]
    assert learner.actor_step(only_positive, eps_clip=0.3, eps_clip_high=1.0)["train/clip_low_negative"] is None


def test_the_value_clip_is_anchored_on_the_frozen_values(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.init_critic()
    learner.start_phase(actor=None, critic=OptimConfig(lr=0.0, clip_grad=100.0))
    batch = make_batch(3)
    fixed = [
        replace(
            s, old_values=np.full(len(s.tokens), 2.0, np.float32), value_targets=np.zeros(len(s.tokens), np.float32)
        )
        for s in batch
    ]
    m = learner.critic_step(fixed, value_clip=0.5)  # v = 0, clipped to 1.5: ½ max(0, 1.5²)
    assert m["critic/value_loss"] == pytest.approx(1.125)
    assert m["critic/value_clip_fraction"] == 1.0
    assert m["critic/value_mean"] == 0.0


@pytest.mark.filterwarnings("ignore:.*exceed max_tokens_per_gpu")
@pytest.mark.parametrize("bad", ["advantages", "rollout_log_probs"])
def test_a_non_finite_update_is_refused_with_the_weights_unchanged(
    tiny_dir: Path, make_learner: Make, make_batch: Batch, bad: str
):
    learner = make_learner(max_tokens_per_gpu=1)
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-2), critic=None)
    good, before = make_batch(), {k: v.clone() for k, v in learner.actor.state_dict().items()}
    poisoned = [*good[:-1], replace(good[-1], **{bad: np.full_like(good[-1].advantages, np.nan)})]
    with pytest.raises(UpdateError, match="no weight changed"):
        learner.actor_step(poisoned, eps_clip=0.3, eps_clip_high=5.0)
    assert all(torch.equal(v, before[k]) for k, v in learner.actor.state_dict().items())
    fresh = make_learner(max_tokens_per_gpu=1)
    fresh.load(tiny_dir, None)
    fresh.start_phase(actor=OptimConfig(lr=1e-2), critic=None)
    assert learner.actor_step(good, eps_clip=0.3, eps_clip_high=5.0) == fresh.actor_step(
        good, eps_clip=0.3, eps_clip_high=5.0
    )


def test_a_sequence_over_the_context_changes_no_weight(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner = make_learner()
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-2), critic=None)
    before = {k: v.clone() for k, v in learner.actor.state_dict().items()}
    with pytest.raises(BatchError, match="context holds 96"):
        learner.distil_step([*make_batch(2), *make_batch(1, shortest=100, longest=100)], lr=1e-2)
    assert all(torch.equal(v, before[k]) for k, v in learner.actor.state_dict().items())


def test_the_last_token_and_pads_are_never_attended_to(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    """No attention mask is passed: a sequence scores the same alone and beside a longer one."""
    long, short = make_batch(1, shortest=40, longest=40), make_batch(1, seed=3, shortest=11, longest=11)
    learner = make_learner(max_tokens_per_gpu=4096)
    learner.load(tiny_dir, None)
    np.testing.assert_allclose(learner.log_probs([*long, *short])[1], learner.log_probs(short)[0], atol=1e-5)


def test_frozen_and_missing_models_are_named(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    learner = make_learner()
    with pytest.raises(ModelError, match="no actor"):
        learner.log_probs(make_batch())
    learner.load(tiny_dir, None)
    with pytest.raises(ModelError, match="no critic"):
        learner.values(make_batch())
    with pytest.raises(ConfigError, match="actor is frozen"):
        learner.distil_step(make_batch(), lr=1e-3)
    with pytest.raises(ConfigError, match="unknown"):
        TorchLearner(max_tokens_per_gpu=1, dtype="int4")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_folder_is_named(tiny_dir: Path, tmp_path: Path, make_learner: Make, missing: str):
    for f in tiny_dir.iterdir():
        if f.name != missing and not (missing.startswith("tokenizer") and f.name.startswith("tokenizer")):
            (tmp_path / f.name).write_bytes(f.read_bytes())
    with pytest.raises(ModelError, match=str(tmp_path)):
        make_learner().load(tmp_path, None)


def test_gradient_checkpointing_and_bf16_change_little(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    losses = {}
    for name, kwargs in {
        "plain": {},
        "recompute": {"gradient_checkpointing": True},
        "bf16": {"dtype": "bfloat16"},
    }.items():
        learner = make_learner(**kwargs)
        learner.load(tiny_dir, None)
        learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
        for _ in range(2):
            m = learner.distil_step(make_batch(), lr=1e-3)
        losses[name] = (m["distil/loss"], m["actor/grad_norm"])
        assert all(p.dtype is torch.float32 for p in learner.actor.parameters())
    assert losses["recompute"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=3e-2)
    assert losses["bf16"] != losses["plain"]


def test_a_model_that_was_moved_away_and_back_trains_on_the_same_bits(
    tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch
):
    """Off-load's bookkeeping on one kind of memory: new tensors everywhere, the same parameters, the same update."""
    digests = []
    for moved in (False, True):
        learner = make_learner(offload=moved)
        learner.load(tiny_dir, None)
        learner.init_critic()
        learner.start_phase(actor=OptimConfig(lr=1e-3), critic=OptimConfig(lr=1e-2))
        for seed in range(3):
            learner.critic_step(make_batch(seed=seed), value_clip=4.0)
            learner.actor_step(make_batch(seed=seed), eps_clip=0.3, eps_clip_high=5.0)
            if moved:
                before = [p.data_ptr() for p in learner.actor.parameters()]
                relocate(learner.actor, learner._actor_opt, torch.clone)
                relocate(learner.critic, learner._critic_opt, torch.clone)
                assert all(p.data_ptr() != b for p, b in zip(learner.actor.parameters(), before, strict=True))
        digests.append(learner.save(tmp_path / str(moved)))
    assert digests[0] == digests[1]
    assert read_manifest(tmp_path / "False") == read_manifest(tmp_path / "True")
