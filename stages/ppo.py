"""PPO losses on torch tensors, as sums, with the sums behind every logged metric (spec §5).

The caller divides by the number of masked tokens of the *whole global batch*, never by a micro-batch's. Nothing here
imports torch: the functions use the methods of the tensors that they are given. All tensors are [N], masked tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_MAX_LOG_RATIO = 20.0  # beyond e^20 a ratio has overflowed in all but name, and 0·inf would poison the gradient


_SUMMED = (
    *("tokens", "loss", "kl", "gap", "advantage", "advantage_sq", "positive", "negative"),
    *("low_positive", "low_negative", "high_positive", "high_negative"),
)


@dataclass(slots=True)
class PolicySums:
    """Sums over masked tokens; `merge` micro-batches and ranks, then `metrics`."""

    tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0  # Σ k3 = ρ − 1 − log ρ
    entropy: float | None = None
    gap: float = 0.0  # Σ |log π_train − log π_infer|
    advantage: float = 0.0
    advantage_sq: float = 0.0
    positive: int = 0  # tokens with A > 0
    negative: int = 0  # tokens with A < 0
    low_positive: int = 0  # ρ < 1 − ε_l and A > 0
    low_negative: int = 0
    high_positive: int = 0  # ρ > 1 + ε_h and A > 0
    high_negative: int = 0  # with ε_h = 5 a negative-advantage ratio is hardly bounded: watch this one
    log_ratios: list[np.ndarray] = field(default_factory=list)  # float32, for exact p99 and max

    def merge(self, other: PolicySums) -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.entropy is not None:
            self.entropy = (self.entropy or 0.0) + other.entropy
        self.log_ratios.extend(other.log_ratios)

    def metrics(self) -> dict[str, float | None]:
        """Means over the tokens summed so far; None where there is no token to divide by."""
        n = self.tokens
        logs = np.concatenate([np.empty(0, dtype=np.float32), *self.log_ratios]).astype(np.float64)
        mean = _over(self.advantage, n)
        variance = None if mean is None else max(self.advantage_sq / n - mean * mean, 0.0)
        return {
            "train/pg_loss": _over(self.loss, n),
            "train/ppo_kl": _over(self.kl, n),
            "train/entropy": None if self.entropy is None else _over(self.entropy, n),
            "train/train_rollout_logprob_abs_diff": _over(self.gap, n),
            "train/advantage_mean": mean,
            "train/advantage_std": None if variance is None else math.sqrt(variance),
            "train/ratio_p99": float(np.exp(np.quantile(logs, 0.99))) if logs.size else None,
            "train/ratio_max": float(np.exp(logs.max())) if logs.size else None,
            "train/clip_low_positive": _over(self.low_positive, self.positive),
            "train/clip_low_negative": _over(self.low_negative, self.negative),
            "train/clip_high_positive": _over(self.high_positive, self.positive),
            "train/clip_high_negative": _over(self.high_negative, self.negative),
            "train/tokens": float(n),
        }


@dataclass(slots=True)
class ValueSums:
    """Sums over masked tokens of the value loss."""

    tokens: int = 0
    loss: float = 0.0
    clipped: int = 0  # tokens whose clipped term is the larger one
    value: float = 0.0
    target: float = 0.0

    def merge(self, other: ValueSums) -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        self.clipped += other.clipped
        self.value += other.value
        self.target += other.target

    def metrics(self) -> dict[str, float | None]:
        n = self.tokens
        return {
            "critic/value_loss": _over(self.loss, n),
            "critic/value_clip_fraction": _over(self.clipped, n),
            "critic/value_mean": _over(self.value, n),
            "critic/target_mean": _over(self.target, n),
        }


def _over(total: float, n: int) -> float | None:
    return total / n if n else None


def actor_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    rollout_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, PolicySums]:
    """−Σ_j min{ρ_j A_j, clip(ρ_j, 1−ε_l, 1+ε_h) A_j}, summed, and its metric sums (spec §5).

    `log_probs`: log π_θ of the sampled ids, with gradient, at the sampling temperature. `old_log_probs`: log π_old, the
    sampler's by default. `rollout_log_probs`: the sampler's, for the gap metric, when π_old was recomputed.
    `entropy`: per token, for the log only. All [N].
    """
    log_ratio = (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    loss = -(ratio * advantages).minimum(ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages).sum()
    rho, logs, adv = ratio.detach(), log_ratio.detach(), advantages.detach()
    low, high, pos, neg = rho < 1.0 - eps_clip, rho > 1.0 + eps_clip_high, adv > 0, adv < 0
    infer = old_log_probs if rollout_log_probs is None else rollout_log_probs
    sums = PolicySums(
        tokens=log_probs.numel(),
        loss=float(loss.detach()),
        kl=float((rho - 1.0 - logs).double().sum()),
        entropy=None if entropy is None else float(entropy.detach().double().sum()),
        gap=float((log_probs.detach() - infer).abs().double().sum()),
        advantage=float(adv.double().sum()),
        advantage_sq=float((adv.double() ** 2).sum()),
        positive=int(pos.sum()),
        negative=int(neg.sum()),
        low_positive=int((low & pos).sum()),
        low_negative=int((low & neg).sum()),
        high_positive=int((high & pos).sum()),
        high_negative=int((high & neg).sum()),
        log_ratios=[logs.float().cpu().numpy()],
    )
    return loss, sums


def value_loss(
    values: Tensor, value_targets: Tensor, old_values: Tensor, *, value_clip: float
) -> tuple[Tensor, ValueSums]:
    """Σ_j ½ max((v−G)², (clip(v, v_old ± ε_V) − G)²), summed, and its metric sums (spec §5).

    `values`: with gradient; `old_values`: the frozen pre-update values that the advantages used too. All [N].
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain, clipped = (values - value_targets) ** 2, (near - value_targets) ** 2
    loss = 0.5 * plain.maximum(clipped).sum()
    sums = ValueSums(
        tokens=values.numel(),
        loss=float(loss.detach()),
        clipped=int((((values - old_values).abs() > value_clip) & (clipped > plain)).detach().sum()),
        value=float(values.detach().double().sum()),
        target=float(value_targets.detach().double().sum()),
    )
    return loss, sums
