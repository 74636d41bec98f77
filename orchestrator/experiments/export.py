"""An experiment's report as Markdown, CSV and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator import exports
from orchestrator.experiments.report import (
    EV_FIRST,
    EV_MEAN,
    ExperimentReport,
    OutcomeEffects,
    RunResult,
    amount,
    between,
    ev_value,
    summary,
)
from stages.domain import Phase
from stages.effects import Effect


def effect_rows(report: ExperimentReport) -> list[dict[str, Any]]:
    """One row per outcome and contrast. Rates are fractions."""
    return [
        {
            "experiment": report.name,
            "outcome": o.outcome,
            "contrast": e.contrast.name,
            "kind": e.contrast.kind.value,
            "mean": e.mean,
            "low_over_seeds": e.over_seeds.low if e.over_seeds else None,
            "high_over_seeds": e.over_seeds.high if e.over_seeds else None,
            "seeds": len(e.by_seed),
            "p_value": e.p_value,
            "p_holm": e.p_holm,
            "low_over_tasks": e.over_tasks.low if e.over_tasks else None,
            "high_over_tasks": e.over_tasks.high if e.over_tasks else None,
            "seeds_needed": e.seeds_needed,
            **{f"seed_{s}": e.by_seed.get(s) for s in report.seeds},
        }
        for o in report.outcomes
        for e in o.effects
    ]


def run_rows(report: ExperimentReport) -> list[dict[str, Any]]:
    """One row per arm and seed."""
    return [
        {
            "arm": r.arm,
            "seed": r.seed,
            "state": r.state,
            "cycle": r.cycle_id,
            "kept": r.selected,
            **{
                key: value
                for suite in report.suites
                for key, value in (
                    (f"passed {suite}", r.success[suite][0] if suite in r.success else None),
                    (f"verdicts {suite}", r.success[suite][1] if suite in r.success else None),
                )
            },
            "ev_first_joint": ev_value(r, EV_FIRST),
            "ev_mean_joint": ev_value(r, EV_MEAN),
            "turns_per_attempt": r.turns,
            "tokens_per_attempt": r.tokens,
            "attempts_spent": r.spent.attempts if r.spent else None,
            "tokens_spent": r.spent.tokens if r.spent else None,
            "updates_spent": r.spent.updates if r.spent else None,
            "departures": "; ".join(r.departures),
            "error": r.error,
        }
        for r in report.runs
    ]


def to_document(report: ExperimentReport) -> dict[str, Any]:
    """The whole report as plain values."""
    return {
        "name": report.name,
        "question": report.question,
        "environment": report.environment,
        "state": report.state,
        "arms": [dict(zip(("name", "title", "changes"), arm, strict=True)) for arm in report.arms],
        "runs": run_rows(report),
        "effects": effect_rows(report),
        "ev": [asdict(p) | {"arm": r.arm, "seed": r.seed} for r in report.runs for p in r.ev],
        "summary": summary(report),
        "notes": list(report.notes),
        "doubts": list(report.doubts),
    }


def to_markdown(report: ExperimentReport) -> str:
    """For a document in the repository."""
    seeds = ",".join(map(str, report.seeds))
    parts = [
        f"# Experiment {report.name}",
        f"{report.question}",
        f"Command: `rsi experiment run {report.name} --seeds {seeds}`, then `rsi experiment report {report.name}` (recipe "
        f"`{report.recipe}`{', every arm: ' + report.common if report.common else ''}; {report.environment or 'not run yet'}).",
        "## What was shown and what was not",
        "\n".join(f"* {line}" for line in summary(report)),
        "## Arms",
        exports.to_markdown(
            [
                {"arm": name, "what it is": title, "changes": changes, "departs in": _departures(report, name)}
                for name, title, changes in report.arms
            ]
        ),
        "## Results, arms × seeds",
        "Strict success of the last checkpoint, k / verdicts; its steps were chosen on the validation suite.",
        *(
            f"### {suite.removeprefix('embedded:')}\n\n{report.measured[suite]}.\n\n{_results(report, suite)}"
            for suite in report.suites
        ),
        "## Effects",
        "The interval over seeds (t, never narrower than the luck of tasks alone makes it) says what other seeds would give; the one over tasks (bootstrap, tasks paired over all arms "
        "and seeds) holds for these very runs. p: t test over seeds, Holm-corrected over the contrasts of one outcome.",
        *(f"### {o.outcome}\n\n{exports.to_markdown(_effects(report, o))}" for o in report.outcomes),
        "## Explained variance",
        "Of the last stage; each value on a fresh batch before the critic trains on it (spec §3.5).",
        exports.to_markdown(_curves(report)),
        "## Cost",
        "Tokens and updates from Base on, evaluations and validation not counted; shared prefixes are counted in every arm.",
        exports.to_markdown([_cost(r) for r in report.runs]),
        "## Read with this",
        "\n".join(f"* {line}" for line in (*report.notes, *report.doubts, *ALWAYS)),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


ALWAYS = (
    "Arms of a seed share their prefix and every random choice that does not depend on their settings, so differences are "
    "paired; seeds are independent trainings.",
    "Effects are of this model, these tasks and this recipe.",
)


def _departures(report: ExperimentReport, arm: str) -> str:
    return ", ".join(dict.fromkeys(d for r in report.of_arm(arm) for d in r.departures))


def _results(report: ExperimentReport, suite: str) -> str:
    rows = []
    for name, _, _ in report.arms:
        by_seed = {r.seed: r for r in report.of_arm(name)}
        cells = [by_seed[s].success.get(suite) if s in by_seed else None for s in report.seeds]
        known = [k / n for k, n in (c for c in cells if c) if n]
        mean = f"{100 * sum(known) / len(known):.1f} %" if len(known) == len(report.seeds) else exports.MISSING
        rows.append(
            {"arm": name}
            | {
                f"seed {s}": exports.rate(*c) if c else _state(by_seed.get(s))
                for s, c in zip(report.seeds, cells, strict=True)
            }
            | {"mean": mean}
        )
    return exports.to_markdown(rows)


def _state(run: RunResult | None) -> str:
    return exports.MISSING if run is None else run.state


def _effects(report: ExperimentReport, o: OutcomeEffects) -> list[dict[str, Any]]:
    return [
        {
            "contrast": e.contrast.name,
            **{f"seed {s}": amount(e.by_seed.get(s), o.is_rate) for s in report.seeds},
            "mean": amount(e.mean, o.is_rate),
            "95 % over seeds": between(e.over_seeds, o.is_rate),
            "p": exports.p_value(e.p_value),
            "p (Holm)": exports.p_value(e.p_holm),
            "95 % over tasks, these runs": between(e.over_tasks, o.is_rate),
            "seeds needed": needed(e),
        }
        for e in o.effects
    ]


def needed(e: Effect) -> str:
    return exports.MISSING if e.seeds_needed is None else f"about {max(3, e.seeds_needed)}"


def _curves(report: ExperimentReport) -> list[dict[str, Any]]:
    rows = []
    for r in report.runs:
        if not r.ev:
            continue
        row: dict[str, Any] = {"arm": r.arm, "seed": r.seed}
        for phase in (Phase.CALIBRATE, Phase.JOINT):
            values = [p.value for p in r.ev if p.phase is phase]
            row[phase.value] = " ".join(exports.number(v) for v in values) or "none"
        rows.append(row)
    return rows


def _cost(r: RunResult) -> dict[str, Any]:
    s = r.spent
    return {
        "arm": r.arm,
        "seed": r.seed,
        "attempts": s.attempts if s else None,
        "sampled tokens": s.tokens if s else None,
        "updates": s.updates if s else None,
        "matched (tokens, updates)": f"{100 * r.matched[0]:.0f} %, {100 * r.matched[1]:.0f} %" if r.matched else None,
        "kept": r.selected,
        "turns per attempt": exports.number(r.turns, 1),
    }
