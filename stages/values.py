"""Explained variance of the critic, from sums that can be merged, and the staleness alarm (spec §3.5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stages.domain import Phase
from stages.errors import RewardError


@dataclass(slots=True)
class EVSums:
    """EV = 1 − Var(G − V) / Var(G) over nodes, from mergeable moments (never averaged per rank or micro-batch).

    Moments are kept around the running mean (Chan's update), so that merging in any order loses no digits.
    """

    n: int = 0  # nodes
    mean_g: float = 0.0
    m2_g: float = 0.0  # Σ (G − mean)²
    mean_e: float = 0.0
    m2_e: float = 0.0  # Σ (e − mean)², e = G − V
    min_g: float = math.inf  # min = max is Var(G) = 0 exactly, which rounded sums cannot tell
    max_g: float = -math.inf
    excluded: int = 0  # trajectories left out: masked, or NaN rewards

    def add(self, values: np.ndarray, returns: np.ndarray) -> None:
        """One trajectory's (or segment's) nodes, both [N]. One with a return that is not finite is left out and counted.

        Raises RewardError for a value that is not finite, ValueError for unequal shapes.
        """
        v = np.asarray(values, dtype=np.float64)
        g = np.asarray(returns, dtype=np.float64)
        if v.shape != g.shape:
            raise ValueError(f"values {v.shape} and returns {g.shape} differ in shape")
        if not np.isfinite(g).all():
            self.excluded += 1
            return
        if not np.isfinite(v).all():
            raise RewardError("a critic value is not finite; the critic has diverged")
        if g.size == 0:
            return
        e = g - v
        mg, me = float(g.mean()), float(e.mean())
        self.merge(
            EVSums(
                n=g.size,
                mean_g=mg,
                m2_g=float(((g - mg) ** 2).sum()),
                mean_e=me,
                m2_e=float(((e - me) ** 2).sum()),
                min_g=float(g.min()),
                max_g=float(g.max()),
            )
        )

    def merge(self, other: EVSums) -> None:
        """Adds another rank's, micro-batch's or trajectory's moments to these."""
        self.excluded += other.excluded
        if other.n == 0:
            return
        n = self.n + other.n
        dg, de = other.mean_g - self.mean_g, other.mean_e - self.mean_e
        weight = self.n * other.n / n
        self.m2_g += other.m2_g + dg * dg * weight
        self.m2_e += other.m2_e + de * de * weight
        self.mean_g += dg * other.n / n
        self.mean_e += de * other.n / n
        self.min_g, self.max_g = min(self.min_g, other.min_g), max(self.max_g, other.max_g)
        self.n = n

    @property
    def value(self) -> float | None:
        """EV, or None where it is undefined: no node, or Var(G) = 0."""
        if self.n == 0 or self.min_g == self.max_g or self.m2_g <= 0.0:
            return None
        return 1.0 - self.m2_e / self.m2_g

    def to_row(self) -> list[float]:
        """Eight numbers for an all-gather; `from_rows` merges what came back."""
        return [
            float(self.n),
            self.mean_g,
            self.m2_g,
            self.mean_e,
            self.m2_e,
            self.min_g,
            self.max_g,
            float(self.excluded),
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float]]) -> EVSums:
        total = cls()
        for n, mean_g, m2_g, mean_e, m2_e, min_g, max_g, excluded in rows:
            total.merge(
                cls(
                    n=int(n),
                    mean_g=mean_g,
                    m2_g=m2_g,
                    mean_e=mean_e,
                    m2_e=m2_e,
                    min_g=min_g,
                    max_g=max_g,
                    excluded=int(excluded),
                )
            )
        return total


def explained_variance(values: Iterable[np.ndarray], returns: Iterable[np.ndarray]) -> float | None:
    """Global EV over a batch given trajectory by trajectory (spec §3.5)."""
    sums = EVSums()
    for v, g in zip(values, returns, strict=True):
        sums.add(v, g)
    return sums.value


@dataclass(slots=True)
class EVBreakdown:
    """EV of one batch: global, by family, by turn position (0 first). One per step; the caller knows phase and step."""

    max_turn: int = 31  # later turns share the last cell
    total: EVSums = field(default_factory=EVSums)
    by_family: dict[str, EVSums] = field(default_factory=dict)
    by_turn: dict[int, EVSums] = field(default_factory=dict)

    def add(self, *, family: str, turn_ids: np.ndarray, values: np.ndarray, returns: np.ndarray) -> None:
        """One trajectory's nodes, arrays [N]."""
        self.total.add(values, returns)
        self.by_family.setdefault(family, EVSums()).add(values, returns)
        if not np.isfinite(returns).all():
            return
        position = np.minimum(np.asarray(turn_ids), self.max_turn)
        for turn in np.unique(position).tolist():
            at = position == turn
            self.by_turn.setdefault(int(turn), EVSums()).add(np.asarray(values)[at], np.asarray(returns)[at])

    def merge(self, other: EVBreakdown) -> None:
        self.total.merge(other.total)
        for family, sums in other.by_family.items():
            self.by_family.setdefault(family, EVSums()).merge(sums)
        for turn, sums in other.by_turn.items():
            self.by_turn.setdefault(turn, EVSums()).merge(sums)

    def metrics(self) -> dict[str, float | None]:
        """Flat names for a metrics row: `critic/vf_explained_var`, `…/family/NAME`, `…/turn/07`."""
        out: dict[str, float | None] = {"critic/vf_explained_var": self.total.value}
        out.update({f"critic/vf_explained_var/family/{f}": s.value for f, s in sorted(self.by_family.items())})
        out.update({f"critic/vf_explained_var/turn/{t:02d}": s.value for t, s in sorted(self.by_turn.items())})
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class EVPoint:
    """One batch of the EV curve."""

    phase: Phase  # warm-up, calibrate or joint
    step: int
    value: float | None
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The critic has been worse than a constant for `steps` batches in a row."""

    phase: Phase
    first_step: int
    last_step: int
    steps: int
    lowest: float


def staleness(curve: Sequence[EVPoint], *, patience: int, phases: Sequence[Phase] = (Phase.JOINT,)) -> Staleness | None:
    """The alarm at the end of a curve: EV < 0 in the last `patience` batches of `phases`, or None.

    A batch where EV is undefined neither ends nor lengthens a run. A change of phase ends it: a new reward has new
    returns. Raises ValueError when `patience` < 1.
    """
    if patience < 1:
        raise ValueError("patience counts steps and must be at least 1")
    run: list[EVPoint] = []
    for point in reversed(curve):
        if point.phase not in phases or (run and point.phase != run[-1].phase):
            break
        if point.value is None:
            continue
        if point.value >= 0.0:
            break
        run.append(point)
    if len(run) < patience:
        return None
    lowest = min(p.value for p in run if p.value is not None)
    return Staleness(phase=run[0].phase, first_step=run[-1].step, last_step=run[0].step, steps=len(run), lowest=lowest)


def by_phase(curve: Iterable[EVPoint]) -> Mapping[Phase, tuple[EVPoint, ...]]:
    """The curve's points per phase, in order, for a chart that marks warm-up, calibration and joint updates."""
    out: dict[Phase, list[EVPoint]] = {}
    for point in curve:
        out.setdefault(point.phase, []).append(point)
    return {phase: tuple(points) for phase, points in out.items()}
