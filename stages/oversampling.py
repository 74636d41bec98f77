"""Oversampling: which attempts of a step are kept, and what dropping the slow ones does to the batch (spec §7).

More attempts are started than a batch takes; the first to finish are kept and the others are cancelled. That favours short
attempts. Every n-th step the surplus is completed all the same, off the training path: there the shift is kept − all, per
step, with an interval over steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages import statistics as st
from stages.errors import EvaluationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One completed attempt of a step."""

    id: str
    family: str
    turns: int
    tokens: int  # sampled
    passed: bool
    counts: bool  # it has a verdict
    cut: bool = False  # cancelled because the batch was full


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """kept − all of one quantity, mean over steps."""

    name: str  # "turns", "tokens", "success", or "family NAME" (its share of the batch)
    all_mean: float
    shift: float
    interval: st.Interval | None  # over steps; None with one step or without variance


@dataclass(frozen=True, slots=True, kw_only=True)
class OversamplingReport:
    steps: int
    completed: int  # of these, steps whose surplus ran to its end: they tell the shift
    started: int  # attempts of all steps
    masked: int  # without a verdict: replaced from the surplus, in no mean
    kept: int
    dropped: tuple[str, ...]  # ids of attempts that came too late, cancelled or completed, step by step
    shifts: tuple[Shift, ...]  # turns, tokens and success first, then families by name; () without a completed step


class Race:
    """Which attempts of a step can still be kept, while they run.

    An attempt is lost once a whole batch with verdicts finished before it possibly can. Waves are given up only when all
    their attempts are lost: what is kept was sampled as if nothing had been cancelled, so timing decides no batch.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._ended: list[tuple[int, int]] = []  # (turns, index), sorted
        self._finished: list[tuple[int, int]] = []  # those with a verdict

    def ended(self, turns: int, index: int) -> None:
        """An attempt has ended; its verdict is under way."""
        insort(self._ended, (turns, index))

    def finished(self, turns: int, index: int) -> None:
        """An attempt has its verdict, and it counts."""
        insort(self._finished, (turns, index))

    def may_be_lost(self, turns: int, index: int) -> bool:
        """Whether an attempt that has made `turns` turns and still runs is lost if all verdicts under way count."""
        return bisect_left(self._ended, (turns, index)) >= self._batch

    def lost(self, turns: int, index: int) -> bool:
        """Whether an attempt that has made `turns` turns and still runs cannot be kept any more."""
        return bisect_left(self._finished, (turns, index)) >= self._batch


def kept_indices(turns: Sequence[int], counts: Sequence[bool], batch: int) -> list[int]:
    """Indices of the first `batch` attempts with a verdict in finish order (turns, index), sorted."""
    finished = sorted((i for i, c in enumerate(counts) if c), key=lambda i: (turns[i], i))
    return sorted(finished[:batch])


def oversampling_report(
    steps: Sequence[Sequence[Finished]], *, batch: int, level: float = st.LEVEL, seed: int = 0
) -> OversamplingReport:
    """The report over steps; each step's attempts in order of index. Steps with a cancelled attempt tell no shift.

    Raises EvaluationError without a step that has an attempt with a verdict, ValueError for `batch` < 1.
    """
    if batch < 1:
        raise ValueError("batch counts attempts and must be at least 1")
    used = [step for step in steps if any(a.counts for a in step)]
    if not used:
        raise EvaluationError("no step has an attempt with a verdict; oversampling cannot be judged")
    dropped: list[str] = []
    kept_count = 0
    rows: list[dict[str, tuple[float, float]]] = []
    complete = [step for step in used if not any(a.cut for a in step)]
    families = sorted({a.family for step in complete for a in step if a.counts})
    for step in used:
        kept = {step[i].id for i in kept_indices([a.turns for a in step], [a.counts for a in step], batch)}
        dropped += [a.id for a in step if (a.counts or a.cut) and a.id not in kept]
        kept_count += len(kept)
        if not any(a.cut for a in step):
            every = [a for a in step if a.counts]
            rows.append(_means(every, [a for a in every if a.id in kept], families))
    return OversamplingReport(
        steps=len(used),
        completed=len(complete),
        started=sum(len(step) for step in steps),
        masked=sum(not a.counts and not a.cut for step in steps for a in step),
        kept=kept_count,
        dropped=tuple(dropped),
        shifts=tuple(_shift(name, [row[name] for row in rows], level, seed) for name in rows[0]) if rows else (),
    )


def _means(
    every: Sequence[Finished], own: Sequence[Finished], families: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """name -> (mean of all, mean of the kept)."""

    def of(values: Sequence[float], kept: Sequence[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.mean(kept))

    out = {
        "turns": of([a.turns for a in every], [a.turns for a in own]),
        "tokens": of([a.tokens for a in every], [a.tokens for a in own]),
        "success": of([a.passed for a in every], [a.passed for a in own]),
    }
    for f in families:
        out[f"family {f}"] = of([a.family == f for a in every], [a.family == f for a in own])
    return out


def _shift(name: str, means: Sequence[tuple[float, float]], level: float, seed: int) -> Shift:
    differences = np.array([kept - every for every, kept in means])
    differences[np.abs(differences) < 1e-12] = 0.0
    return Shift(
        name=name,
        all_mean=float(np.mean([every for every, _ in means])),
        shift=float(differences.mean()),
        interval=st.bootstrap_mean(differences, level=level, seed=seed),
    )
