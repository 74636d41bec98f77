"""Scores of one evaluation and paired comparisons of two, with everything that makes a number doubtful (spec §8).

Every rate keeps its numerator and denominator. Two conventions are always given: `k / verdicts` (default for tests) and
`k / attempts` (leaderboards: a missing verdict counts as unsolved). The arithmetic is in `stages.statistics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from stages import statistics as st
from stages.domain import Stratum, Verdict
from stages.errors import EvaluationError
from stages.records import EvaluationDone, TaskScore

FEW_TASKS = 10  # ours: below, a bootstrap over tasks is too narrow to be believed


class Convention(StrEnum):
    VERDICTS = "verdicts"  # k / verdicts: attempts without a verdict are left out
    ATTEMPTS = "attempts"  # k / attempts: they count as unsolved (leaderboard convention)


class FlagKind(StrEnum):
    MISSING_VERDICTS = "missing_verdicts"
    UNEQUAL_DENOMINATORS = "unequal_denominators"
    DIFFERENT_SETTINGS = "different_settings"
    SUITE_CHANGED = "suite_changed"  # the digests differ; nothing is compared unless the common tasks are vouched for
    DIFFERENT_SUITES = "different_suites"
    UNPAIRED_TASKS = "unpaired_tasks"
    FEW_TASKS = "few_tasks"
    ONE_ATTEMPT = "one_attempt"  # luck and skill of a task cannot be told apart
    SURPLUS_ATTEMPTS = "surplus_attempts"  # more than k attempts at a task: a trial may have been counted twice
    NO_VARIANCE = "no_variance"  # every task agrees, so nothing tells how sure that is


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    kind: FlagKind
    text: str  # a sentence for the reader of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """passed / of, in one convention."""

    convention: Convention
    passed: int
    of: int
    wilson: st.Interval | None  # clustered by task; None when `of` is 0
    bootstrap: st.Interval | None  # over tasks; None with fewer than 2 tasks, without variance, or in a stratum

    @property
    def value(self) -> float | None:
        return self.passed / self.of if self.of else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationScore:
    """Everything that one evaluation says."""

    suite: str
    suite_digest: str
    checkpoint: str
    tasks: int
    by_verdicts: Rate
    by_attempts: Rate
    first_attempt: int  # tasks solved by their first attempt (spec §8: three readings of n/46, labelled)
    any_attempt: int  # tasks solved by at least one attempt
    all_attempts: int  # tasks solved by every attempt, a missing verdict counting as unsolved
    process_reward: float | None  # passed/all checks, mean over attempts with a verdict; None without check reports
    process_interval: st.Interval | None
    strata: Mapping[str, Rate]  # k / verdicts, in order of difficulty
    families: Mapping[str, Rate]  # k / verdicts, by name
    flags: tuple[Flag, ...] = ()


def _counts(tasks: Sequence[TaskScore], convention: Convention) -> tuple[np.ndarray, np.ndarray]:
    """(passed, of) per task, int64 [T]."""
    passed = np.array([sum(v is Verdict.PASSED for v in t.verdicts) for t in tasks], dtype=np.int64)
    if convention is Convention.ATTEMPTS:
        return passed, np.array([len(t.verdicts) for t in tasks], dtype=np.int64)
    return passed, np.array([sum(v.counts for v in t.verdicts) for t in tasks], dtype=np.int64)


def rate(
    tasks: Sequence[TaskScore],
    convention: Convention,
    *,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
    seed: int = 0,
) -> Rate:
    """Pooled rate of some tasks with its intervals; `resamples` = 0 leaves the bootstrap out."""
    passed, of = _counts(tasks, convention)
    return Rate(
        convention=convention,
        passed=int(passed.sum()),
        of=int(of.sum()),
        wilson=st.clustered_wilson(passed, of, level),
        bootstrap=st.bootstrap_rate(passed, of, level=level, resamples=resamples, seed=seed) if resamples else None,
    )


def _checked(evaluation: EvaluationDone) -> None:
    where = f"evaluation of {evaluation.checkpoint} on {evaluation.suite}"
    if not evaluation.tasks:
        raise EvaluationError(f"{where} has no task; check the suite's folder or the task limit")
    twice = [t for t, n in Counter(t.task_id for t in evaluation.tasks).items() if n > 1]
    if twice:
        raise EvaluationError(
            f"{where}: {len(twice)} tasks occur more than once, first {twice[0]}; merge their attempts"
        )
    bare = [t.task_id for t in evaluation.tasks if not t.verdicts]
    if bare:
        raise EvaluationError(f"{where}: task {bare[0]} has no attempt; leave it out or run it")


def score_evaluation(
    evaluation: EvaluationDone, *, level: float = st.LEVEL, resamples: int = st.RESAMPLES, seed: int = 0
) -> EvaluationScore:
    """Rates, intervals and strata of one evaluation. Raises EvaluationError for an empty suite or a repeated task."""
    _checked(evaluation)
    tasks = evaluation.tasks

    def group(key: str) -> dict[str, list[TaskScore]]:
        out: dict[str, list[TaskScore]] = {}
        for t in tasks:
            out.setdefault(getattr(t, key), []).append(t)
        return out

    strata, families = group("stratum"), group("family")
    order = [s.value for s in Stratum]
    ratios = [
        [p / t.checks_total for v, p in zip(t.verdicts, t.checks_passed, strict=True) if v.counts]
        for t in tasks
        if t.checks_total
    ]
    ratios = [r for r in ratios if r]
    solved = [[v is Verdict.PASSED for v in t.verdicts] for t in tasks]
    return EvaluationScore(
        suite=evaluation.suite,
        suite_digest=evaluation.suite_digest,
        checkpoint=evaluation.checkpoint,
        tasks=len(tasks),
        by_verdicts=rate(tasks, Convention.VERDICTS, level=level, resamples=resamples, seed=seed),
        by_attempts=rate(tasks, Convention.ATTEMPTS, level=level, resamples=resamples, seed=seed),
        first_attempt=sum(s[0] for s in solved),
        any_attempt=sum(any(s) for s in solved),
        all_attempts=sum(all(s) for s in solved),
        process_reward=float(np.mean([x for r in ratios for x in r])) if ratios else None,
        process_interval=st.bootstrap_mean(
            np.array([np.mean(r) for r in ratios]), level=level, resamples=resamples, seed=seed
        ),
        strata={
            s: rate(strata[s], Convention.VERDICTS, level=level, resamples=0)
            for s in sorted(strata, key=lambda s: order.index(s) if s in order else len(order))
        },
        families={f: rate(families[f], Convention.VERDICTS, level=level, resamples=0) for f in sorted(families)},
        flags=tuple(_score_flags(evaluation)),
    )


def _score_flags(evaluation: EvaluationDone, who: str = "") -> list[Flag]:
    flags, tasks = [], evaluation.tasks
    attempts = [len(t.verdicts) for t in tasks]
    missing = sum(not v.counts for t in tasks for v in t.verdicts)
    if missing:
        text = f"{who}{missing} of {sum(attempts)} attempts have no verdict: k / attempts counts them as unsolved, k / verdicts leaves them out"
        flags.append(Flag(kind=FlagKind.MISSING_VERDICTS, text=text))
    if len(set(attempts)) > 1:
        text = f"{who}tasks have {min(attempts)} to {max(attempts)} attempts, so they weigh unequally"
        flags.append(Flag(kind=FlagKind.UNEQUAL_DENOMINATORS, text=text))
    surplus = [t.task_id for t in tasks if len(t.verdicts) > evaluation.k]
    if surplus:
        text = f"{who}{len(surplus)} tasks have more than k = {evaluation.k} attempts, first {surplus[0]}: a trial may be in twice"
        flags.append(Flag(kind=FlagKind.SURPLUS_ATTEMPTS, text=text))
    if max(attempts) == 1:
        text = f"{who}one attempt per task: the interval covers the choice of tasks and luck together"
        flags.append(Flag(kind=FlagKind.ONE_ATTEMPT, text=text))
    if len(tasks) < FEW_TASKS:
        flags.append(Flag(kind=FlagKind.FEW_TASKS, text=f"{who}only {len(tasks)} tasks: read intervals with care"))
    passed, of = _counts(tasks, Convention.VERDICTS)
    rates = (passed / np.maximum(of, 1))[of > 0]
    if len(rates) and rates.min() == rates.max():
        text = f"{who}every task has the rate {rates[0]:.0%}: no bootstrap interval; the Wilson interval counts tasks, not attempts"
        flags.append(Flag(kind=FlagKind.NO_VARIANCE, text=text))
    return flags


# ------------------------------------------------------------------------------------------------ paired comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`after` against `before` on their common tasks. A figure that would mislead is None and a flag says why."""

    suite: str
    before: str  # checkpoint
    after: str
    convention: Convention
    common_tasks: int  # tasks with something to divide by on both sides
    before_rate: float | None  # mean over common tasks
    after_rate: float | None
    difference: float | None  # after − before, mean over common tasks
    interval: st.Interval | None
    p_value: float | None  # paired sign-flip test of the mean difference
    p_holm: float | None = None  # set by `compare_many`
    improved: tuple[str, ...] = ()  # tasks whose rate rose
    worsened: tuple[str, ...] = ()
    flip_p: float | None = None  # exact sign test of improved against worsened (McNemar at one attempt per task)
    detectable: float | None = None  # smallest difference that this many tasks show with power .8
    tasks_needed: int | None = None  # about how many tasks would show the difference seen with power .8
    flags: tuple[Flag, ...] = field(default=())


def compare(
    before: EvaluationDone,
    after: EvaluationDone,
    *,
    convention: Convention = Convention.VERDICTS,
    same_tasks: Collection[str] | None = None,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Paired comparison of two checkpoints on common tasks (issue: statistics).

    When suite name or digest differ, task ids prove nothing, so no difference is given unless `same_tasks` names the
    tasks whose own digests are known to be equal. Raises EvaluationError for an empty suite or a repeated task.
    """
    _checked(before)
    _checked(after)
    flags = _pair_flags(before, after)
    blocked = {f.kind for f in flags} & {FlagKind.SUITE_CHANGED, FlagKind.DIFFERENT_SUITES}
    a, b = {t.task_id: t for t in before.tasks}, {t.task_id: t for t in after.tasks}
    common = sorted(a.keys() & b.keys())
    if same_tasks is not None:
        common = [t for t in common if t in same_tasks]
    elif blocked:
        common = []
    alone = len(a.keys() | b.keys()) - len(common)
    if alone and (same_tasks is not None or not blocked):
        text = f"{alone} tasks are in one evaluation only, or not vouched for, and are left out"
        flags.append(Flag(kind=FlagKind.UNPAIRED_TASKS, text=text))
    pa, na = _counts([a[t] for t in common], convention)
    pb, nb = _counts([b[t] for t in common], convention)
    both = (na > 0) & (nb > 0)
    names = [t for t, ok in zip(common, both.tolist(), strict=True) if ok]
    base = Comparison(
        suite=before.suite,
        before=before.checkpoint,
        after=after.checkpoint,
        convention=convention,
        common_tasks=len(names),
        before_rate=None,
        after_rate=None,
        difference=None,
        interval=None,
        p_value=None,
        flags=tuple(flags),
    )
    if not names:
        return base
    ra, rb = pa[both] / na[both], pb[both] / nb[both]
    d = rb - ra
    d[np.abs(d) < 1e-12] = 0.0
    if d.min() == d.max():
        text = f"every common task differs by the same {d[0]:+.0%}: no interval can be estimated"
        flags.append(Flag(kind=FlagKind.NO_VARIANCE, text=text))
    if len(d) < FEW_TASKS:
        flags.append(Flag(kind=FlagKind.FEW_TASKS, text=f"only {len(d)} common tasks: read the interval with care"))
    improved = tuple(t for t, x in zip(names, d.tolist(), strict=True) if x > 0)
    worsened = tuple(t for t, x in zip(names, d.tolist(), strict=True) if x < 0)
    deviation = float(d.std(ddof=1)) if len(d) > 1 and d.min() != d.max() else 0.0
    return replace(
        base,
        before_rate=float(ra.mean()),
        after_rate=float(rb.mean()),
        difference=float(d.mean()),
        interval=st.bootstrap_mean(d, level=level, resamples=resamples, seed=seed),
        p_value=st.sign_flip_p(d, resamples=resamples, seed=seed),
        improved=improved,
        worsened=worsened,
        flip_p=st.sign_test_p(len(improved), len(worsened)),
        detectable=st.detectable_difference(deviation, len(d), level=level),
        tasks_needed=st.tasks_needed(deviation, float(d.mean()), level=level),
        flags=tuple(flags),
    )


def compare_many(
    pairs: Sequence[tuple[EvaluationDone, EvaluationDone]],
    *,
    convention: Convention = Convention.VERDICTS,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Several comparisons that are read together: `p_holm` holds over all of them."""
    every = [compare(a, b, convention=convention, level=level, resamples=resamples, seed=seed) for a, b in pairs]
    corrected = st.holm([c.p_value for c in every])
    return tuple(replace(c, p_holm=p) for c, p in zip(every, corrected, strict=True))


def choice_optimism(candidates: Sequence[EvaluationDone], *, splits: int = 2000, seed: int = 0) -> st.Optimism | None:
    """What choosing among checkpoints on this suite, instead of the validation suite, would add by luck (spec §2.3).

    Over the tasks that every candidate has a verdict on. None with fewer than 2 candidates or 4 such tasks. Raises
    EvaluationError when the suites differ.
    """
    for e in candidates:
        _checked(e)
    if len({(e.suite, e.suite_digest) for e in candidates}) > 1:
        raise EvaluationError("the candidates were evaluated on different suites or versions; evaluate all on one")
    rows = []
    for e in candidates:
        passed, of = _counts(e.tasks, Convention.VERDICTS)
        rows.append({t.task_id: p / n for t, p, n in zip(e.tasks, passed.tolist(), of.tolist(), strict=True) if n})
    common = sorted(set(rows[0]).intersection(*rows[1:])) if rows else []
    if not common:
        return None
    return st.selection_optimism(np.array([[r[t] for t in common] for r in rows]), splits=splits, seed=seed)


def different_settings(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Harness and sampling settings that differ, name → (a's, b's); None where one side has none."""
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


def _pair_flags(a: EvaluationDone, b: EvaluationDone) -> list[Flag]:
    flags: list[Flag] = []
    for who, e in (("before: ", a), ("after: ", b)):
        flags += [f for f in _score_flags(e, who) if f.kind is not FlagKind.FEW_TASKS]
    if a.suite != b.suite:
        text = f"{a.suite} and {b.suite} are different suites; nothing is compared"
        flags.append(Flag(kind=FlagKind.DIFFERENT_SUITES, text=text))
    elif a.suite_digest != b.suite_digest:
        text = (
            f"suite {a.suite} changed between the evaluations ({a.suite_digest[:12]} and {b.suite_digest[:12]}); "
            "evaluate both checkpoints on one version, or name the tasks that did not change"
        )
        flags.append(Flag(kind=FlagKind.SUITE_CHANGED, text=text))
    attempts_a, attempts_b = (sum(len(t.verdicts) for t in e.tasks) for e in (a, b))
    verdicts_a, verdicts_b = (sum(v.counts for t in e.tasks for v in t.verdicts) for e in (a, b))
    if (attempts_a, verdicts_a) != (attempts_b, verdicts_b):
        text = f"denominators differ: {attempts_a} and {attempts_b} attempts, {verdicts_a} and {verdicts_b} verdicts"
        flags.append(Flag(kind=FlagKind.UNEQUAL_DENOMINATORS, text=text))
    changed = different_settings(a.settings, b.settings)
    if changed:
        text = "settings differ: " + ", ".join(f"{k} {x} and {y}" for k, (x, y) in changed.items())
        flags.append(Flag(kind=FlagKind.DIFFERENT_SETTINGS, text=text))
    return flags
