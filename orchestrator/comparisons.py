"""Checkpoints compared on stored evaluations: which evaluations belong together, and what they say (spec §8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import combinations

from orchestrator import models as m
from orchestrator.memo import Memo
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from stages import comparison as c
from stages import statistics as st
from stages.errors import ConfigError, StoreError
from stages.records import EvaluationDone
from stages.reference_rows import FOUR_SUITES, four_suite_mean

# Evaluations never change in place (`_key`), so what was computed from them holds. About 0.5 MB per 500 tasks.
_SCORED: Memo[tuple[EvaluationDone, c.EvaluationScore]] = Memo(64)
_COMPARED: Memo[c.Comparison] = Memo(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One checkpoint's evaluation on one suite."""

    checkpoint: m.Checkpoint
    label: str  # its name, with cycle and number where names repeat
    stored: m.Evaluation
    evaluation: EvaluationDone
    score: c.EvaluationScore
    older: int  # other stored evaluations of this checkpoint on this suite, which were not used


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """Every checkpoint on one suite, in the order asked for, and the comparisons, `p_holm` over all of the report."""

    suite: str
    measured: tuple[Measured, ...]
    missing: tuple[str, ...]  # checkpoints without an evaluation on this suite
    comparisons: tuple[c.Comparison, ...]
    references: tuple[m.ReferenceRow, ...]  # published figures: reference only


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    suites: tuple[SuiteReport, ...]
    four_suite_means: dict[str, float | None]  # checkpoint -> %, None unless all four suites were measured


def checkpoint_named(store: Store, reference: str) -> m.Checkpoint:
    """A checkpoint by number, CYCLE/NAME, digest, or the name of an imported one. Raises StoreError, naming the options."""
    if (imported := store.checkpoints.named(None, reference)) is not None:
        return imported
    if reference.isdecimal() and len(reference) < 8:
        return store.checkpoints.get(int(reference))
    cycle, slash, name = reference.partition("/")
    if slash and cycle.isdecimal() and len(cycle) < 10:
        for row in store.checkpoints.of_cycle(int(cycle), candidates=True):
            if row.name.lower() == name.lower():
                return row
        raise StoreError(f"Cycle {cycle} has no checkpoint {name!r}. `rsi checkpoint list --cycle {cycle}` shows them.")
    found = store.checkpoints.with_digest(reference) if len(reference) >= 8 and reference.isalnum() else []
    if len(found) == 1:
        return found[0]
    raise StoreError(
        f"No checkpoint {reference!r}{' alone' if found else ''}: name it by number, CYCLE/NAME, its digest, or the name of "
        "an imported one. `rsi checkpoint list` shows them."
    )


def compare_checkpoints(
    store: Store,
    references: Sequence[str],
    *,
    suite: str | None = None,
    all_pairs: bool = False,
    convention: c.Convention = c.Convention.VERDICTS,
    level: float = st.LEVEL,
    resamples: int = st.RESAMPLES,
    seed: int = 0,
) -> Report:
    """Each checkpoint against the first one, or all pairs, on every suite that at least two of them share.

    Of several evaluations of a checkpoint on a suite, the newest on the version that most of them were measured on is
    used. Raises ConfigError for fewer than two checkpoints or none measured, StoreError for an unknown one.
    """
    rows = [checkpoint_named(store, r) for r in references]
    ids = [row.id for row in rows if row.id is not None]
    if len(set(ids)) != len(references) or len(ids) < 2:
        raise ConfigError("name at least two different checkpoints; `rsi checkpoint list` shows them")
    queries = AnalysisQueries(store)
    suites = [suite] if suite is not None else list(queries.suites_of(ids))
    labels = _labels(rows)
    by_suite = {name: _measured(queries, rows, labels, name, level, resamples, seed) for name in suites}
    if not any(by_suite.values()):
        where = f"on {suite}" if suite else "on any suite"
        raise ConfigError(
            f"none of these checkpoints was evaluated {where}; `rsi evaluate` or `rsi import harbor` does it"
        )
    pairs = [
        (name, a, b) for name, own in by_suite.items() for a, b in (combinations(own, 2) if all_pairs else _first(own))
    ]
    compared = [_compare(queries, a, b, convention, level, resamples, seed) for _, a, b in pairs]
    corrected = st.holm([x.p_value for x in compared])
    compared = [replace(x, p_holm=p) for x, p in zip(compared, corrected, strict=True)]
    rates = {name: {x.label: x.score.by_verdicts.value for x in own} for name, own in by_suite.items()}
    return Report(
        suites=tuple(
            SuiteReport(
                suite=name,
                measured=tuple(own),
                missing=tuple(label for label in labels if label not in {x.label for x in own}),
                comparisons=tuple(x for x, (at, _, _) in zip(compared, pairs, strict=True) if at == name),
                references=tuple(store.references.list(suite=name)),
            )
            for name, own in by_suite.items()
        ),
        four_suite_means={label: _four(rates, label) for label in labels},
    )


def _labels(rows: Sequence[m.Checkpoint]) -> list[str]:
    names = Counter(row.name for row in rows)
    return [
        row.name
        if names[row.name] == 1
        else f"{row.name} ({f'cycle {row.cycle_id}, ' if row.cycle_id else ''}{row.id})"
        for row in rows
    ]


def chosen(rows: Sequence[m.Evaluation]) -> dict[tuple[str, int], m.Evaluation]:
    """(suite, checkpoint id) -> the evaluation that speaks for it, of `rows` with the newest first.

    Of several it is the newest on the suite's version that most checkpoints were measured on.
    """
    shared = Counter((s, d) for _, s, d in {(e.checkpoint_id, e.suite, e.suite_digest) for e in rows})
    newest = {(e.suite, e.suite_digest): e.id or 0 for e in reversed(rows)}

    def rank(e: m.Evaluation) -> tuple[int, int, int]:
        version = (e.suite, e.suite_digest)
        return shared[version], newest[version], e.id or 0

    out: dict[tuple[str, int], m.Evaluation] = {}
    for e in rows:
        key = (e.suite, e.checkpoint_id or 0)
        if key not in out or rank(e) > rank(out[key]):
            out[key] = e
    return out


def _measured(
    queries: AnalysisQueries,
    rows: Sequence[m.Checkpoint],
    labels: Sequence[str],
    suite: str,
    level: float,
    resamples: int,
    seed: int,
) -> list[Measured]:
    found = queries.evaluation_rows([row.id for row in rows if row.id is not None], suite)
    speak = chosen(found)
    known = {_key(e): _SCORED.get((_key(e), level, resamples, seed)) for e in speak.values()}
    records = queries.records([e for e in speak.values() if known[_key(e)] is None])
    for e in speak.values():
        if (record := records.get(e.id or 0)) is not None:
            score = c.score_evaluation(record, level=level, resamples=resamples, seed=seed)
            known[_key(e)] = _SCORED.put((_key(e), level, resamples, seed), (record, score))
    counts = Counter(e.checkpoint_id for e in found)
    return [
        Measured(
            checkpoint=row,
            label=label,
            stored=own,
            evaluation=kept[0],
            score=kept[1],
            older=counts[row.id] - 1,
        )
        for row, label in zip(rows, labels, strict=True)
        if (own := speak.get((suite, row.id or 0))) is not None and (kept := known[_key(own)]) is not None
    ]


def _key(e: m.Evaluation) -> tuple[int | None, datetime]:
    """One state of an evaluation: measured again it keeps its id and gets a new time."""
    return e.id, e.created_at


def _compare(
    queries: AnalysisQueries,
    a: Measured,
    b: Measured,
    convention: c.Convention,
    level: float,
    resamples: int,
    seed: int,
) -> c.Comparison:
    key = (_key(a.stored), _key(b.stored), a.label, b.label, convention, level, resamples, seed)
    same = _same_tasks(queries, a.evaluation, b.evaluation)
    if same is None and (found := _COMPARED.get(key)) is not None:
        return found
    result = c.compare(
        _renamed(a),
        _renamed(b),
        convention=convention,
        same_tasks=same,
        level=level,
        resamples=resamples,
        seed=seed,
    )
    return _COMPARED.put(key, result) if same is None else result


def _first(own: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    return [(own[0], other) for other in own[1:]]


def _renamed(x: Measured) -> EvaluationDone:
    return replace(x.evaluation, checkpoint=x.label)


def _same_tasks(queries: AnalysisQueries, a: EvaluationDone, b: EvaluationDone) -> set[str] | None:
    """Tasks whose own digests are equal where the suite's changed; None where it did not, or a version is not stored."""
    if a.suite_digest == b.suite_digest:
        return None
    before, after = (queries.task_digests(e.suite, e.suite_digest) for e in (a, b))
    same = {task for task, digest in before.items() if digest and after.get(task) == digest}
    return same or None


def _four(rates: dict[str, dict[str, float | None]], label: str) -> float | None:
    known = {s: rates[s][label] for s in FOUR_SUITES if s in rates and label in rates[s]}
    return four_suite_mean({s: 100 * r for s, r in known.items() if r is not None})
