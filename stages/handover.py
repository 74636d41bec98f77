"""What summarisation boundaries do to a batch: value gaps, and metrics with and without the hand-over (spec §3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.advantage import Estimator, Handover, SegmentNodes, TimeLimit, TrajectoryAdvantages, trajectory_advantages
from stages.values import EVSums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredAttempt:
    """One attempt as `trajectory_advantages` needs it."""

    segments: tuple[SegmentNodes, ...]
    reward: float | None  # None: no verdict, so it is no sample
    truncated: bool = False


def handover_metrics(
    batch: Sequence[ScoredAttempt],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    estimator: Estimator = Estimator.TB_GAE,
    time_limit: TimeLimit = TimeLimit.TERMINAL,
) -> dict[str, float | None]:
    """Metrics of the attempts that have a summarisation boundary, under every hand-over; {} when none has one.

    `handover/value_gap_mean`, `…_rms`: v_next − V(old prefix), over the boundaries whose old prefix was valued.
    `handover/dropped_rms`: W·A that `value_only` loses, over nodes before a boundary. For each mode:
    `handover/MODE/advantage_mean`, `…/advantage_std`, `…/vf_explained_var`, over all nodes of those attempts.
    """
    several = [a for a in batch if sum(len(s.values) > 0 for s in a.segments) > 1]
    results = {
        mode: [
            trajectory_advantages(
                a.segments,
                reward=a.reward,
                gamma=gamma,
                lam=lam,
                estimator=estimator,
                handover=mode,
                truncated=a.truncated,
                time_limit=time_limit,
            )
            for a in several
        ]
        for mode in Handover
    }
    reports = [(a, r) for a, result in zip(several, results[Handover.FULL], strict=True) for r in result.handovers]
    if not reports:
        return {}
    gaps = np.array([r.value_gap for _, r in reports if r.value_gap is not None])
    sizes = np.array([len(a.segments[r.segment].values) for a, r in reports], dtype=np.float64)
    dropped = np.array([r.dropped_rms for _, r in reports])
    out: dict[str, float | None] = {
        "handover/boundaries": float(len(reports)),
        "handover/value_gap_mean": float(gaps.mean()) if gaps.size else None,
        "handover/value_gap_rms": float(np.sqrt(np.mean(gaps**2))) if gaps.size else None,
        "handover/dropped_rms": float(np.sqrt(np.sum(sizes * dropped**2) / sizes.sum())),
    }
    for mode, done in results.items():
        out.update(_summary(mode, several, done))
    return out


def _summary(
    mode: Handover, attempts: Sequence[ScoredAttempt], results: Sequence[TrajectoryAdvantages]
) -> dict[str, float | None]:
    ev, advantages = EVSums(), []
    for attempt, result in zip(attempts, results, strict=True):
        if result.excluded:
            continue
        for nodes, found in zip(attempt.segments, result.segments, strict=True):
            ev.add(nodes.values, found.returns)
            advantages.append(found.advantages)
    flat = np.concatenate(advantages)
    return {
        f"handover/{mode.value}/advantage_mean": float(flat.mean()),
        f"handover/{mode.value}/advantage_std": float(flat.std()),
        f"handover/{mode.value}/vf_explained_var": ev.value,
    }
