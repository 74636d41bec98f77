"""Outcomes of many attempts as columns: what a reward formula, a family scale or an audit needs (spec §4).

N attempts with a verdict. Attempts without one are left out and counted, never scored 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.domain import CheckStatus, Stratum, Trajectory
from stages.errors import RewardError

BINARY_SUFFIX = "/binary"


def reward_family(family: str, has_report: bool) -> str:
    """A task without a per-check report belongs to the sub-family `f/binary` (spec §4.2)."""
    return family if has_report else family + BINARY_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """Columns of equal length N. Make them with `Outcomes.of` or `Outcomes.from_trajectories`, which check them."""

    families: tuple[str, ...]  # distinct names; `f/binary` for attempts without a per-check report
    family_codes: np.ndarray  # int32 [N], index into families
    strict: np.ndarray  # bool [N], S
    progress: np.ndarray  # int64 [N], P: passed scenario checks; S where there is no report
    assertions: np.ndarray  # int64 [N], passed checks, gates included (the T1 count)
    nop_progress: np.ndarray  # int64 [N], scenario checks that pass when nothing is done
    has_report: np.ndarray  # bool [N]
    only_gate_failed: np.ndarray  # bool [N], passed every executed scenario check but not the gate (spec §4.4)
    turns: np.ndarray  # int64 [N]
    strata: tuple[str, ...] | None = None  # stratum of each attempt, if known
    ids: tuple[str, ...] | None = None
    masked: int = 0  # attempts left out for lack of a verdict

    def __len__(self) -> int:
        return len(self.family_codes)

    def family_of(self, row: int) -> str:
        return self.families[int(self.family_codes[row])]

    def id_of(self, row: int) -> str:
        return str(row) if self.ids is None else self.ids[row]

    @classmethod
    def of(
        cls,
        *,
        family: Sequence[str],
        progress: Sequence[float] | np.ndarray,
        strict: Sequence[float] | np.ndarray,
        assertions: Sequence[float] | np.ndarray | None = None,
        nop_progress: Sequence[float] | np.ndarray | None = None,
        has_report: Sequence[bool] | np.ndarray | None = None,
        only_gate_failed: Sequence[bool] | np.ndarray | None = None,
        turns: Sequence[float] | np.ndarray | None = None,
        strata: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        masked: int = 0,
    ) -> Outcomes:
        """Checks and encodes columns of length N. `assertions` defaults to `progress`, the others to "none" or 0.

        Raises RewardError for NaN, negative or fractional counts, an outcome other than 0 or 1, unequal lengths, or an
        attempt that occurs twice.
        """
        n = len(family)
        p = _counts("progress", progress, n)
        s = _flags("strict", strict, n)
        report = _flags("has_report", has_report, n, default=True)
        a = p if assertions is None else _counts("assertions", assertions, n)
        if not report.all():
            p = np.where(report, p, s)  # one scenario check equal to the outcome (spec §4.2)
            family = [reward_family(f, r) for f, r in zip(family, report.tolist(), strict=True)]
        index: dict[str, int] = {}
        codes = np.fromiter((index.setdefault(f, len(index)) for f in family), dtype=np.int32, count=n)
        for name, column in (("ids", ids), ("strata", strata)):
            if column is not None and len(column) != n:
                raise RewardError(f"column {name} has {len(column)} entries for {n} attempts")
        if ids is not None and len(set(ids)) != n:
            twice = sorted(i for i, times in Counter(ids).items() if times > 1)
            raise RewardError(
                f"{len(twice)} attempts occur more than once, first {', '.join(twice[:3])}; "
                "remove the duplicates, or every share and mean is weighted by them"
            )
        return cls(
            families=tuple(index),
            family_codes=codes,
            strict=s,
            progress=p,
            assertions=a,
            nop_progress=_counts("nop_progress", nop_progress, n, default=0),
            has_report=report,
            only_gate_failed=_flags("only_gate_failed", only_gate_failed, n, default=False),
            turns=_counts("turns", turns, n, default=0),
            strata=None if strata is None else tuple(strata),
            ids=None if ids is None else tuple(ids),
            masked=masked,
        )

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> Outcomes:
        """Columns of the trajectories that have a verdict; the others are counted in `masked`."""
        every = list(trajectories)
        kept = [t for t in every if t.verdict.counts]
        return cls.of(
            family=[t.family for t in kept],
            progress=[t.progress for t in kept],
            strict=[t.strict for t in kept],
            assertions=[passed_assertions(t) for t in kept],
            nop_progress=[t.nop_progress for t in kept],
            has_report=[t.has_report for t in kept],
            only_gate_failed=[t.only_gate_failed for t in kept],
            turns=[len(t.turns) for t in kept],
            strata=[Stratum(t.stratum).value for t in kept],
            ids=[t.id for t in kept],
            masked=len(every) - len(kept),
        )


def passed_assertions(trajectory: Trajectory) -> int:
    """Every passed check, gates included: what the T1 count counts (spec §1, §4.1)."""
    return sum(c.status is CheckStatus.PASSED for c in trajectory.checks)


def _column(name: str, values: Sequence[float] | np.ndarray | None, n: int, default: float | None) -> np.ndarray:
    if values is None:
        return np.full(n, default)
    column = np.asarray(values)
    if column.shape != (n,):
        raise RewardError(f"column {name} has {len(column)} entries for {n} attempts")
    return column


def _counts(name: str, values: Sequence[float] | np.ndarray | None, n: int, default: int | None = None) -> np.ndarray:
    column = _column(name, values, n, default)
    if column.dtype.kind not in "iu":
        column = column.astype(np.float64)
        bad = ~np.isfinite(column) | (column != np.floor(column))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise RewardError(f"{name} of attempt {row} is {column[row]}, not a count; mask or repair the attempt")
    column = column.astype(np.int64)
    if n and column.min() < 0:
        raise RewardError(f"{name} of attempt {int(np.argmin(column))} is negative")
    return column


def _flags(name: str, values: Sequence[float] | np.ndarray | None, n: int, default: bool | None = None) -> np.ndarray:
    column = _column(name, values, n, default)
    if column.dtype == np.bool_:
        return column
    bad = ~np.isin(column, (0, 1))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise RewardError(
            f"{name} of attempt {row} is {column[row]}, neither 0 nor 1; an attempt without verdict is masked"
        )
    return column.astype(bool)
