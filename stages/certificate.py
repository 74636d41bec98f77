"""The consistency certificate of one local step: what shows that it trains on what was sampled (spec §6).

Everything but the gap is computed from the raw sampler answers, before any weight changes; a batch with one altered token
gets none, and its step is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.backends.protocols import TrainSequence
from stages.domain import Boundary, Trajectory
from stages.tokens import require_no_drift

GAP = "train/train_rollout_logprob_abs_diff"  # slime's name
REPLAYED = "train/replayed_token_share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    attempts: int
    loss_tokens: int  # sampled tokens that are trained on
    drift_tokens: int  # of these, other than the sampler's own: 0, or there is no certificate
    boundaries: Mapping[Boundary, int]  # how each next prompt came about (spec §6.1), all four
    weight_versions: Mapping[str, int]  # sampled tokens per version
    mixed_attempts: int  # with tokens of more than one version
    routed_share: float | None  # input tokens with the sampler's experts (spec §6.2); None: a dense model
    replayed_share: float | None = None  # input tokens whose experts the actor's update took over
    gap: float | None = None  # mean |log π_train − log π_infer| over the loss tokens, before the update (spec §6.3)

    def metrics(self) -> dict[str, float | None]:
        """As metrics of the step, but for what the learner logs by itself."""
        routed = {} if self.routed_share is None else {"rollout/routed_token_share": self.routed_share}
        return {
            "rollout/drift_tokens": float(self.drift_tokens),
            "rollout/loss_tokens": float(self.loss_tokens),
            "rollout/weight_versions": float(len(self.weight_versions)),
            "rollout/mixed_attempts": float(self.mixed_attempts),
            **{boundary_metric(b): float(n) for b, n in self.boundaries.items()},
            **routed,
        }


def boundary_metric(outcome: Boundary) -> str:
    """Name of the metric that counts an outcome."""
    return f"rollout/boundary_{outcome.value}"


def certify(trajectories: Sequence[Trajectory]) -> Certificate:
    """The certificate of a batch that nothing was trained on yet.

    Raises DriftError when a loss-region token is not what the sampler returned.
    """
    require_no_drift(trajectories)
    segments = [s for t in trajectories for s in t.segments if s.loss_mask.any()]
    inputs = sum(len(s.tokens) - 1 for s in segments)
    routed = [len(s.rollout_routed_experts) for s in segments if s.rollout_routed_experts is not None]
    per_attempt = [_versions(t) for t in trajectories]
    return Certificate(
        attempts=len(trajectories),
        loss_tokens=sum(int(s.loss_mask.sum()) for s in segments),
        drift_tokens=0,
        boundaries={b: sum(t.boundaries.get(b, 0) for t in trajectories) for b in Boundary},
        weight_versions=dict(sum(per_attempt, Counter())),
        mixed_attempts=sum(len(v) > 1 for v in per_attempt),
        routed_share=sum(routed) / inputs if routed and inputs else None,
    )


def _versions(trajectory: Trajectory) -> Counter[str]:
    found: Counter[str] = Counter()
    for raw in trajectory.raw_answers:
        answer = json.loads(raw)
        found[str(answer.get("weight_version", trajectory.weight_version))] += len(answer["output_ids"])
    return found


def gap(sequences: Sequence[TrainSequence], log_probs: Sequence[np.ndarray]) -> float | None:
    """Mask-weighted mean |log π_train(y_j) − log π_infer(y_j)| (spec §6.3); None without a loss token."""
    apart = [
        np.abs(mine[s.loss_mask] - s.rollout_log_probs[s.loss_mask])
        for s, mine in zip(sequences, log_probs, strict=True)
    ]
    total = np.concatenate(apart).astype(np.float64) if apart else np.empty(0)
    return float(total.mean()) if total.size else None
