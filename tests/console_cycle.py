"""A plausible cycle in a real store, for the console's tests: five stages, curves, a gate, a hostile trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.persist import persist, persist_many
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from stages.domain import (
    Decision,
    EndReason,
    Finding,
    LeakPart,
    Phase,
    Review,
    Runbook,
    RunbookLine,
    Severity,
    Trajectory,
    Turn,
    Verdict,
)
from stages.records import (
    AttemptFinished,
    Candidate,
    CheckpointSaved,
    EvaluationDone,
    PhaseDone,
    PhaseStarted,
    Progress,
    ReplayJudged,
    RunbookReviewed,
    RunbookWritten,
    Selected,
    StepDone,
    TaskScore,
)
from tests import factories

HOSTILE = "<script>alert('x')</script> \x1b[31mred\x1b[0m <img src=x onerror=alert(1)> \u202eevil"
RATES = {"Base": 0.33, "RSR-1": 0.51, "RPR-1": 0.71, "RSR-2": 0.76, "RPR-2": 0.88}
SUITES = ("heldout-names", "heldout-combinations")


@dataclass(frozen=True, slots=True)
class Seeded:
    cycle: m.Cycle
    stages: Sequence[m.Stage]
    hostile_id: str
    runbook_id: str
    long_id: str


def seed_cycle(
    store: Store, folder: Path, *, until: int = 5, running: bool = False, name: str = "demo", offset: int = 0
) -> Seeded:
    """Stages 0 … until-1 are done; with `running` the next one is half-way. `offset` keeps trajectory ids apart."""
    cycle = factories.cycle(store, name=name, seed=offset)
    assert cycle.id is not None
    stages = factories.stages(store, cycle.id)
    store.cycles.set_state(cycle.id, m.CycleState.RUNNING)
    hostile = _hostile(offset)
    runbook = f"{offset:04x}book"
    long = f"{offset + 900_000:024x}"
    parents: tuple[int | None, int | None] = (None, None)
    critic: str | None = None
    for stage in stages[: until + running]:
        assert stage.id is not None
        stage = store.stages.start(stage.id, actor_parent_id=parents[0], critic_parent_id=parents[1])
        _phases(store, stage, offset)
        if stage.name == "RSR-1":
            attempts = [
                AttemptFinished(phase=Phase.EXPLORE, trajectory=t)
                for t in (hostile, replace(factories.trajectory(1, passed=True, turns=700), id=long))
            ]
            persist_many(store, stage, attempts)
            _runbook(store, stage, runbook, hostile.id)
        if stage.index == until:
            persist(store, stage, Progress(phase=Phase.JOINT, done=4, total=12, text="success 0.74, EV 0.12"))
            break
        if stage.kind is m.StageKind.RPR:
            critic = f"{stage.index}c" * 32
        name_ = stage.name
        persist(
            store,
            stage,
            CheckpointSaved(name=name_, path=folder / name_, actor_digest=f"{stage.index}a" * 32, critic_digest=critic),
        )
        saved = store.checkpoints.named(cycle.id, name_)
        assert saved is not None
        for number, suite in enumerate(SUITES):
            persist(store, stage, evaluation(name_, suite, RATES[name_] - 0.06 * number, seed=stage.index + offset))
        store.stages.set_state(stage.id or 0, m.StageState.DONE)
        parents = (saved.id, saved.id if critic else None)
    lines = [NewLine(level=20, text=f"step {i} done", logger="rsi") for i in range(60)]
    store.logs.append(cycle.id, [*lines, NewLine(level=30, text="slow sandbox <b>17 s</b>")])
    if not running:
        store.cycles.set_state(cycle.id, m.CycleState.DONE)
    return Seeded(store.cycles.get(cycle.id), store.stages.of_cycle(cycle.id), hostile.id, runbook, long)


def evaluation(
    checkpoint: str, suite: str, rate: float, *, seed: int = 0, tasks: int = 40, k: int = 3
) -> EvaluationDone:
    rng = np.random.default_rng(seed)
    scores = []
    for i in range(tasks):
        wins = rng.random(k) < np.clip(rate + rng.normal(0, 0.15), 0, 1)
        verdicts = tuple(Verdict.PASSED if w else Verdict.FAILED for w in wins)
        scores.append(
            TaskScore(
                task_id=f"{suite}-{i:04d}",
                family=f"family-{i % 10}",
                stratum="medium",
                verdicts=verdicts,
                checks_passed=tuple(3 if w else 1 for w in wins),
                checks_total=3,
            )
        )
    passed = sum(v is Verdict.PASSED for s in scores for v in s.verdicts)
    return EvaluationDone(
        suite=suite,
        suite_digest=("d" if suite == SUITES[0] else "e") * 64,
        checkpoint=checkpoint,
        k=k,
        passed=passed,
        attempts=tasks * k,
        verdicts=tasks * k,
        tasks=tuple(scores),
        turns=tasks * k * 5,
        tokens=123_456,
        settings={"harness": "shell", "temperature": 0.6, "top_p": 0.95},
    )


def _phases(store: Store, stage: m.Stage, offset: int) -> None:
    """Attempts, steps and facts of one stage."""
    rate = RATES[stage.name]
    if stage.kind is m.StageKind.RSR:
        for phase in (Phase.EXPLORE, Phase.REPLAY):
            persist(store, stage, PhaseStarted(phase=phase, total=24))
            _attempts(store, stage, phase, 0, 12, rate - 0.1, offset)
            persist(store, stage, PhaseDone(phase=phase, facts={"passed": 6, "attempts": 12, "note": None}))
        persist(
            store,
            stage,
            Selected(
                phase=Phase.DISTIL,
                chosen="last",
                candidates=(
                    Candidate(label="parent", passed=50, attempts=160, verdicts=160),
                    Candidate(label="last", passed=80, attempts=160, verdicts=160),
                ),
                suite="validation",
                suite_digest="f" * 64,
            ),
        )
    elif stage.kind is m.StageKind.RPR:
        for phase, steps in ((Phase.CALIBRATE, 4), (Phase.JOINT, 12 if stage.round == 1 else 4)):
            persist(store, stage, PhaseStarted(phase=phase, total=steps))
            for step in range(1, steps + 1):
                _attempts(store, stage, phase, step, 8, rate - 0.1 + step / 100, offset)
                ev = None if step == 2 and phase is Phase.JOINT else -0.9 / (step + stage.index) + 0.02 * step
                persist(store, stage, StepDone(phase=phase, step=step, metrics={"critic/vf_explained_var": ev}))
            persist(store, stage, PhaseDone(phase=phase, facts={"steps": steps}))


def _attempts(store: Store, stage: m.Stage, phase: Phase, step: int, n: int, rate: float, offset: int) -> None:
    start = offset + 10_000 * (stage.index + 1) + 1000 * (list(Phase).index(phase) % 10) + 40 * step
    rng = np.random.default_rng(start)
    attempts = []
    for i in range(n):
        won = bool(rng.random() < rate)
        end = EndReason.DONE if won or i % 2 else EndReason.TURN_CAP
        t = factories.trajectory(start + i, passed=won, turns=3 + i % 4, tokens=120, version=stage.name, end=end)
        attempts.append(AttemptFinished(phase=phase, trajectory=t, step=step))
    persist_many(store, stage, attempts)


def _hostile(offset: int) -> Trajectory:
    base = factories.trajectory(2, task="evil<task>", passed=True, turns=4)
    turns = (
        Turn(index=0, action=f"echo {HOSTILE}", observation=HOSTILE, exit_code=0, start=0, end=7),
        Turn(index=1, action="cat big.log", observation="line\n" * 400, exit_code=1, start=20, end=25),
        Turn(index=2, action="cat fodu.ref", observation="zuko", exit_code=0, start=40, end=44, segment=1),
        Turn(index=3, action="sleep 99", observation="", exit_code=None, timed_out=True, start=60, end=63, segment=1),
    )
    return replace(base, id=f"{offset + 800_000:024x}", turns=turns, flags=("broke<verifier>",), verifier_log=HOSTILE)


def _runbook(store: Store, stage: m.Stage, runbook_id: str, source: str) -> None:
    lines = (RunbookLine(text="cat fodu.ref", cites=(2,)), RunbookLine(text=f"mkdir zuko {HOSTILE}", cites=(0, 2)))
    book = Runbook(
        id=runbook_id, task_id="evil<task>", source_trajectory_id=source, planner="Base", lines=lines, raw_text="x"
    )
    persist(store, stage, RunbookWritten(runbook=book))
    finding = Finding(
        part=LeakPart.ARTIFACT,
        severity=Severity.SOFT,
        rule="artifact.read-value",
        message="holds a value that must be read",
        line=1,
        start=6,
        end=10,
        evidence="zuko",
        evidence_source="turn 2",
    )
    review = Review(
        runbook_id=runbook_id,
        revision=1,
        reviewer="rules",
        decision=Decision.REJECT,
        reason="read",
        findings=(finding,),
    )
    persist(store, stage, RunbookReviewed(review=review))
    replayed = replace(factories.trajectory(3, passed=True), id=f"{source[:-1]}f", runbook_id=runbook_id)
    persist_many(store, stage, [AttemptFinished(phase=Phase.REPLAY, trajectory=replayed)])
    persist(
        store, stage, ReplayJudged(trajectory_id=replayed.id, runbook_id=runbook_id, accepted=False, reason="leak: x")
    )


def stretch_times(store: Store, cycle_id: int) -> None:
    """Give the stages plausible lengths: written in one moment they would all be points on a Gantt chart."""
    from sqlalchemy import text

    with store.transaction() as session:
        begin = now() - timedelta(minutes=14)
        for stage in store.stages.of_cycle(cycle_id):
            if stage.started_at is None:
                continue
            start = begin + timedelta(seconds=160 * stage.index)
            length = timedelta(seconds=150) if stage.finished_at else None
            session.execute(
                text(
                    "UPDATE stage SET started_at = :a, finished_at = CASE WHEN finished_at IS NULL THEN NULL ELSE :b END, "
                    "expected_s = :e WHERE id = :i"
                ),
                {"a": start, "b": start + (length or timedelta()), "e": 130 + 10 * stage.index, "i": stage.id},
            )
            phases = store.stages.phases(stage.id or 0)
            for number, phase in enumerate(phases.values()):
                at = start + timedelta(seconds=150 / max(1, len(phases)) * number)
                session.execute(
                    text("UPDATE stage_phase SET started_at = :a, finished_at = :b WHERE stage_id = :i AND phase = :p"),
                    {"a": at, "b": at + timedelta(seconds=150 / len(phases)), "i": stage.id, "p": phase.phase.value},
                )
        session.execute(
            text("UPDATE cycle SET started_at = :a, created_at = :a WHERE id = :i"), {"a": begin, "i": cycle_id}
        )
