"""Family recalibration: D'_f = c_f · D_f at a phase's start, and the optional online scales (spec §4.5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stages.domain import FamilyScale, Trajectory
from stages.errors import RewardError
from stages.outcomes import BINARY_SUFFIX, Outcomes
from stages.rewards import D_MIN, QUANTILE, Progress, RewardKind, RewardModel, family_quantile, progress_of

FAILURE_SHARE = 0.01  # ours (spec §4.5): this share of a family's failures at R_FDR ≥ 1 means "suppress"
SUPPRESS, KEEP, LIFT = 2.0, 1.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCalibration:
    """Why a family got its multiplier."""

    family: str
    multiplier: float  # c_f
    attempts: int
    failures: int
    high_failures: int  # failures with R_FDR ≥ 1
    median_turns: float
    mean_reward: float  # under FDR with D_f
    suppress: bool  # high-reward failures: c_f = 2 wins
    long_and_low: bool  # long and low-reward: c_f = ½


def family_calibrations(
    scales: Sequence[FamilyScale],
    outcomes: Outcomes | Iterable[Trajectory],
    *,
    failure_share: float = FAILURE_SHARE,
    progress: Progress = Progress.RAW,
) -> tuple[FamilyCalibration, ...]:
    """c_f of every family in `outcomes`, which the actor that enters the phase made (spec §4.5), sorted by name.

    Quartiles are over families with attempts. A family is in the top (bottom) quartile if it reaches the quartile and
    lies beyond the median, so that families that are all alike are in neither. `f/binary` keeps D' = 1 and is left out.
    """
    o = outcomes if isinstance(outcomes, Outcomes) else Outcomes.from_trajectories(outcomes)
    reward = RewardModel(kind=RewardKind.FDR, scales=tuple(scales), progress=progress).score_outcomes(o)
    names = [(i, f) for i, f in enumerate(o.families) if not f.endswith(BINARY_SUFFIX) and (o.family_codes == i).any()]
    if not names:
        return ()
    rows = [o.family_codes == i for i, _ in names]
    turns = np.array([np.median(o.turns[at]) for at in rows])
    mean = np.array([reward[at].mean() for at in rows])
    long_ = (turns >= np.quantile(turns, 0.75)) & (turns > np.median(turns))
    low = (mean <= np.quantile(mean, 0.25)) & (mean < np.median(mean))
    out = []
    for k, (_, family) in enumerate(names):
        failed = rows[k] & ~o.strict
        failures, high = int(failed.sum()), int((reward[failed] >= 1.0).sum())
        suppress = high > 0 and high >= failure_share * failures
        both = bool(long_[k] and low[k])
        out.append(
            FamilyCalibration(
                family=family,
                multiplier=SUPPRESS if suppress else LIFT if both else KEEP,
                attempts=int(rows[k].sum()),
                failures=failures,
                high_failures=high,
                median_turns=float(turns[k]),
                mean_reward=float(mean[k]),
                suppress=suppress,
                long_and_low=both,
            )
        )
    return tuple(sorted(out, key=lambda c: c.family))


def recalibrate(
    scales: Sequence[FamilyScale], calibrations: Sequence[FamilyCalibration], *, d_min: float = D_MIN
) -> tuple[FamilyScale, ...]:
    """D'_f = max(c_f · D_f, d_min); families without a calibration, and `f/binary`, keep their scale (spec §4.3, §4.5).

    Raises RewardError for scales that were recalibrated already: c_f would be applied twice.
    """
    factor = {c.family: c.multiplier for c in calibrations}
    out = []
    for scale in scales:
        if scale.multiplier != 1.0:
            raise RewardError(f"family {scale.family} was recalibrated already (c = {scale.multiplier}); pass D_f")
        c = 1.0 if scale.family.endswith(BINARY_SUFFIX) else factor.get(scale.family, 1.0)
        value = scale.value * c
        floored = value < d_min
        out.append(
            replace(
                scale, value=d_min if floored else value, multiplier=c, floored=floored or (scale.floored and c == 1.0)
            )
        )
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDrift:
    """One online update of a family's scale, and whether it has left the phase's start by more than the limit."""

    family: str
    before: float
    after: float
    at_start: float  # D_f when the phase began
    attempts: int  # of this batch
    alarm: bool  # |after − at_start| / at_start > limit


def scale_drift(
    frozen: Sequence[FamilyScale], fitted: Sequence[FamilyScale], *, limit: float = 0.25
) -> tuple[ScaleDrift, ...]:
    """How far scales that are fitted now have left frozen ones (spec §4.5), for the families of both, by name.

    c_f is taken out of a recalibrated scale, so that levels are compared with levels.
    """
    now = {s.family: s for s in fitted}
    out = []
    for start in sorted(frozen, key=lambda s: s.family):
        if start.family.endswith(BINARY_SUFFIX) or (found := now.get(start.family)) is None:
            continue
        before, after = start.value / start.multiplier, found.value / found.multiplier
        out.append(
            ScaleDrift(
                family=start.family,
                before=before,
                after=after,
                at_start=before,
                attempts=found.attempts,
                alarm=abs(after - before) / before > limit,
            )
        )
    return tuple(out)


class OnlineScales:
    """D ← (1−α)D + α·Q(batch | f), optionally, instead of scales frozen for a phase (spec §4.5).

    A family with fewer than `min_attempts` attempts in a batch keeps its scale. Drift is measured against the phase's
    start, not the last step: with α = .05 no single step could reach .25 and a slow walk would go unseen.
    """

    def __init__(
        self,
        scales: Sequence[FamilyScale],
        *,
        alpha: float = 0.05,
        quantile: float = QUANTILE,
        min_attempts: int = 20,
        drift_limit: float = 0.25,
        d_min: float = D_MIN,
        progress: Progress = Progress.RAW,
        at_start: Sequence[FamilyScale] | None = None,
    ) -> None:
        """`at_start`: the phase's first scales, when these come from a checkpoint in the middle of it."""
        if not 0.0 < alpha <= 1.0:
            raise RewardError(f"alpha {alpha} must lie in (0, 1]")
        self._scales = {s.family: s for s in scales}
        self._start = {s.family: s.value for s in (scales if at_start is None else at_start)}
        self._alpha, self._quantile, self._min_attempts = alpha, quantile, min_attempts
        self._limit, self._d_min, self._progress = drift_limit, d_min, progress

    @property
    def scales(self) -> tuple[FamilyScale, ...]:
        return tuple(self._scales.values())

    def update(self, batch: Outcomes | Iterable[Trajectory]) -> tuple[ScaleDrift, ...]:
        """Moves the scales of the families that this batch has enough attempts of; says how far each has drifted.

        c_f stays applied: the batch's quantile is multiplied by the family's multiplier.
        """
        o = batch if isinstance(batch, Outcomes) else Outcomes.from_trajectories(batch)
        p = progress_of(o, self._progress)
        out = []
        for i, family in enumerate(o.families):
            mine = o.family_codes == i
            n = int(mine.sum())
            if n < self._min_attempts or family.endswith(BINARY_SUFFIX):
                continue
            if family not in self._scales:
                raise RewardError(f"family {family} has no scale to update; profile it before this phase")
            old = self._scales[family]
            level = old.multiplier * family_quantile(p[mine], self._quantile)
            moved = (1.0 - self._alpha) * old.value + self._alpha * level
            new = max(moved, self._d_min)
            if new <= 0.0:
                raise RewardError(f"family {family}: its online scale reached zero; set d_min above 0")
            start = self._start.get(family, old.value)
            self._scales[family] = replace(old, value=new, floored=moved < self._d_min)
            out.append(
                ScaleDrift(
                    family=family,
                    before=old.value,
                    after=new,
                    at_start=start,
                    attempts=n,
                    alarm=abs(new - start) / start > self._limit,
                )
            )
        return tuple(out)
