"""Reward audit: the same trajectories, their outcomes unchanged, under several formulas (spec §4.4).

Columns in, report out; nothing is sampled and nothing is stored. N attempts, F families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from stages.errors import RewardError
from stages.outcomes import Outcomes
from stages.rewards import RewardModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """One formula over one group of attempts. A mean or share without anything to divide by is None, never 0."""

    attempts: int
    successes: int
    reward_sum: float  # Σ R
    failure_reward_sum: float  # Σ_fail R
    failures_at_or_above_one: int  # failures with R ≥ 1
    gate_only_failures: int  # passed every executed scenario check, but not the gate
    largest_failure: float | None

    @property
    def failures(self) -> int:
        return self.attempts - self.successes

    @property
    def failure_share(self) -> float | None:
        """Σ_fail R / Σ R, the failures' share of reward mass."""
        return self.failure_reward_sum / self.reward_sum if self.reward_sum > 0.0 else None

    @property
    def mean_success(self) -> float | None:
        return (self.reward_sum - self.failure_reward_sum) / self.successes if self.successes else None

    @property
    def mean_failure(self) -> float | None:
        return self.failure_reward_sum / self.failures if self.failures else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormulaAudit:
    """One formula's result."""

    label: str
    model: RewardModel
    overall: RewardSummary
    by_family: Mapping[str, RewardSummary]  # sorted by name
    failures_at_or_above_one: np.ndarray  # int64, rows, the highest reward first
    gate_only_failures: np.ndarray  # int64, rows, the highest reward first
    rewards: np.ndarray  # float64 [N]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardAudit:
    """Several formulas on one fixed set."""

    outcomes: Outcomes
    formulas: tuple[FormulaAudit, ...]

    def __getitem__(self, label: str) -> FormulaAudit:
        return next(f for f in self.formulas if f.label == label)

    def rows(self) -> Iterator[dict[str, float | int | str | None]]:
        """One row per formula and group ("" = overall), for a table or CSV."""
        for formula in self.formulas:
            for family, s in [("", formula.overall), *formula.by_family.items()]:
                yield {
                    "formula": formula.label,
                    "kind": formula.model.kind.value,
                    "family": family,
                    "attempts": s.attempts,
                    "successes": s.successes,
                    "reward_sum": s.reward_sum,
                    "failure_reward_sum": s.failure_reward_sum,
                    "failure_share": s.failure_share,
                    "mean_success": s.mean_success,
                    "mean_failure": s.mean_failure,
                    "failures_at_or_above_one": s.failures_at_or_above_one,
                    "gate_only_failures": s.gate_only_failures,
                    "largest_failure": s.largest_failure,
                }


def histogram(audit: RewardAudit, formula: FormulaAudit, *, bins: int = 48) -> dict[str, list[float]]:
    """Passes and failures by reward, in equal bins from 0 to the largest reward of any formula, so that they compare."""
    high = max(1.0, *(float(f.rewards.max()) for f in audit.formulas))
    edges = np.linspace(0.0, high, bins + 1)
    strict = audit.outcomes.strict
    return {
        "edges": edges.tolist(),
        "passed": np.histogram(formula.rewards[strict], edges)[0].tolist(),
        "failed": np.histogram(formula.rewards[~strict], edges)[0].tolist(),
    }


def rescore(outcomes: Outcomes, models: Mapping[str, RewardModel]) -> RewardAudit:
    """Re-scores a fixed set under every formula of `models` (label → formula), overall and per family (spec §4.4).

    Raises RewardError when the set is empty, no formula is given, or a family has no scale.
    """
    refuse_empty(outcomes)
    if not models:
        raise RewardError("no formula to audit; name at least one of count, binary, fdr, spr")
    return RewardAudit(
        outcomes=outcomes, formulas=tuple(_one(outcomes, label, model) for label, model in models.items())
    )


def refuse_empty(outcomes: Outcomes) -> None:
    """Raises RewardError for a set without a verdict."""
    if not len(outcomes):
        raise RewardError(
            f"no attempt with a verdict to audit ({outcomes.masked} were masked); choose a set with finished attempts"
        )


def _one(o: Outcomes, label: str, model: RewardModel) -> FormulaAudit:
    reward = model.score_outcomes(o)
    failed = ~o.strict
    high = failed & (reward >= 1.0)
    gate = failed & o.only_gate_failed
    f = len(o.families)

    def per_family(weights: np.ndarray) -> np.ndarray:
        return np.bincount(o.family_codes, weights=weights, minlength=f)

    attempts = np.bincount(o.family_codes, minlength=f)
    totals, failure_totals = per_family(reward), per_family(np.where(failed, reward, 0.0))
    passes, highs, gates = per_family(o.strict), per_family(high), per_family(gate)
    largest = np.full(f, -np.inf)
    np.maximum.at(largest, o.family_codes[failed], reward[failed])
    families = {
        name: RewardSummary(
            attempts=int(attempts[i]),
            successes=int(passes[i]),
            reward_sum=float(totals[i]),
            failure_reward_sum=float(failure_totals[i]),
            failures_at_or_above_one=int(highs[i]),
            gate_only_failures=int(gates[i]),
            largest_failure=float(largest[i]) if np.isfinite(largest[i]) else None,
        )
        for i, name in sorted(enumerate(o.families), key=lambda pair: pair[1])
    }
    overall = RewardSummary(
        attempts=len(o),
        successes=int(o.strict.sum()),
        reward_sum=float(reward.sum()),
        failure_reward_sum=float(reward[failed].sum()),
        failures_at_or_above_one=int(high.sum()),
        gate_only_failures=int(gate.sum()),
        largest_failure=float(reward[failed].max()) if failed.any() else None,
    )
    return FormulaAudit(
        label=label,
        model=model,
        overall=overall,
        by_family=families,
        failures_at_or_above_one=_highest_first(high, reward),
        gate_only_failures=_highest_first(gate, reward),
        rewards=reward,
    )


def _highest_first(mask: np.ndarray, reward: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(mask)
    return rows[np.argsort(-reward[rows], kind="stable")]
