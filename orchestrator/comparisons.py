"""Checkpoints compared on stored evaluations: which evaluations belong together, and the report as rows (spec §8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from orchestrator import exports
from orchestrator import models as m
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from stages import comparison as c
from stages import statistics as st
from stages.errors import ConfigError, StoreError
from stages.records import EvaluationDone
from stages.reference_rows import FOUR_SUITES, four_suite_mean


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
    if slash and cycle.isdecimal():
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
    compared = [
        c.compare(
            _renamed(a),
            _renamed(b),
            convention=convention,
            same_tasks=_same_tasks(queries, a.evaluation, b.evaluation),
            level=level,
            resamples=resamples,
            seed=seed,
        )
        for _, a, b in pairs
    ]
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
    records = queries.records(list(speak.values()))
    counts = Counter(e.checkpoint_id for e in found)
    return [
        Measured(
            checkpoint=row,
            label=label,
            stored=own,
            evaluation=record,
            score=c.score_evaluation(record, level=level, resamples=resamples, seed=seed),
            older=counts[row.id] - 1,
        )
        for row, label in zip(rows, labels, strict=True)
        if (own := speak.get((suite, row.id or 0))) is not None and (record := records[own.id or 0])
    ]


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


# ------------------------------------------------------------------------------------------------ as rows


def score_rows(report: SuiteReport) -> list[dict[str, Any]]:
    """One row per checkpoint. Rates are fractions; both conventions have their numerator and denominator."""
    return [_score_row(report.suite, x, zone(report, x)) for x in report.measured]


def zone(report: SuiteReport, x: Measured) -> str:
    """The two zones of spec §8, seen from the first checkpoint."""
    settings, own = x.evaluation.settings, report.measured[0].evaluation.settings
    same = x.stored.reference_only == report.measured[0].stored.reference_only and all(
        settings.get(k) == own.get(k) for k in ("harness", "harness_version")
    )
    return "same harness" if same else "reference only"


def _score_row(suite: str, x: Measured, zone_: str) -> dict[str, Any]:
    s, e = x.score, x.evaluation
    v, a = s.by_verdicts, s.by_attempts
    return {
        "suite": suite,
        "suite_digest": e.suite_digest,
        "checkpoint": x.label,
        "zone": zone_,
        "tasks": s.tasks,
        "k": e.k,
        "passed": v.passed,
        "verdicts": v.of,
        "rate_verdicts": v.value,
        "verdicts_low": v.wilson.low if v.wilson else None,
        "verdicts_high": v.wilson.high if v.wilson else None,
        "bootstrap_low": v.bootstrap.low if v.bootstrap else None,
        "bootstrap_high": v.bootstrap.high if v.bootstrap else None,
        "attempts": a.of,
        "rate_attempts_leaderboard": a.value,
        "attempts_low": a.wilson.low if a.wilson else None,
        "attempts_high": a.wilson.high if a.wilson else None,
        "tasks_first_attempt": s.first_attempt,
        "tasks_any_attempt": s.any_attempt,
        "tasks_all_attempts": s.all_attempts,
        "process_reward": s.process_reward,
        "turns": e.turns or None,
        "tokens": e.tokens or None,
        "wall_s": e.wall_s or None,
        "flags": "; ".join(f.text for f in s.flags),
    }


def comparison_rows(report: SuiteReport) -> list[dict[str, Any]]:
    """One row per pair. Differences are fractions, after − before."""
    return [
        {
            "suite": x.suite,
            "before": x.before,
            "after": x.after,
            "convention": f"k / {x.convention.value}",
            "common_tasks": x.common_tasks,
            "before_rate": x.before_rate,
            "after_rate": x.after_rate,
            "difference": x.difference,
            "low": x.interval.low if x.interval else None,
            "high": x.interval.high if x.interval else None,
            "p_value": x.p_value,
            "p_holm": x.p_holm,
            "improved": len(x.improved),
            "worsened": len(x.worsened),
            "flip_p": x.flip_p,
            "detectable": x.detectable,
            "tasks_needed": x.tasks_needed,
            "flags": "; ".join(f.text for f in x.flags),
        }
        for x in report.comparisons
    ]


def to_markdown(report: Report) -> str:
    """The whole report for a document."""
    parts = []
    for s in report.suites:
        parts.append(f"## {s.suite}\n\n{exports.to_markdown(_score_words(s))}")
        if s.comparisons:
            parts.append(exports.to_markdown(_comparison_words(s)))
        for x in s.comparisons:
            flips = [f"* {x.before} → {x.after}: rose on {_names(x.improved)}; fell on {_names(x.worsened)}."]
            parts.append("\n".join([*flips, *(f"* {x.before} → {x.after}: {f.text}." for f in x.flags)]) + "\n")
        if s.references:
            parts.append("Reference only (other harness or printed figures):\n\n" + exports.to_markdown(_references(s)))
        parts += [f"* {label} was not evaluated on {s.suite}.\n" for label in s.missing]
    means = {label: v for label, v in report.four_suite_means.items() if v is not None}
    if means:
        rows = [{"checkpoint": k, "four-suite mean, %": round(v, 2)} for k, v in means.items()]
        parts.append(exports.to_markdown(rows))
    parts.append(
        "k / attempts counts a missing verdict as unsolved (leaderboard convention); k / verdicts leaves it out. Intervals "
        "are clustered by task, 95 %. p: paired sign-flip test; Holm over all comparisons shown; flips: exact sign test.\n"
    )
    return "\n".join(parts)


def _score_words(s: SuiteReport) -> list[dict[str, Any]]:
    return [
        {
            "checkpoint": x.label,
            "zone": zone(s, x),
            "tasks × k": f"{x.score.tasks} × {x.evaluation.k}",
            "k / verdicts": exports.rate(x.score.by_verdicts.passed, x.score.by_verdicts.of),
            "95 %": _interval(x.score.by_verdicts.wilson),
            "k / attempts (leaderboard)": exports.rate(x.score.by_attempts.passed, x.score.by_attempts.of),
            "first · any · all": f"{x.score.first_attempt} · {x.score.any_attempt} · {x.score.all_attempts}",
            "process reward": exports.number(x.score.process_reward, 3),
        }
        for x in s.measured
    ]


def _comparison_words(s: SuiteReport) -> list[dict[str, Any]]:
    return [
        {
            "comparison": f"{x.before} → {x.after}",
            "tasks": x.common_tasks,
            "difference, points": exports.points(x.difference),
            "95 %": _interval(x.interval, signed=True),
            "p": exports.p_value(x.p_value),
            "p (Holm)": exports.p_value(x.p_holm),
            "rose / fell": f"{len(x.improved)} / {len(x.worsened)}",
            "p of flips": exports.p_value(x.flip_p),
            "detectable, points": exports.MISSING if x.detectable is None else f"{100 * x.detectable:.1f}",
            "tasks needed": x.tasks_needed,
        }
        for x in s.comparisons
    ]


def _references(s: SuiteReport) -> list[dict[str, Any]]:
    return [
        {"source": r.source, "system": r.label, "metric": r.metric, "value": r.value, "note": r.note}
        for r in s.references
    ]


def _interval(interval: st.Interval | None, *, signed: bool = False) -> str:
    if interval is None:
        return exports.MISSING
    sign = "+" if signed else ""
    return f"[{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def _names(tasks: Sequence[str], shown: int = 8) -> str:
    if not tasks:
        return "none"
    more = f" and {len(tasks) - shown} more" if len(tasks) > shown else ""
    return ", ".join(tasks[:shown]) + more
