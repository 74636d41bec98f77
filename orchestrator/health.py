"""Training health of one stage: spec §5's per-step log, its limits, and where they were broken. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.store.metrics import Point
from stages.alarms import DEFAULT_ALARMS, alarms
from stages.certificate import GAP, REPLAYED, boundary_metric
from stages.domain import Boundary, Phase

# What spec §5 and §3.5 ask to be logged each step, in the order of the panel.
WATCHED = (
    ("EV of the critic", "critic/vf_explained_var"),
    ("ratio, 99th percentile", "train/ratio_p99"),
    ("ratio, largest", "train/ratio_max"),
    ("clipped below, A > 0", "train/clip_low_positive"),
    ("clipped below, A < 0", "train/clip_low_negative"),
    ("clipped above, A > 0", "train/clip_high_positive"),
    ("clipped above, A < 0", "train/clip_high_negative"),
    ("KL (k3)", "train/ppo_kl"),
    ("entropy", "train/entropy"),
    ("policy loss", "train/pg_loss"),
    ("gradient norm of the actor", "actor/grad_norm"),
    ("gradient norm of the critic", "critic/grad_norm"),
    ("advantage, mean", "train/advantage_mean"),
    ("advantage, deviation", "train/advantage_std"),
    ("value loss", "critic/value_loss"),
    ("values clipped", "critic/value_clip_fraction"),
    ("gap to the sampler's log-probs", GAP),
    ("reward, mean", "rollout/reward_mean"),
    ("success", "rollout/success"),
    ("tokens an attempt", "rollout/tokens_mean"),
    ("turns an attempt", "rollout/turns_mean"),
    ("truncated share", "rollout/truncated"),
    ("masked attempts", "rollout/masked"),
)

# The consistency certificate of a step (spec §6), in the order of its table.
CERTIFIED = (
    ("drifted tokens", "rollout/drift_tokens"),
    ("loss tokens", "rollout/loss_tokens"),
    ("strict prefix", boundary_metric(Boundary.STRICT_PREFIX)),
    ("trimmed", boundary_metric(Boundary.TRIMMED)),
    ("re-tokenised", boundary_metric(Boundary.RETOKENISED)),
    ("new chunk", boundary_metric(Boundary.NEW_CHUNK)),
    ("gap before update", GAP),
    ("routes given", "rollout/routed_token_share"),
    ("routes replayed", REPLAYED),
    ("weight versions", "rollout/weight_versions"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedStep:
    """One step's certificate: values in the order of `CERTIFIED`; None: not measured, or a dense model's routes."""

    stage: str
    phase: Phase
    step: int
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One metric over the steps of a stage. A step without the metric does not count."""

    label: str
    metric: str
    last: float | None
    low: float | None
    high: float | None
    limit: float | None  # an alarm above it; inf: when not finite; None: watched without a limit
    stops: bool  # the alarm stops the phase
    broken: Sequence[str]  # "joint 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """What the stage shows about tokens in, tokens out (spec §6): summed or worst over its steps."""

    steps: int
    drift_tokens: float | None  # must be 0
    largest_gap: float | None
    route_flips: float | None  # largest share; None: no mixture of experts
    replayed: float | None  # smallest share of tokens with the sampler's routes


def health(points: Sequence[Point]) -> list[Watched]:
    """Rows of `WATCHED` that the stage has logged. `points`: of one stage, in order."""
    limits = {rule.metric: rule for rule in DEFAULT_ALARMS}
    rows = []
    for label, metric in WATCHED:
        mine = [p for p in points if p.name == metric]
        values = [p.value for p in mine if p.value is not None]
        if not values:
            continue
        finite = [v for v in values if math.isfinite(v)]
        rule = limits.get(metric)
        rows.append(
            Watched(
                label=label,
                metric=metric,
                last=values[-1],
                low=min(finite, default=None),
                high=max(finite, default=None),
                limit=rule.limit if rule else None,
                stops=rule.stop if rule else False,
                broken=[f"{p.phase.value} {p.step}" for p in mine if alarms({metric: p.value})],
            )
        )
    return rows


def consistency(points: Sequence[Point]) -> Consistency | None:
    """None when no step has compared anything."""

    def of(name: str) -> list[float]:
        return [p.value for p in points if p.name == name and p.value is not None]

    drift, gaps = of("rollout/drift_tokens"), of(GAP)
    flips, replayed = of("train/route_flip_share"), of(REPLAYED)
    if not drift and not gaps:
        return None
    return Consistency(
        steps=max(len(drift), len(gaps)),
        drift_tokens=sum(drift) if drift else None,
        largest_gap=max(gaps, default=None),
        route_flips=max(flips, default=None),
        replayed=min(replayed, default=None),
    )


def certificates(points: Sequence[Point]) -> list[CertifiedStep]:
    """The certificates of local steps, in the order in which the steps were done."""
    found: dict[tuple[str, Phase, int], dict[str, float | None]] = {}
    for p in points:
        found.setdefault((p.stage, p.phase, p.step), {})[p.name] = p.value
    return [
        CertifiedStep(stage=stage, phase=phase, step=step, values=tuple(values.get(name) for _, name in CERTIFIED))
        for (stage, phase, step), values in found.items()
        if values.get("rollout/drift_tokens") is not None
    ]
