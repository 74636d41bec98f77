"""Oversampling: which attempts of a step are kept, and what dropping the slow ones does to the batch (spec §7).

More attempts are started than a batch takes; the first to finish are kept. That favours short attempts. Where the surplus
was completed, the shift is kept − all, per step, with an interval over steps.
"""

from __future__ import annotations

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
    started: int  # attempts of all steps
    masked: int  # without a verdict: replaced from the surplus, in no mean
    kept: int
    dropped: tuple[str, ...]  # ids of attempts with a verdict that came too late, step by step
    shifts: tuple[Shift, ...]  # turns, tokens and success first, then families by name


def kept_indices(turns: Sequence[int], counts: Sequence[bool], batch: int) -> list[int]:
    """Indices of the first `batch` attempts with a verdict in finish order (turns, index), sorted."""
    finished = sorted((i for i, c in enumerate(counts) if c), key=lambda i: (turns[i], i))
    return sorted(finished[:batch])


def oversampling_report(
    steps: Sequence[Sequence[Finished]], *, batch: int, level: float = st.LEVEL, seed: int = 0
) -> OversamplingReport:
    """The report over steps whose surplus was completed; each step's attempts in order of index.

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
    families = sorted({a.family for step in used for a in step if a.counts})
    for step in used:
        kept = {step[i].id for i in kept_indices([a.turns for a in step], [a.counts for a in step], batch)}
        every = [a for a in step if a.counts]
        own = [a for a in every if a.id in kept]
        dropped += [a.id for a in every if a.id not in kept]
        kept_count += len(own)
        rows.append(_means(every, own, families))
    return OversamplingReport(
        steps=len(used),
        started=sum(len(step) for step in steps),
        masked=sum(not a.counts for step in steps for a in step),
        kept=kept_count,
        dropped=tuple(dropped),
        shifts=tuple(_shift(name, [row[name] for row in rows], level, seed) for name in rows[0]),
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
