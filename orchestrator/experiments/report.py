"""What an experiment found, read from the store at any moment: runs, effects with intervals, EV curves, cost, doubts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator import exports
from orchestrator import models as m
from orchestrator.experiments.progress import progress_of
from orchestrator.experiments.spec import JOIN, ExperimentSpec, parse_spec
from orchestrator.experiments.spent import Spent, ratio, spent
from orchestrator.lineage import line_of
from orchestrator.store import Store
from orchestrator.store.analysis_queries import AnalysisQueries
from orchestrator.store.metrics import EV, Point
from stages import effects as fx
from stages.config import CycleConfig
from stages.domain import Phase
from stages.errors import ConfigError
from stages.records import EvaluationDone
from stages.statistics import Interval

EV_MEAN = "EV, mean of joint batches"
EV_FIRST = "EV, first joint batch"
LEVEL = 0.05  # a claim needs a Holm-corrected p over seeds below this


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One arm with one seed."""

    arm: str
    seed: int
    state: str  # of its last cycle; "waiting" before that exists
    cycle_id: int | None
    checkpoint: str  # name of the last one; empty while it is not saved
    success: Mapping[str, tuple[int, int]]  # suite -> passed, verdicts
    missing_verdicts: int
    turns: float | None  # per attempt, over all suites
    tokens: float | None
    ev: tuple[Point, ...]  # of its last stage: calibration, then joint
    selected: str  # which step was kept
    departures: tuple[str, ...]
    spent: Spent | None  # from Base on; None while it is not done
    matched: tuple[float, float] | None  # tokens and updates as fractions of the arm it matches
    void: str  # why equal digests are not promised
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeEffects:
    """Every contrast of one outcome."""

    outcome: str
    is_rate: bool  # differences are percentage points
    effects: tuple[fx.Effect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentReport:
    experiment_id: int
    name: str
    question: str
    state: str
    recipe: str
    environment: str  # what equal digests hold for; empty before anything ran
    arms: tuple[tuple[str, str, str], ...]  # name, title, what it changes
    common: str  # what every arm changes
    seeds: tuple[int, ...]
    runs: tuple[RunResult, ...]
    suites: tuple[str, ...]
    measured: Mapping[str, str]  # suite -> tasks, attempts and settings in words
    outcomes: tuple[OutcomeEffects, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]

    def of_arm(self, arm: str) -> tuple[RunResult, ...]:
        return tuple(r for r in self.runs if r.arm == arm)


def report_of(store: Store, row: m.Experiment) -> ExperimentReport:
    """Everything that is known now, as one moment shows it."""
    with store.transaction():
        return _report(store, row)


def _report(store: Store, row: m.Experiment) -> ExperimentReport:
    assert row.id is not None
    stored = store.experiments.runs([row.id])
    seeds = tuple(sorted({r.seed for r in stored}))
    spec = parse_spec(row.spec | {"seeds": list(seeds)}, f"experiment {row.name}")
    labels = {a.name: _departures(spec.config(a, seeds[0])) for a in spec.arms()}
    found = [_run(store, r, labels[r.arm]) for r in stored]
    runs = _with_matches(spec, [r for r, _ in found])
    evaluations = {(r.arm, r.seed): e for r, e in found if r.state == m.CycleState.DONE}
    suites = tuple(sorted({e.suite for own in evaluations.values() for e in own}))
    outcomes, doubts = _outcomes(spec, runs, evaluations, suites, seeds)
    return ExperimentReport(
        experiment_id=row.id,
        name=spec.name,
        question=spec.question,
        state=progress_of(store, [row])[0].state,
        recipe=spec.recipe,
        environment=_environment(store, stored),
        arms=tuple((a.name, a.title, _changes(a.set, a.match)) for a in spec.arms()),
        common=_changes(spec.set, None) if spec.set else "",
        seeds=seeds,
        runs=runs,
        suites=suites,
        measured={e.suite: _measured(e) for own in evaluations.values() for e in own},
        outcomes=outcomes,
        notes=spec.notes,
        doubts=(*_doubts(runs, seeds), *doubts),
    )


def contrasts_of(spec: ExperimentSpec) -> tuple[fx.Contrast, ...]:
    """Those that the specification names; of factors, main effects and interactions; else every arm against the first."""
    if spec.contrast:
        return tuple(fx.difference(c.name, c.plus, c.minus) for c in spec.contrast)
    if not spec.factor:
        return fx.against_first([a.name for a in spec.arms()])
    arms = {
        a.name: [part == f.levels[1].name for part, f in zip(a.name.split(JOIN), spec.factor, strict=True)]
        for a in spec.arms()
    }
    return fx.factorial([f.name for f in spec.factor], arms)


def summary(report: ExperimentReport) -> list[str]:
    """What was shown and what was not, in sentences: one per outcome and contrast."""
    lines = [
        f"{'Shown' if shown(e) else 'Not shown'}: {e.contrast.name}, {o.outcome}: {verdict(e, is_rate=o.is_rate)}"
        for o in report.outcomes
        for e in o.effects
    ]
    return lines or ["Nothing can be compared yet: no seed has all the arms of a contrast."]


def shown(effect: fx.Effect) -> bool:
    """Two seeds may agree by chance: they show something only where the luck within a run is known and counted (rates)."""
    enough = effect.over_tasks is not None or len(effect.by_seed) >= 3
    return enough and effect.p_holm is not None and effect.p_holm < LEVEL


def verdict(e: fx.Effect, *, is_rate: bool) -> str:
    """One effect in words, with everything that it rests on. Rates differ by percentage points."""
    if e.mean is None:
        return "no seed has all of its arms yet"
    text = f"{amount(e.mean, is_rate)}{' points' if is_rate else ''}"
    if e.over_seeds is None:
        text += f" with {len(e.by_seed)} seed{'s' if len(e.by_seed) > 1 else ''}: no interval over seeds"
    else:
        text += f", {between(e.over_seeds, is_rate)} over {len(e.by_seed)} seeds"
        text += f", Holm p {exports.p_value(e.p_holm)}" if e.p_holm is not None else ""
        if not shown(e) and e.p_holm is not None and e.p_holm < LEVEL:
            text += "; two seeds may agree by chance, and nothing tells how much such a value scatters"
        elif not shown(e) and e.seeds_needed is not None:
            text += f"; about {max(3, e.seeds_needed)} seeds would show a difference of this size"
    if e.over_tasks is not None:
        clear = e.over_tasks.low > 0 or e.over_tasks.high < 0
        text += f"; for these very runs {between(e.over_tasks, is_rate)} over tasks"
        text += ", so the runs differ, but that says nothing about other seeds" if clear and not shown(e) else ""
    return text


def amount(value: float | None, is_rate: bool) -> str:
    """A difference: in points for rates."""
    if value is None:
        return exports.MISSING
    return exports.points(value) if is_rate else f"{value:+.3f}"


def between(interval: Interval | None, is_rate: bool) -> str:
    if interval is None:
        return exports.MISSING
    return f"[{amount(interval.low, is_rate)}, {amount(interval.high, is_rate)}]"


# ------------------------------------------------------------------------------------------------ one run


def _departures(config: CycleConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d for r in range(1, config.rounds + 1) for d in config.rpr_of(r).departures()))


def _run(store: Store, row: m.ExperimentRun, departures: tuple[str, ...]) -> tuple[RunResult, list[EvaluationDone]]:
    if row.cycle_id is None:
        return _empty(row, departures), []
    cycle = store.cycles.get(row.cycle_id)
    stages = store.stages.of_cycle(row.cycle_id)
    last = stages[-1]
    assert last.id is not None
    saved = store.checkpoints.named(row.cycle_id, last.name)
    measured = store.evaluations.list(stage_id=last.id, checkpoint_ids=[saved.id]).items if saved and saved.id else []
    own = sorted(AnalysisQueries(store).records(measured).values(), key=lambda e: e.suite)
    attempts = sum(e.attempts for e in own)
    selection = store.selections.get(last.id, Phase.JOINT)
    done = cycle.state is m.CycleState.DONE
    result = RunResult(
        arm=row.arm,
        seed=row.seed,
        state=cycle.state.value,
        cycle_id=row.cycle_id,
        checkpoint=saved.name if saved else "",
        success={e.suite: (e.passed, e.verdicts) for e in own},
        missing_verdicts=attempts - sum(e.verdicts for e in own),
        turns=sum(e.turns for e in own) / attempts if attempts else None,
        tokens=sum(e.tokens for e in own) / attempts if attempts else None,
        ev=tuple(p for p in store.metrics.curve([EV], stage_ids=[last.id]) if p.phase is not Phase.WARMUP),
        selected=selection.chosen if selection else "",
        departures=departures,
        spent=spent(store, row.cycle_id) if done else None,
        matched=None,
        void=next((v for c in line_of(store, row.cycle_id) if (v := store.cycles.get(c).digest_claim_void)), ""),
        error=row.error or cycle.error,
    )
    return result, own


def _empty(row: m.ExperimentRun, departures: tuple[str, ...]) -> RunResult:
    return RunResult(
        arm=row.arm,
        seed=row.seed,
        state="waiting",
        cycle_id=None,
        checkpoint="",
        success={},
        missing_verdicts=0,
        turns=None,
        tokens=None,
        ev=(),
        selected="",
        departures=departures,
        spent=None,
        matched=None,
        void="",
        error=row.error,
    )


def _with_matches(spec: ExperimentSpec, runs: Sequence[RunResult]) -> tuple[RunResult, ...]:
    by = {(r.arm, r.seed): r for r in runs}
    out = []
    for r in runs:
        goal = by.get((spec.arm_named(r.arm).match or "", r.seed))
        if goal is not None and goal.spent is not None and r.spent is not None:
            r = replace(r, matched=ratio(r.spent, goal.spent))
        out.append(r)
    return tuple(out)


def ev_value(run: RunResult, outcome: str) -> float | None:
    """The two EV outcomes of a run: over its joint batches, or on the first of them. None where it is undefined."""
    joint = [p.value for p in run.ev if p.phase is Phase.JOINT]
    if outcome == EV_FIRST:
        return joint[0] if joint else None
    known = [v for v in joint if v is not None]
    return sum(known) / len(known) if known else None


# ------------------------------------------------------------------------------------------------ effects


def _outcomes(
    spec: ExperimentSpec,
    runs: Sequence[RunResult],
    evaluations: Mapping[tuple[str, int], Sequence[EvaluationDone]],
    suites: Sequence[str],
    seeds: Sequence[int],
) -> tuple[tuple[OutcomeEffects, ...], list[str]]:
    contrasts, out, doubts = contrasts_of(spec), [], []
    for suite in suites:
        own = {run: e for run, every in evaluations.items() for e in every if e.suite == suite}
        if len({e.suite_digest for e in own.values()}) > 1:
            doubts.append(f"{suite} changed between the runs, so nothing is compared on it; run the experiment anew")
            continue
        tasks = {run: _rates(e) for run, e in own.items()}
        values = {run: sum(rates.values()) / len(rates) for run, rates in tasks.items() if rates}
        name = f"strict success, {suite.removeprefix('embedded:')}"
        found = fx.effects(contrasts, values, seeds, tasks=tasks)
        out.append(OutcomeEffects(outcome=name, is_rate=True, effects=found))
    for name in (EV_FIRST, EV_MEAN):
        values = {(r.arm, r.seed): v for r in runs if (v := ev_value(r, name)) is not None and r.state == "done"}
        if values:
            out.append(OutcomeEffects(outcome=name, is_rate=False, effects=fx.effects(contrasts, values, seeds)))
    return tuple(out), doubts


def _measured(e: EvaluationDone) -> str:
    named = {"harness": "harness", "temperature": "sampling.temperature", "top-p": "sampling.top_p"}
    known = [f"{name} {e.settings[key]}" for name, key in named.items() if e.settings.get(key) is not None]
    return ", ".join([f"{len(e.tasks)} tasks × {e.k} attempts", *known])


def _rates(e: EvaluationDone) -> dict[str, float]:
    """k / verdicts per task; a task without a verdict is left out."""
    return {
        t.task_id: sum(v.value == "passed" for v in t.verdicts) / n
        for t in e.tasks
        if (n := sum(v.counts for v in t.verdicts))
    }


def _doubts(runs: Sequence[RunResult], seeds: Sequence[int]) -> list[str]:
    found = []
    if len(seeds) == 1:
        found.append("one seed: nothing can be said about other seeds, so there is no interval over seeds")
    elif len(seeds) < 5:
        found.append(
            f"{len(seeds)} seeds: the t interval has {len(seeds) - 1} degree{'s' if len(seeds) > 2 else ''} of freedom and is "
            "wide; an effect that is not shown is not shown to be absent"
        )
    waiting = [f"{r.arm}, seed {r.seed} ({r.state})" for r in runs if r.state != "done"]
    if waiting:
        found.append(f"{len(waiting)} of {len(runs)} runs are not done: " + "; ".join(waiting))
    if missing := sum(r.missing_verdicts for r in runs):
        found.append(f"{missing} attempts have no verdict; they are left out (k / verdicts)")
    if void := [f"{r.arm}, seed {r.seed}: {r.void}" for r in runs if r.void]:
        found.append("the clock or the machine decided something, so a repetition may differ: " + "; ".join(void))
    if off := [r for r in runs if r.matched and max(abs(x - 1) for x in r.matched) > 0.1]:
        cells = "; ".join(
            f"{r.arm}, seed {r.seed}: {100 * r.matched[0]:.0f} % of the tokens, {100 * r.matched[1]:.0f} % of the updates"
            for r in off
            if r.matched
        )
        found.append("compute is matched before a run and attempts grew longer or shorter in it: " + cells)
    return found


def _environment(store: Store, runs: Sequence[m.ExperimentRun]) -> str:
    """Of every cycle that arms end in: one line each where they differ."""
    cycles = [store.cycles.get(r.cycle_id) for r in runs if r.cycle_id is not None]
    found = [
        f"torch {c.environment.get('torch')}, {c.environment.get('machine')}, "
        f"learner threads {c.environment.get('num_threads') or 'all'}, terminal-rsi {c.code_version}"
        for c in cycles
    ]
    return "; ".join(dict.fromkeys(found))


def _changes(overrides: Mapping[str, object], match: str | None) -> str:
    words = [f"{k} = {v}" for k, v in overrides.items()]
    if match is not None:
        words.append(f"direct PPO matched to {match}")
    return ", ".join(words) or "the recipe as it is"


def experiment_named(store: Store, name: str) -> m.Experiment:
    """By name or number. Raises ConfigError or StoreError when there is none."""
    if name.isdecimal():
        return store.experiments.get(int(name))
    if (found := store.experiments.named(name)) is None:
        raise ConfigError(f"there is no experiment {name!r}; `rsi experiment list` shows those that were run")
    return found
