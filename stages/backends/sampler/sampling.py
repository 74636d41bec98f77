"""The choice of the next token, vectorised over a batch, reproducible per request.

Shapes: B rows of a batch, V vocabulary, N new tokens.

Every request has a `sampling_seed`. The i-th new token of a request depends on (seed, i, logits) and nothing else: a
counter-based hash of (seed, i) gives one uniform number, and the inverse of the cumulative distribution turns it into a
token. There is no generator state, so neither batch mates, nor retries, nor the order of waves can change a choice.
The price: two requests with one seed share their random numbers, so give every attempt *and every turn* its own seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.backends.protocols import SamplingParams
from stages.backends.sampler.wire import GREEDY_BELOW


def uniforms(seeds: np.ndarray, start: int, count: int) -> np.ndarray:
    """Float64 [B, count] in (0, 1): the numbers of new tokens start … start+count-1, from integer seeds [B].

    SplitMix64's output function over `hash(seed) + counter × golden`; 32 bits, centred in their bin so that neither
    0 nor 1 can appear.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + golden)
        counter = np.arange(start + 1, start + count + 1, dtype=np.uint64) * golden
        bits = _mix(key[:, None] + counter[None, :]) >> np.uint64(32)
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser (Steele, Lea, Flood 2014), on uint64 with wrap-around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters of B rows as tensors; None where no row needs it, so that the common case costs nothing."""

    inverse_temperature: torch.Tensor | None  # float32 [B, 1]; None: every row has T = 1
    greedy: torch.Tensor | None  # bool [B]
    top_p: torch.Tensor | None  # float32 [B, 1]
    top_k: torch.Tensor | None  # int64 [B, 1]; set whenever top_p is

    @property
    def has_support(self) -> bool:
        """True when some row is truncated or greedy, so that its behaviour log-prob differs from the full one."""
        return self.top_p is not None or self.greedy is not None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        cold = [p.temperature < GREEDY_BELOW for p in params]
        heat = [1.0 if c else p.temperature for p, c in zip(params, cold, strict=True)]
        cut = any(p.top_p < 1 or p.top_k > 0 for p in params)
        return cls(
            inverse_temperature=torch.tensor([[1.0 / t] for t in heat], device=device)
            if any(t != 1 for t in heat)
            else None,
            greedy=torch.tensor(cold, device=device) if any(cold) else None,
            top_p=torch.tensor([[p.top_p] for p in params], device=device) if cut else None,
            top_k=torch.tensor([[p.top_k if p.top_k > 0 else 2**62] for p in params], device=device) if cut else None,
        )

    def take(self, rows: torch.Tensor) -> RowParams:
        """The same for `rows`, int64 [B']."""

        def pick(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[rows]

        return RowParams(
            inverse_temperature=pick(self.inverse_temperature),
            greedy=pick(self.greedy),
            top_p=pick(self.top_p),
            top_k=pick(self.top_k),
        )


def choose(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, params: RowParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token ids [B], their log-probs float32 [B], and their log-probs over the top-p/top-k support [B] (or None).

    The first log-prob is `log_softmax(logits / T)` over the full vocabulary, after temperature and before truncation, as
    SGLang reports it; the second is the true behaviour log-prob of a truncated draw (0 for a greedy one).
    """
    logits = logits_BV.float()
    if params.inverse_temperature is not None:
        logits = logits * params.inverse_temperature
    logprobs = torch.log_softmax(logits, -1)
    weights = logprobs.exp()
    if params.top_p is not None and params.top_k is not None:
        weights = _truncate(weights, params.top_p, params.top_k)
    ids = _draw(weights, uniform_B)
    if params.greedy is not None:
        ids = torch.where(params.greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1)
    if not params.has_support:
        return ids, chosen, None
    support = chosen - weights.sum(-1).log()
    if params.greedy is not None:
        support = torch.where(params.greedy, 0.0, support)
    return ids, chosen, support


def _truncate(probs_BV: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero outside the support: an id stays while the mass ranked above it is <= top_p and its rank is below top_k.

    The rule is a threshold on the probability, so ids that tie with the last kept one stay too.
    """
    if probs_BV.device.type == "cpu":  # numpy's vectorised sort is ten times torch's on a CPU
        ranked = torch.from_numpy(np.sort(probs_BV.numpy(), -1)).flip(-1)
    else:
        ranked = probs_BV.sort(-1, descending=True).values
    above = ranked.cumsum(-1, dtype=torch.float64) - ranked
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    kept = ((above <= top_p) & (rank < top_k)).sum(-1, keepdim=True)
    last = ranked.gather(1, kept - 1)
    cut = (top_p < 1) | (top_k < ranked.shape[-1])  # rows that asked for it; the others stay as they were, bit for bit
    return torch.where((probs_BV >= last) | ~cut, probs_BV, 0.0)


def _draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: the first index whose cumulative weight exceeds u × total. Never an index of weight 0."""
    cdf = weights_BV.cumsum(-1, dtype=torch.float64)
    target = uniform_B[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1)
