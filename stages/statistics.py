"""Intervals, tests and power for k/n results that are clustered by task. Pure functions on arrays.

Attempts at one task are alike, so tasks are resampled, never attempts. What cannot be estimated is None, never a number
that looks like one. Everything random takes a seed. scipy is imported where it is used: it is slow to load.
Shapes: T tasks, C candidates, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    low: float
    high: float
    level: float  # e.g. .95
    method: str  # "wilson", "wilson clustered by task", "bootstrap over tasks", "t over seeds"


def _z(level: float) -> float:
    from scipy.special import ndtri

    if not 0.0 < level < 1.0:
        raise ValueError(f"level {level} must lie in (0, 1)")
    return float(ndtri(0.5 + level / 2.0))


def wilson(passed: float, of: float, level: float = LEVEL, method: str = "wilson") -> Interval | None:
    """Wilson's score interval of passed/of, for independent attempts. None when `of` is 0."""
    if of <= 0:
        return None
    if not 0 <= passed <= of:
        raise ValueError(f"{passed} passed of {of} is not a rate")
    passed, of = float(passed), float(of)
    z, p = _z(level), passed / of
    centre = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    # at p = 0 and 1 the ends are exactly 0 and 1; rounding must not say otherwise
    low = 0.0 if passed == 0 else max(centre - half, 0.0)
    high = 1.0 if passed == of else min(centre + half, 1.0)
    return Interval(low=low, high=high, level=level, method=method)


def design_effect(passed: np.ndarray, of: np.ndarray) -> float:
    """How much wider the clustered variance of Σ passed / Σ of is than a binomial one, at least 1. Both [T].

    When all attempts agree no variance can be estimated; then whole tasks count as one attempt each: the worst case.
    """
    x, m = np.asarray(passed, dtype=np.float64), np.asarray(of, dtype=np.float64)
    x, m = x[m > 0], m[m > 0]
    if len(m) == 0:
        return 1.0
    n, tasks = m.sum(), len(m)
    p = x.sum() / n
    worst = max(float(n / tasks), 1.0)
    if tasks < 2 or p in (0.0, 1.0):
        return worst
    clustered = tasks / (tasks - 1) * np.sum((x - p * m) ** 2) / n**2
    return max(1.0, float(clustered / (p * (1 - p) / n)))


def clustered_wilson(passed: np.ndarray, of: np.ndarray, level: float = LEVEL) -> Interval | None:
    """Wilson's interval at the effective sample size n / design effect; holds at 0 % and 100 % as well. Both [T]."""
    n = float(np.sum(of))
    if n == 0:
        return None
    effective = n / design_effect(passed, of)
    return wilson(float(np.sum(passed)) / n * effective, effective, level, "wilson clustered by task")


def bootstrap_rate(
    passed: np.ndarray, of: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of Σ passed / Σ of over tasks. Both [T]. None with fewer than 2 tasks or without variance."""
    x, m = np.asarray(passed, dtype=np.float64), np.asarray(of, dtype=np.float64)
    x, m = x[m > 0], m[m > 0]
    if len(m) < 2 or (x / m).min() == (x / m).max():
        return None
    return _bootstrap((x, m), lambda passed, of: passed / of, level, resamples, seed)


def bootstrap_mean(
    values: np.ndarray, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of the mean of one number per task, [T] (a paired difference, a process reward)."""
    v = np.asarray(values, dtype=np.float64)
    if len(v) < 2 or v.min() == v.max():
        return None
    return _bootstrap((v,), lambda total: total / len(v), level, resamples, seed)


def _bootstrap(
    data: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray], level: float, resamples: int, seed: int
) -> Interval:
    """Percentile interval over resampled tasks, [T] each. `statistic` takes the sums of each array over a resample.

    Equal tasks are interchangeable, so a resample is how often each distinct task was drawn: one multinomial draw of a
    few counts instead of T indices. The distribution is the same.
    """
    rows, counts = np.unique(np.stack(data, axis=1), axis=0, return_counts=True)
    draws, batch = np.random.default_rng(seed), max(1, 2_000_000 // len(rows))
    sums = np.concatenate(
        [
            draws.multinomial(counts.sum(), counts / counts.sum(), min(batch, resamples - at)) @ rows
            for at in range(0, resamples, batch)
        ]
    )
    found = np.quantile(statistic(*sums.T), [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(found[0]), high=float(found[1]), level=level, method="bootstrap over tasks")


# ------------------------------------------------------------------------------------------------ paired differences


def sign_flip_p(differences: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> float | None:
    """Two-sided p of mean difference 0 by flipping the sign of each task's difference, [T].

    Exact while 2^T is at most `resamples`, random above. None without a task; 1 when at most one task differs.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) == 0:
        return None
    d = d[d != 0.0]  # a task without a difference has the same value under either sign
    if len(d) < 2:
        return 1.0  # either sign of one difference is as far from 0
    sizes, counts = np.unique(np.abs(d), return_counts=True)
    observed = abs(d.sum()) * (1 - 1e-12)  # a sum of floats that should be equal must not fall short of it
    if 2 ** min(len(d), 60) <= resamples:
        signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
        return float(np.mean(np.abs(signs @ np.abs(d)) >= observed))
    # of c tasks with one size a binomial number keeps its sign
    sums = (2 * np.random.default_rng(seed).binomial(counts, 0.5, (resamples, len(counts))) - counts) @ sizes
    return float((np.count_nonzero(np.abs(sums) >= observed) + 1) / (resamples + 1))


def sign_test_p(improved: int, worsened: int) -> float | None:
    """Exact two-sided sign test of flips; with one attempt per task it is McNemar's exact test. None without a flip."""
    from scipy.special import bdtr

    if improved + worsened == 0:
        return None
    return min(1.0, 2.0 * float(bdtr(min(improved, worsened), improved + worsened, 0.5)))  # symmetric, so both tails


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-corrected p-values, in the order given. A missing one stays missing and is not counted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    out: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        out[i] = highest
    return out


# ------------------------------------------------------------------------------------------------ power


def tasks_needed(deviation: float, difference: float, *, level: float = LEVEL, power: float = 0.8) -> int | None:
    """About how many common tasks a paired comparison needs to see `difference` with the given power.

    `deviation`: standard deviation of the per-task difference. None when either is 0: nothing to estimate from.
    """
    if difference == 0.0 or deviation <= 0.0:
        return None
    z = _z(level) + _z(2.0 * power - 1.0)
    return math.ceil((z * deviation / difference) ** 2)


def detectable_difference(deviation: float, tasks: int, *, level: float = LEVEL, power: float = 0.8) -> float | None:
    """The smallest true difference that `tasks` common tasks would show with the given power."""
    if tasks < 2 or deviation <= 0.0:
        return None
    return (_z(level) + _z(2.0 * power - 1.0)) * deviation / math.sqrt(tasks)


# ------------------------------------------------------------------------------------------------ replicate seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSummary:
    """Independent training seeds of one arm, or of the paired difference of two arms."""

    seeds: int
    mean: float
    deviation: float | None  # sample standard deviation; None with one seed
    interval: Interval | None  # t over seeds; None with one seed or no variance
    p_value: float | None  # two-sided t test of mean 0


def over_seeds(values: Sequence[float], *, level: float = LEVEL, noise: float = 0.0) -> SeedSummary:
    """Mean and t-interval over seeds, [S]. Raises ValueError when empty or not finite.

    `noise`: the standard deviation that each value has in any case, known from within the runs (luck of the tasks). The
    deviation of a few seeds may fall below it by chance, two equal values have none at all; it is then used instead.
    """
    from scipy.stats import t as student

    v = np.asarray(values, dtype=np.float64)
    if len(v) == 0 or not np.isfinite(v).all():
        raise ValueError("seeds need at least one finite value each; leave out the runs that failed and say so")
    mean = float(v.mean())
    if len(v) < 2:
        return SeedSummary(seeds=1, mean=mean, deviation=None, interval=None, p_value=None)
    deviation = max(noise, 0.0 if v.min() == v.max() else float(v.std(ddof=1)))
    if deviation == 0.0:
        return SeedSummary(seeds=len(v), mean=mean, deviation=0.0, interval=None, p_value=None)
    error = deviation / math.sqrt(len(v))
    half = float(student.ppf(0.5 + level / 2.0, len(v) - 1)) * error
    return SeedSummary(
        seeds=len(v),
        mean=mean,
        deviation=deviation,
        interval=Interval(low=mean - half, high=mean + half, level=level, method="t over seeds"),
        p_value=float(2.0 * student.sf(abs(mean) / error, len(v) - 1)),
    )


# ------------------------------------------------------------------------------------------------ choosing on the test


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimism:
    """What choosing the best of several candidates on the reported suite itself would add to its score."""

    best: int  # the candidate that the suite would choose
    apparent: float  # its mean rate on that suite
    optimism: float  # how much of it is luck of the choice
    splits: int

    @property
    def corrected(self) -> float:
        return self.apparent - self.optimism


def selection_optimism(rates: np.ndarray, *, splits: int = 2000, seed: int = 0) -> Optimism | None:
    """Optimism of choosing among candidates on the suite that is reported, [C, T] rates per candidate and task.

    Choose on a random half of the tasks, score on the other half, both against the mean candidate so that easy halves
    cancel. The drop is luck at half the tasks; noise falls as 1/√T, so it is scaled by √½ to the whole suite (too much
    where candidates truly differ, so it errs on the careful side). None with fewer than 2 candidates or 4 tasks.
    """
    r = np.asarray(rates, dtype=np.float64)
    if r.ndim != 2 or not np.isfinite(r).all():
        raise ValueError("rates must be finite numbers [candidates, tasks]; keep the tasks that all candidates have")
    c, t = r.shape
    if c < 2 or t < 4:
        return None
    best = int(np.argmax(r.mean(axis=1)))
    rng = np.random.default_rng(seed)
    excess = r - r.mean(axis=0)
    half = t // 2
    drops = np.empty(splits)
    for i in range(splits):
        order = rng.permutation(t)
        left, right = excess[:, order[:half]].mean(axis=1), excess[:, order[half:]].mean(axis=1)
        chosen = rng.choice(np.flatnonzero(left == left.max()))
        drops[i] = left[chosen] - right[chosen]
    optimism = max(float(drops.mean()) * math.sqrt(0.5), 0.0)
    return Optimism(best=best, apparent=float(r[best].mean()), optimism=optimism, splits=splits)
