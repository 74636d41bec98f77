"""A comparison as rows, for tables and exports, and as a Markdown document (spec §8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator import compare_tables as t
from orchestrator import exports
from orchestrator.comparisons import Measured, Report, SuiteReport
from orchestrator.store import Store
from stages import statistics as st
from stages.domain import EndReason


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


def details(store: Store, report: Report) -> str:
    """What a document may add per suite: strata, cost, how checkpoints were selected, and the luck of choosing here."""
    parts = []
    for s in report.suites:
        parts.append(f"## Details: {s.suite}\n\n{exports.to_markdown(_strata_words(s))}")
        parts.append(exports.to_markdown(_cost_words(t.cost_rows(store, s))))
        if selected := t.selection_rows(store, s):
            parts.append("Selected on the protected validation suite:\n\n" + exports.to_markdown(selected))
        if len(s.measured) < 2:
            continue  # nothing to choose among
        luck = t.optimism_row(s)
        parts.append(
            f"Choosing the best of these on {s.suite} itself would take {luck['best']} and report "
            f"{100 * luck['apparent']:.1f} %; about {100 * luck['optimism']:.1f} points of that are luck of the choice, which "
            f"leaves {100 * luck['corrected']:.1f} %.\n"
            if luck
            else f"The luck of choosing on {s.suite} cannot be estimated: fewer than four common tasks, or several versions.\n"
        )
    return "\n".join(parts)


def _strata_words(s: SuiteReport) -> list[dict[str, Any]]:
    return [
        {"stratum": g.name, "tasks": g.tasks}
        | {
            x.label: exports.rate(rate.passed, rate.of) if rate else exports.MISSING
            for x, rate in zip(s.measured, g.rates, strict=True)
        }
        for g in t.strata(s)
    ]


def _cost_words(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    shown = {"turns": "turns_per_attempt", "tokens": "tokens_per_attempt", "seconds": "wall_s_per_attempt"}
    return [
        {"checkpoint": row["checkpoint"]}
        | {f"{name} an attempt": exports.number(row[key], 1) for name, key in shown.items()}
        | {"time-outs": row[EndReason.TIME_LIMIT.value], "of stored attempts": row["stored_attempts"]}
        for row in rows
    ]


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
