"""Seeded choice, truncation and log-probabilities, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.backends.protocols import SamplingParams
from stages.backends.sampler.sampling import RowParams, choose, uniforms

CPU = torch.device("cpu")


def params(**kwargs: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **kwargs)  # type: ignore[arg-type]


def draws(
    logits: torch.Tensor, p: SamplingParams, count: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`count` choices from one row of logits, each with a seed of its own."""
    u = torch.from_numpy(uniforms(np.arange(seed, seed + count), 0, 1)[:, 0])
    return choose(logits.expand(count, -1), u, RowParams.of([p] * count, CPU))


def test_uniforms_are_uniform_independent_and_addressable() -> None:
    u = uniforms(np.arange(2000), 0, 50)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
    histogram = np.histogram(u, 100, (0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees of freedom, p < 1e-4
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.015  # neighbouring seeds
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.015  # neighbouring positions
    np.testing.assert_array_equal(uniforms(np.array([7, 9]), 20, 5), u[[7, 9], 20:25])
    assert len(np.unique(u)) > u.size - 12  # about one pair of 32-bit numbers meets by chance


def test_negative_and_large_seeds_are_accepted() -> None:
    u = uniforms(np.array([-1, 2**62, -(2**63)]), 0, 3)
    assert len(np.unique(u)) == 9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, float("-inf")])
    ids, logp, support = draws(logits, params(temperature=temperature), 40000)
    expected = torch.softmax(logits / temperature, -1)
    seen = torch.bincount(ids, minlength=5) / 40000
    torch.testing.assert_close(seen, expected, atol=0.01, rtol=0)
    assert seen[4] == 0
    torch.testing.assert_close(logp, expected.log()[ids])
    assert support is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-6, 6), min_size=2, max_size=30),
    st.floats(0.05, 1.0),
    st.sampled_from([-1, 1, 2, 5, 40]),
    st.floats(0.3, 2.0),
)
def test_truncation_keeps_the_support_and_renormalises(
    scores: list[float], top_p: float, top_k: int, temperature: float
) -> None:
    logits = torch.tensor(scores, dtype=torch.float32)
    p = params(top_p=top_p, top_k=top_k, temperature=temperature)
    ids, logp, support = draws(logits, p, 200)
    full = torch.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(logp, full[ids], atol=1e-5, rtol=0)
    if support is None:
        assert (top_p, top_k) == (1.0, -1)
        return
    probs = full.double().exp()
    above = torch.tensor([float(probs[probs > q].sum()) for q in probs])
    more_likely = torch.tensor([int((probs > q).sum()) for q in probs])
    slack = 1e-5
    must = (above <= top_p - slack) & (more_likely < (top_k if top_k > 0 else 99))
    may = (above <= top_p + slack) & (more_likely < (top_k if top_k > 0 else 99))
    assert bool(may[ids].all())
    mass = (logp - support).exp()  # what the kept ids weigh together
    assert bool((mass >= probs[must].sum() - 1e-4).all())
    assert bool((mass <= probs[may].sum() + 1e-4).all())


def test_greedy_rows_report_the_raw_log_prob_and_certainty() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    rows = RowParams.of([params(temperature=0.0), params(temperature=2.0), params(top_k=1)], CPU)
    ids, logp, support = choose(logits, torch.tensor([0.01, 0.01, 0.01], dtype=torch.float64), rows)
    assert ids.tolist() == [1, 0, 1]
    assert support is not None
    torch.testing.assert_close(logp[0], torch.log_softmax(logits[0], -1)[1])
    torch.testing.assert_close(logp[1], torch.log_softmax(logits[1] / 2, -1)[0])
    torch.testing.assert_close(support, torch.stack([torch.tensor(0.0), logp[1], torch.tensor(0.0)]))


def test_taking_rows_keeps_their_parameters() -> None:
    torch.manual_seed(0)
    rows = [params(temperature=0.0), params(top_p=0.5), params(top_k=3, temperature=0.4), params()]
    logits, u = torch.randn(4, 50), torch.rand(4, dtype=torch.float64)
    whole = choose(logits, u, RowParams.of(rows, CPU))
    keep = torch.tensor([3, 1])
    part = choose(logits[keep], u[keep], RowParams.of(rows, CPU).take(keep))
    for a, b in zip(whole, part, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a[keep], b, rtol=0, atol=0)
