"""What stands behind a comparison: tasks × checkpoints, strata, categories, settings, cost, selection and four suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator import models as m
from orchestrator.comparisons import Measured, SuiteReport, chosen
from orchestrator.memo import Memo
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from stages import comparison as c
from stages import statistics as st
from stages.domain import EndReason, Verdict
from stages.reference_rows import FOUR_SUITES, four_suite_mean

# What the console names of the method's comparison.
Comparison = c.Comparison
Convention = c.Convention
Flag = c.Flag
FlagKind = c.FlagKind
Optimism = st.Optimism
FOUR_NAMES = FOUR_SUITES

# Thousands of random halves per answer; an evaluation that is measured again keeps its id and gets a new time.
_CHOICES: Memo[tuple[st.Optimism | None]] = Memo(64)
OUT_OF = (EndReason.TIME_LIMIT, EndReason.TURN_CAP, EndReason.TOKEN_CAP, EndReason.CONTEXT_OVERFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One task of one checkpoint."""

    passed: int
    verdicts: int
    attempts: int
    change: int | None  # +1 rose, −1 fell, 0 as before, against the base; None: the base, or not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    task: str
    family: str
    stratum: str
    cells: tuple[Cell | None, ...]  # one per measured checkpoint; None: the task is not in its evaluation

    @property
    def flips(self) -> bool:
        return any(cell is not None and cell.change for cell in self.cells)


def matrix(report: SuiteReport) -> list[MatrixRow]:
    """Tasks × checkpoints, in order of task id."""
    flips = {x.after: (set(x.improved), set(x.worsened)) for x in report.comparisons if x.common_tasks}
    version = report.measured[0].evaluation.suite_digest
    columns = [{t.task_id: t for t in x.evaluation.tasks} for x in report.measured]
    rows = []
    for task in sorted({t for column in columns for t in column}):
        own = [column.get(task) for column in columns]
        known = next(t for t in own if t is not None)
        cells: list[Cell | None] = []
        for x, t in zip(report.measured, own, strict=True):
            if t is None:
                cells.append(None)
                continue
            rose, fell = flips.get(x.label, (set(), set()))
            same = x.label in flips and own[0] is not None and x.evaluation.suite_digest == version
            change = (task in rose) - (task in fell)
            cells.append(
                Cell(
                    passed=sum(v is Verdict.PASSED for v in t.verdicts),
                    verdicts=sum(v.counts for v in t.verdicts),
                    attempts=len(t.verdicts),
                    change=change if same or change else None,
                )
            )
        rows.append(MatrixRow(task=task, family=known.family, stratum=known.stratum, cells=tuple(cells)))
    return rows


# ------------------------------------------------------------------------------------------------ groups of tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """k / verdicts of some tasks, one rate per measured checkpoint; None where it has none of them."""

    name: str
    tasks: int
    rates: tuple[c.Rate | None, ...]


def strata(report: SuiteReport) -> list[Group]:
    return _groups(report, [x.score.strata for x in report.measured], lambda t: t.stratum)


def families(report: SuiteReport) -> list[Group]:
    return _groups(report, [x.score.families for x in report.measured], lambda t: t.family)


def categories(store: Store, report: SuiteReport) -> list[Group]:
    """By the categories that the suite's stored version gives its tasks; empty when it gives none."""
    newest = report.measured[0].evaluation
    named = AnalysisQueries(store).task_categories(newest.suite, newest.suite_digest)
    words = sorted({word for own in named.values() for word in own})
    out = []
    for word in words:
        rates = []
        for x in report.measured:
            own = [t for t in x.evaluation.tasks if word in named.get(t.task_id, ())]
            rates.append(c.rate(own, c.Convention.VERDICTS, resamples=0) if own else None)
        out.append(Group(name=word, tasks=sum(word in own for own in named.values()), rates=tuple(rates)))
    return out


def _groups(report: SuiteReport, rates: Sequence[Mapping[str, c.Rate]], key: Any) -> list[Group]:
    members: dict[str, set[str]] = {}
    for x in report.measured:
        for t in x.evaluation.tasks:
            members.setdefault(key(t), set()).add(t.task_id)
    names = list(dict.fromkeys(name for own in rates for name in own))
    return [Group(name=name, tasks=len(members[name]), rates=tuple(own.get(name) for own in rates)) for name in names]


def group_rows(kind: str, report: SuiteReport, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For an export: one row per group and checkpoint."""
    return [
        {
            kind: g.name,
            "tasks": g.tasks,
            "checkpoint": x.label,
            "passed": rate.passed if rate else None,
            "verdicts": rate.of if rate else None,
            "rate_verdicts": rate.value if rate else None,
            "low": rate.wilson.low if rate and rate.wilson else None,
            "high": rate.wilson.high if rate and rate.wilson else None,
        }
        for g in groups
        for x, rate in zip(report.measured, g.rates, strict=True)
    ]


def matrix_rows(report: SuiteReport, rows: Sequence[MatrixRow]) -> list[dict[str, Any]]:
    """For an export: one row per task and checkpoint."""
    return [
        {
            "suite": report.suite,
            "task": row.task,
            "family": row.family,
            "stratum": row.stratum,
            "checkpoint": x.label,
            "passed": cell.passed,
            "verdicts": cell.verdicts,
            "attempts": cell.attempts,
            "change": cell.change,
        }
        for row in rows
        for x, cell in zip(report.measured, row.cells, strict=True)
        if cell is not None
    ]


# ------------------------------------------------------------------------------------------------ settings and cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting over the checkpoints; None where one has none."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def settings(store: Store, report: SuiteReport) -> list[Setting]:
    """Evaluation (suite version, k, harness, sampling, resources), then the cycle that made the checkpoint."""
    cycles: dict[int, m.Cycle] = {}
    columns = []
    for x in report.measured:
        e, own = x.evaluation, x.checkpoint
        flat: dict[str, Any] = {"evaluation.suite_digest": e.suite_digest, "evaluation.k": e.k}
        flat |= {f"evaluation.{name}": value for name, value in sorted(e.settings.items())}
        flat |= {"checkpoint.arm": own.arm, "checkpoint.step": own.step, "checkpoint.parent_kept": own.parent_kept}
        if own.cycle_id is not None:
            if own.cycle_id not in cycles:
                cycles[own.cycle_id] = store.cycles.get(own.cycle_id)
            cycle = cycles[own.cycle_id]
            flat |= {"cycle.recipe": cycle.recipe} | dict(_flat("cycle", cycle.config))
        columns.append(flat)
    names = list(dict.fromkeys(name for flat in columns for name in flat))
    return [
        Setting(name=name, values=tuple(None if flat.get(name) is None else str(flat[name]) for flat in columns))
        for name in names
    ]


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in _flat(f"{prefix}.{k}", v)]
    return [(prefix, value)]


def setting_rows(report: SuiteReport, found: Sequence[Setting]) -> list[dict[str, Any]]:
    """For an export."""
    labels = [x.label for x in report.measured]
    return [{"setting": s.name, **dict(zip(labels, s.values, strict=True))} for s in found]


def cost_rows(store: Store, report: SuiteReport) -> list[dict[str, Any]]:
    """Turns, tokens and seconds per attempt, and how attempts ended. A sum that was not measured is None, never 0."""
    ids = [x.checkpoint.id for x in report.measured if x.checkpoint.id is not None]
    ends = AnalysisQueries(store).end_reasons(ids, report.suite)
    return [_cost(x, ends.get(x.checkpoint.id or 0, {})) for x in report.measured]


def _cost(x: Measured, ends: Mapping[EndReason, int]) -> dict[str, Any]:
    e, n = x.evaluation, x.evaluation.attempts
    passed = e.passed
    stored = sum(ends.values())
    return {
        "checkpoint": x.label,
        "attempts": n,
        "turns": e.turns or None,
        "turns_per_attempt": e.turns / n if e.turns and n else None,
        "tokens": e.tokens or None,
        "tokens_per_attempt": e.tokens / n if e.tokens and n else None,
        "tokens_per_pass": e.tokens / passed if e.tokens and passed else None,
        "wall_s": e.wall_s or None,
        "wall_s_per_attempt": e.wall_s / n if e.wall_s and n else None,
        "stored_attempts": stored,  # `rsi evaluate` keeps outcomes, not attempts
        **{f"{end.value}": ends.get(end, 0) if stored else None for end in OUT_OF},
    }


# ------------------------------------------------------------------------------------------------ selection, four suites


def optimism(report: SuiteReport) -> st.Optimism | None:
    """What choosing the best of these checkpoints on this very suite would add by luck; None where it cannot be told."""
    if len({x.evaluation.suite_digest for x in report.measured}) != 1:
        return None
    key = tuple((x.stored.id, x.stored.created_at) for x in report.measured)
    if (found := _CHOICES.get(key)) is None:
        found = _CHOICES.put(key, (c.choice_optimism([x.evaluation for x in report.measured]),))
    return found[0]


def selections(store: Store, report: SuiteReport) -> list[tuple[m.Stage, m.Selection]]:
    """How the stages that ended in these checkpoints chose among their candidates."""
    wanted = {x.checkpoint.stage_id for x in report.measured}
    out = []
    for cycle_id in dict.fromkeys(x.checkpoint.cycle_id for x in report.measured):
        if cycle_id is None:
            continue
        stages = {s.id: s for s in store.stages.of_cycle(cycle_id)}
        out += [(stages[s.stage_id], s) for s in store.selections.of_cycle(cycle_id) if s.stage_id in wanted]
    return out


def selection_rows(store: Store, report: SuiteReport) -> list[dict[str, Any]]:
    """For an export: one row per candidate that a stage chose among, on the protected validation suite."""
    return [
        {
            "stage": stage.name,
            "validation_suite": chosen_.suite,
            "suite_digest": chosen_.suite_digest,
            "candidate": own["label"],
            "passed": own["passed"],
            "verdicts": own["verdicts"],
            "kept": own["label"] == chosen_.chosen,
        }
        for stage, chosen_ in selections(store, report)
        for own in chosen_.candidates
    ]


def optimism_row(report: SuiteReport) -> dict[str, Any] | None:
    """`optimism` with the name of the checkpoint that this suite would have chosen."""
    found = optimism(report)
    if found is None:
        return None
    return {
        "best": report.measured[found.best].label,
        "apparent": found.apparent,
        "optimism": found.optimism,
        "corrected": found.corrected,
        "splits": found.splits,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FourSuites:
    """The four-suite mean of one checkpoint (spec §8)."""

    rates: tuple[float | None, ...]  # fractions, in the order of FOUR_SUITES
    mean: float | None  # a fraction
    missing: tuple[str, ...]


def four_suites(store: Store, checkpoint_ids: Sequence[int]) -> dict[int, FourSuites]:
    """Checkpoint id -> its mean over the four suites, k / verdicts; {} when none of them was measured on any."""
    found = chosen([e for e in AnalysisQueries(store).evaluation_rows(checkpoint_ids) if e.suite in FOUR_SUITES])
    if not found:
        return {}
    out = {}
    for i in checkpoint_ids:
        rows = [found.get((suite, i)) for suite in FOUR_SUITES]
        rates = tuple(e.passed / e.verdicts if e is not None and e.verdicts else None for e in rows)
        known = {s: r for s, r in zip(FOUR_SUITES, rates, strict=True) if r is not None}
        out[i] = FourSuites(
            rates=rates, mean=four_suite_mean(known), missing=tuple(s for s in FOUR_SUITES if s not in known)
        )
    return out
