"""Effects of an experiment: contrasts between arms, seeds as replicates, tasks paired (spec §2.4). Pure functions.

A contrast is a weighted sum of arms whose weights are positive for one side, negative for the other, each summing to 1 in
absolute value, so that every effect is in the unit of its outcome.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from stages import statistics as st

DIGITS = 12  # beyond them is rounding: equal effects must be equal numbers
Runs = Mapping[tuple[str, int], float]  # (arm, seed) -> outcome
TaskRates = Mapping[tuple[str, int], Mapping[str, float]]  # (arm, seed) -> task -> rate


class ContrastKind(StrEnum):
    DIFFERENCE = "difference"  # some arms against others
    MAIN = "main effect"  # of one factor, over all levels of the others
    INTERACTION = "interaction"  # how much one factor's effect depends on another's level


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    name: str
    kind: ContrastKind
    weights: Mapping[str, float]  # arm -> weight; arms without one are not in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One contrast of one outcome. What cannot be estimated is None."""

    contrast: Contrast
    by_seed: Mapping[int, float]  # only seeds for which every arm in it is done
    mean: float | None
    over_seeds: (
        st.Interval | None
    )  # t over seeds, not below the noise of tasks: would other seeds show it; None with one
    p_value: float | None  # two-sided t test over seeds
    p_holm: float | None = None  # over the contrasts of one outcome
    over_tasks: st.Interval | None = None  # bootstrap over tasks: is it luck of the tasks, for these very runs
    seeds_needed: int | None = None  # about how many would show the mean seen with power .8
    missing: tuple[int, ...] = ()  # seeds that are left out


def difference(name: str, plus: Sequence[str], minus: Sequence[str]) -> Contrast:
    """Mean of `plus` minus mean of `minus`. Raises ValueError when a side is empty or an arm is on both."""
    if not plus or not minus or set(plus) & set(minus):
        raise ValueError(f"contrast {name}: both sides need arms, and no arm may be on both")
    weights = {arm: 1.0 / len(plus) for arm in plus} | {arm: -1.0 / len(minus) for arm in minus}
    return Contrast(name=name, kind=ContrastKind.DIFFERENCE, weights=weights)


def against_first(arms: Sequence[str]) -> tuple[Contrast, ...]:
    """Every arm minus the first one."""
    return tuple(difference(f"{arm} − {arms[0]}", [arm], [arms[0]]) for arm in arms[1:])


def factorial(factors: Sequence[str], arms: Mapping[str, Sequence[bool]]) -> tuple[Contrast, ...]:
    """Main effects and all interactions of a full 2^k factorial; `arms`: name -> whether each factor is at its second level.

    A main effect is the mean over arms at the second level minus that at the first. An interaction of two is half the
    difference of one's effect between the other's levels, and so on: all weights are ± 1/2^(k−1), the usual definition.
    Raises ValueError when the arms are not every combination once.
    """
    k = len(factors)
    levels = {arm: tuple(at) for arm, at in arms.items()}
    if sorted(levels.values()) != sorted(itertools.product((False, True), repeat=k)):
        raise ValueError("a full factorial has every combination of levels exactly once")
    found = []
    for size in range(1, k + 1):
        for chosen in itertools.combinations(range(k), size):
            weights = {
                arm: math.prod(1.0 if at[i] else -1.0 for i in chosen) / 2 ** (k - 1) for arm, at in levels.items()
            }
            kind = ContrastKind.MAIN if size == 1 else ContrastKind.INTERACTION
            found.append(Contrast(name=" × ".join(factors[i] for i in chosen), kind=kind, weights=weights))
    return tuple(found)


def effect(
    contrast: Contrast,
    runs: Runs,
    seeds: Sequence[int],
    *,
    tasks: TaskRates | None = None,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
) -> Effect:
    """The contrast over the seeds for which all of its arms have a finite outcome.

    `tasks`: rates per task, paired over all arms and seeds of the contrast; tasks that one of them lacks are left out.
    """
    arms = list(contrast.weights)
    complete = [s for s in seeds if all(math.isfinite(runs.get((a, s), math.nan)) for a in arms)]
    by_seed = {s: round(sum(contrast.weights[a] * runs[a, s] for a in arms), DIGITS) + 0.0 for s in complete}  # no −0
    found = Effect(
        contrast=contrast,
        by_seed=by_seed,
        mean=None,
        over_seeds=None,
        p_value=None,
        missing=tuple(s for s in seeds if s not in by_seed),
    )
    if not complete:
        return found
    per_task = _per_task(contrast, tasks, complete) if tasks is not None else None
    noise = 0.0
    if per_task is not None and per_task.shape[1] > 1:  # of one seed's effect, from its tasks
        noise = float(np.sqrt(np.mean(per_task.var(axis=1, ddof=1)) / per_task.shape[1]))
    summary = st.over_seeds(list(by_seed.values()), level=level, noise=noise)
    return replace(
        found,
        mean=round(summary.mean, DIGITS) + 0.0,
        over_seeds=summary.interval,
        p_value=summary.p_value,
        over_tasks=None
        if per_task is None
        else st.bootstrap_mean(per_task.mean(axis=0).round(DIGITS), level=level, resamples=resamples),
        seeds_needed=st.tasks_needed(summary.deviation, summary.mean, level=level) if summary.deviation else None,
    )


def effects(
    contrasts: Sequence[Contrast],
    runs: Runs,
    seeds: Sequence[int],
    *,
    tasks: TaskRates | None = None,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
) -> tuple[Effect, ...]:
    """Every contrast of one outcome, with Holm's correction over them."""
    every = [effect(c, runs, seeds, tasks=tasks, level=level, resamples=resamples) for c in contrasts]
    corrected = st.holm([e.p_value for e in every])
    return tuple(replace(e, p_holm=p) for e, p in zip(every, corrected, strict=True))


def _per_task(contrast: Contrast, tasks: TaskRates, seeds: Sequence[int]) -> np.ndarray | None:
    """The contrast per seed and task, [S, T], over the tasks that every arm and seed has; None when there is none."""
    cells = [(arm, seed) for arm in contrast.weights for seed in seeds]
    common = sorted(set.intersection(*(set(tasks.get(cell, ())) for cell in cells)))
    if not common:
        return None
    return np.array(
        [
            sum(w * np.array([tasks[arm, seed][t] for t in common]) for arm, w in contrast.weights.items())
            for seed in seeds
        ]
    )
