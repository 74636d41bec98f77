"""PPO losses as sums (spec §5)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages import ppo
from stages.alarms import alarms

TOKEN = st.tuples(st.floats(-3, 3), st.floats(-3, 0), st.floats(-2, 2))
TOKENS = st.lists(TOKEN, min_size=1, max_size=20)
CLIP = {"eps_clip": 0.3, "eps_clip_high": 5.0}


def _tensors(tokens: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log_probs with gradient, old log_probs, advantages)"""
    a = np.array(tokens)
    old = torch.tensor(a[:, 1], dtype=torch.float64)
    new = (old + torch.tensor(a[:, 0], dtype=torch.float64)).requires_grad_()
    return new, old, torch.tensor(a[:, 2], dtype=torch.float64)


@given(TOKENS)
def test_actor_loss_is_the_formula(tokens: list[tuple[float, float, float]]) -> None:
    new, old, adv = _tensors(tokens)
    loss, sums = ppo.actor_loss(new, old, adv, **CLIP)
    want = 0.0
    for log_ratio, _, a in tokens:
        rho = math.exp(log_ratio)
        want -= min(rho * a, min(max(rho, 0.7), 6.0) * a)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert sums.tokens == len(tokens)
    assert sums.kl >= -1e-12  # k3 is never negative


@given(TOKENS, TOKENS)
def test_micro_batches_add_up_to_the_global_batch(a: list, b: list) -> None:
    both, sums_ab = ppo.actor_loss(*_tensors(a + b), **CLIP)
    one, sums = ppo.actor_loss(*_tensors(a), **CLIP)
    two, sums_b = ppo.actor_loss(*_tensors(b), **CLIP)
    assert float((one + two).detach()) == pytest.approx(float(both.detach()), rel=1e-9, abs=1e-9)
    sums.merge(sums_b)
    got, want = sums.metrics(), sums_ab.metrics()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] is None if value is None else got[name] == pytest.approx(value, rel=1e-6, abs=1e-7)


def test_gradient_stops_where_the_clip_binds() -> None:
    tokens = [(math.log(0.5), -1, 1.0), (math.log(0.5), -1, -1.0), (math.log(7), -1, 1.0), (math.log(7), -1, -1.0)]
    new, old, adv = _tensors(tokens)
    loss, sums = ppo.actor_loss(new, old, adv, **CLIP)
    loss.backward()
    # low clip binds for A < 0 only, high clip for A > 0 only: with ε_h = 5 a bad token at ρ = 7 keeps its gradient
    np.testing.assert_allclose(new.grad, [-0.5, 0.0, 0.0, 7.0], atol=1e-12)
    got = sums.metrics()
    names = ("low_positive", "low_negative", "high_positive", "high_negative")
    assert [got[f"train/clip_{n}"] for n in names] == [0.5] * 4
    assert got["train/ratio_max"] == pytest.approx(7, rel=1e-6)


def test_an_overflowing_ratio_gives_a_finite_gradient() -> None:
    new = torch.tensor([2000.0, -1.0], requires_grad=True)
    loss, sums = ppo.actor_loss(new, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), **CLIP)
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -1.0]
    assert {a.metric for a in alarms(sums.metrics())} >= {"train/ratio_max", "train/ppo_kl"}


def test_gap_is_against_the_sampler_even_when_old_was_recomputed() -> None:
    new, old, adv = torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([1.0])
    _, plain = ppo.actor_loss(new, old, adv, **CLIP)
    _, against = ppo.actor_loss(
        new, old, adv, rollout_log_probs=torch.tensor([-1.5]), entropy=torch.tensor([2.0]), **CLIP
    )
    assert plain.metrics()["train/train_rollout_logprob_abs_diff"] == 0.0
    assert plain.metrics()["train/entropy"] is None
    assert against.metrics()["train/train_rollout_logprob_abs_diff"] == 0.5
    assert against.metrics()["train/entropy"] == 2.0


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=20))
def test_value_loss_is_the_formula(tokens: list[tuple[float, float, float]]) -> None:
    v, g, old = (torch.tensor(c, dtype=torch.float64) for c in np.array(tokens).T)
    loss, sums = ppo.value_loss(v, g, old, value_clip=4.0)
    want = sum(max((x - y) ** 2, (min(max(x, o - 4), o + 4) - y) ** 2) / 2 for x, y, o in tokens)
    assert float(loss) == pytest.approx(want, rel=1e-9, abs=1e-9)
    # clipping can only raise the loss, so no critic gains by jumping past the clip
    assert float(loss) >= float(0.5 * ((v - g) ** 2).sum()) - 1e-9
    assert 0 <= sums.clipped <= sums.tokens == len(tokens)


def test_value_clip_is_anchored_on_the_old_value() -> None:
    v = torch.tensor([6.0], requires_grad=True)
    loss, sums = ppo.value_loss(v, torch.tensor([6.0]), torch.tensor([0.0]), value_clip=4.0)
    assert float(loss.detach()) == 2.0  # ½ (4 − 6)²
    assert sums.metrics()["critic/value_clip_fraction"] == 1.0


def test_no_token_gives_missing_metrics_not_zero() -> None:
    assert {v for k, v in ppo.PolicySums().metrics().items() if k != "train/tokens"} == {None}
    assert set(ppo.ValueSums().metrics().values()) == {None}


def test_alarms() -> None:
    assert alarms({"train/ratio_max": 6.0, "train/ppo_kl": 0.01, "train/ratio_p99": None}) == []
    stop = alarms({"train/pg_loss": math.nan})
    assert [a.stop for a in stop] == [True]
    assert "not finite" in str(stop[0])
    page = alarms({"train/clip_high_negative": 0.05})
    assert [a.stop for a in page] == [False]
    assert "over 0.01" in str(page[0])
