"""Reward formulas and family scales (spec §4.1-§4.3). Recalibration of the scales: `stages.recalibration` (§4.5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from stages.domain import FamilyScale, Stratum, Trajectory
from stages.errors import RewardError
from stages.outcomes import BINARY_SUFFIX, Outcomes, passed_assertions, reward_family

COUNT_SCALE = 20.0  # S_scale of T1, fixed for a run (spec §4.1)
QUANTILE = 0.90  # spec §4.2
D_MIN = 1.0  # one check, ours (spec §4.2)
MIN_ATTEMPTS = 10  # ours: with fewer, a .90 quantile is one lucky attempt, so the stratum's is borrowed


class RewardKind(StrEnum):
    COUNT = "count"  # passed assertions / 20 (spec §4.1)
    BINARY = "binary"  # the strict outcome
    FDR = "fdr"  # family dense reward (spec §4.2)
    SPR = "spr"  # strict-pass reward (spec §4.3)

    @property
    def needs_scales(self) -> bool:
        return self in (RewardKind.FDR, RewardKind.SPR)


class Progress(StrEnum):
    """What P means (spec §1)."""

    RAW = "raw"  # passed scenario checks
    NET_OF_NOP = "net_of_nop"  # less those that pass when nothing is done


def count_reward(
    assertions: np.ndarray, strict: np.ndarray, has_report: np.ndarray, scale: float = COUNT_SCALE
) -> np.ndarray:
    """passed / S_scale; the binary outcome where the verifier gave no per-check report (spec §4.1). All [N]."""
    return np.where(has_report, assertions / scale, strict.astype(np.float64))


def fdr_reward(progress: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """max(P / D_f, 0) (spec §4.2). Not bounded by 1. Both [N]."""
    return np.maximum(progress / scale, 0.0)


def spr_reward(progress: np.ndarray, strict: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """S + P / (P + D'_f) with P floored at 0 (spec §4.3): failures < 1 ≤ successes < 2. All [N]."""
    p = np.maximum(progress, 0)
    return strict + p / (p + scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """One reward formula with its frozen scales. Raises RewardError at once for scales that cannot be used."""

    kind: RewardKind
    scales: tuple[FamilyScale, ...] = ()
    count_scale: float = COUNT_SCALE
    progress: Progress = Progress.RAW
    _by_family: Mapping[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: dict[str, float] = {}
        for scale in self.scales:
            if not math.isfinite(scale.value) or scale.value <= 0.0:
                raise RewardError(f"family {scale.family}: scale {scale.value} divides by nothing; set d_min above 0")
            if scale.family in table:
                raise RewardError(f"family {scale.family} has two scales; keep one")
            table[scale.family] = scale.value
        if not math.isfinite(self.count_scale) or self.count_scale <= 0.0:
            raise RewardError(f"count_scale must be positive, not {self.count_scale}")
        object.__setattr__(self, "_by_family", table)

    def scale_of(self, family: str) -> float:
        """D_f in checks; 1 for `f/binary`. Raises RewardError for a family that was not profiled."""
        if family.endswith(BINARY_SUFFIX):
            return 1.0
        try:
            return self._by_family[family]
        except KeyError:
            known = ", ".join(sorted(self._by_family)) or "none"
            raise RewardError(f"family {family} has no scale (known: {known}); profile it before this phase") from None

    def score(self, trajectory: Trajectory) -> float:
        """The reward of one attempt. Raises RewardError when it has no verdict: mask it, never score it 0."""
        t = trajectory
        if not t.verdict.counts:
            raise RewardError(f"trajectory {t.id} has verdict {t.verdict.value} and no reward; mask it and count it")
        s = float(t.strict)
        if self.kind is RewardKind.BINARY or (self.kind is RewardKind.COUNT and not t.has_report):
            return s
        if self.kind is RewardKind.COUNT:
            return passed_assertions(t) / self.count_scale
        scale = self.scale_of(reward_family(t.family, t.has_report))
        p = s
        if t.has_report:
            p = float(t.progress - (t.nop_progress if self.progress is Progress.NET_OF_NOP else 0))
        if self.kind is RewardKind.FDR:
            return max(p / scale, 0.0)
        return s + max(p, 0.0) / (max(p, 0.0) + scale)

    def score_or_none(self, trajectory: Trajectory) -> float | None:
        """`score`, or None for an attempt without a verdict."""
        return self.score(trajectory) if trajectory.verdict.counts else None

    def score_outcomes(self, outcomes: Outcomes) -> np.ndarray:
        """Rewards of many attempts at once, float64 [N]; equal to `score` row by row."""
        o = outcomes
        if self.kind is RewardKind.BINARY:
            return o.strict.astype(np.float64)
        if self.kind is RewardKind.COUNT:
            return count_reward(o.assertions, o.strict, o.has_report, self.count_scale)
        scale = np.array([self.scale_of(f) for f in o.families], dtype=np.float64)[o.family_codes]
        p = progress_of(o, self.progress)
        return fdr_reward(p, scale) if self.kind is RewardKind.FDR else spr_reward(p, o.strict, scale)


def progress_of(outcomes: Outcomes, progress: Progress) -> np.ndarray:
    """P of each attempt, int64 [N]. Without a per-check report P = S, whatever the baseline (spec §4.2)."""
    if progress is Progress.RAW:
        return outcomes.progress
    return np.where(outcomes.has_report, outcomes.progress - outcomes.nop_progress, outcomes.progress)


def family_quantile(counts: np.ndarray, quantile: float) -> float:
    """Q of the counts by linear interpolation (spec §4.2). `counts` [N], N ≥ 1."""
    return float(np.quantile(counts, quantile, method="linear"))


def fit_scales(
    profile: Outcomes | Iterable[Trajectory],
    *,
    quantile: float = QUANTILE,
    d_min: float = D_MIN,
    min_attempts: int = MIN_ATTEMPTS,
    progress: Progress = Progress.RAW,
    families: Mapping[str, Stratum] | None = None,
) -> tuple[FamilyScale, ...]:
    """D_f = max(Q(N | f), d_min) of every family in a profiling set (spec §4.2), sorted by name.

    Only attempts with a verdict count. A family with fewer than `min_attempts` of them takes the quantile over all
    attempts of its stratum (its most frequent one), or over the whole set where that is too small as well: ours, and
    recorded in `borrowed_from`. `families`: those that the phase will meet, with their strata, so that one without any
    profiling attempt gets a scale too. Sub-families `f/binary` always have D = 1.
    Raises RewardError, naming the family, for a zero scale (`d_min` = 0), and for an empty profile.
    """
    if not 0.0 < quantile < 1.0 or d_min < 0.0:
        raise RewardError(f"quantile {quantile} must lie in (0, 1) and d_min {d_min} must not be negative")
    o = profile if isinstance(profile, Outcomes) else Outcomes.from_trajectories(profile)
    p = progress_of(o, progress)
    if not len(o):
        raise RewardError(f"no profiling attempt has a verdict ({o.masked} were masked); run the profile phase again")
    strata = np.asarray(o.strata) if o.strata is not None else np.full(len(o), "")
    wanted = dict.fromkeys(o.families)
    wanted.update(dict.fromkeys(families or ()))
    codes = {f: i for i, f in enumerate(o.families)}
    out = []
    for family in sorted(wanted):
        mine = o.family_codes == codes.get(family, -1)
        n = int(mine.sum())
        if family.endswith(BINARY_SUFFIX):
            out.append(FamilyScale(family=family, value=1.0, attempts=n))
            continue
        pool, borrowed = mine, None
        if n < min_attempts:
            stratum = _stratum_of(family, strata[mine], families)
            peers = o.has_report & (strata == stratum)
            pool, borrowed = (
                (peers, f"stratum {stratum}") if peers.sum() >= min_attempts and stratum else (o.has_report, "all")
            )
        if not pool.any():
            continue  # no verifier of this set reports checks: only `f/binary` occurs, with D = 1
        level = family_quantile(p[pool], quantile)
        value = max(level, d_min)
        if value <= 0.0:
            raise RewardError(
                f"family {family}: its .{round(quantile * 100):02d} quantile is {level:g} checks and d_min is {d_min:g}, "
                "so its scale would be zero; set d_min above 0 or profile the family with a stronger actor"
            )
        out.append(FamilyScale(family=family, value=value, attempts=n, floored=level < d_min, borrowed_from=borrowed))
    return tuple(out)


def _stratum_of(family: str, seen: np.ndarray, families: Mapping[str, Stratum] | None) -> str:
    if len(seen):
        names, times = np.unique(seen, return_counts=True)
        return str(names[np.argmax(times)])
    return families[family].value if families and family in families else ""


def floored_families(scales: Sequence[FamilyScale]) -> tuple[str, ...]:
    """Families at the floor, for the phase record (spec §4.2)."""
    return tuple(s.family for s in scales if s.floored)
