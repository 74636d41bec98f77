"""A cycle that really waits at its human gate: tasks on disk, real findings by the rules, suspended through `settle`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator import models as m
from orchestrator import review_look, reviewing
from orchestrator.holding import settle
from orchestrator.launch import create_cycle
from orchestrator.persist import persist, persist_many
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Decision, Phase, Review, Runbook, RunbookLine, Task, Trajectory, Turn
from stages.leaks import ReviewContext
from stages.loop import ReviewPending
from stages.records import AttemptFinished, PhaseDone, PhaseStarted, RunbookReviewed, RunbookWritten
from stages.review import PolicyMode, review_runbook
from stages.tasks.chains import TaskSpec
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.harbor import load_suite
from stages.tasks.write import write_pool
from tests import factories

PEOPLE = ("ada", "bob", "cyd")


@dataclass(frozen=True, slots=True)
class Gate:
    store: Store
    settings: Settings
    cycle_id: int
    stage: m.Stage
    clean: Sequence[str]  # runbooks that the rules found nothing against
    soft: str  # types a value that must be read: a soft finding
    hard: str  # reads the verifier: rejected by the rules


class NewGate(Protocol):
    """`open_gate` in a module's store, with ids of its own."""

    def __call__(self, *, clean: int = ..., reviewers: int = ..., planted: float = ...) -> Gate: ...


def open_gate(
    store: Store, folder: Path, *, clean: int = 3, reviewers: int = 1, planted: float = 0.0, number: int = 0
) -> Gate:
    """`number` keeps the ids of several gates in one database apart."""
    settings = Settings(home=folder / "home", known_leak_rate=planted)
    overrides = {"rounds": 1, "rsr.0.review.policy": "human", "rsr.0.review.required_reviewers": reviewers}
    cycle = create_cycle(store, load_recipe("smoke", overrides=overrides), actor="ada")
    assert cycle.id is not None
    stage = store.stages.named(cycle.id, "RSR-1")
    assert stage is not None
    assert stage.id is not None
    for login in PEOPLE:
        if store.users.named(login) is None:
            store.users.add(login, [m.Role.REVIEWER])
    pairs = pool(store, folder)
    try:
        with settle(store, cycle.id, settings):
            stage = store.stages.start(stage.id, actor_parent_id=None, critic_parent_id=None)
            found = _review(store, stage, pairs, clean, number)
            store.stages.set_state(stage.id or 0, m.StageState.SUSPENDED)
            raise ReviewPending("people")
    finally:
        assert store.cycles.get(cycle.id).state is m.CycleState.SUSPENDED
    return Gate(store, settings, cycle.id, stage, *found)


def decide(gate: Gate, runbook: str, who: str, decision: Decision, **more: object) -> reviewing.Outcome:
    """A verdict of somebody who has looked at everything."""
    seen = [f.id for f in gate.store.reviews.findings(runbook, gate.store.runbooks.get(runbook).revision)]
    words = {"reason": "read it"} | more
    return reviewing.decide(gate.store, runbook, who, decision, seen=seen, settings=gate.settings, **words)  # type: ignore[arg-type]


def state(gate: Gate, runbook: str) -> m.RunbookState:
    return gate.store.runbooks.get(runbook).state


def look(gate: Gate, runbook: str, who: str, *, decider: bool = True) -> review_look.Look:
    return review_look.look(gate.store, runbook, who, decider=decider)


def pool(store: Store, folder: Path) -> list[tuple[TaskSpec, Task]]:
    specs = generate_pool(PoolKind.TRAIN, 48, seed=17)
    path = folder / "pool"
    if not path.exists():
        write_pool(specs, path, name="pool")
    suite = load_suite(path)
    store.suites.register(suite.name, suite.digest, m.Split.TRAIN, suite.tasks, path=str(path))
    tasks = {t.id: t for t in suite.tasks}
    return [(spec, tasks[spec.id]) for spec in specs]


def _review(
    store: Store, stage: m.Stage, pairs: list[tuple[TaskSpec, Task]], clean: int, number: int
) -> tuple[list[str], str, str]:
    """Explore, rewrite and review as a stage would record them."""
    passed: list[str] = []
    soft = hard = ""
    persist(store, stage, PhaseStarted(phase=Phase.REVIEW, total=None))
    for i, (spec, task) in enumerate(pairs):
        source = success(spec, task, number * 10_000 + i)
        honest = spec.runbook(random.Random(spec.id))
        typed = [t.action for t in source.turns][: len(honest)]
        kind = (
            "hard" if not hard else "soft" if not soft and typed != honest else "clean" if len(passed) < clean else ""
        )
        lines = {"hard": [*honest, "cat /tests/test.sh"], "soft": typed, "clean": honest}.get(kind)
        if lines is None:
            continue
        persist_many(store, stage, [AttemptFinished(phase=Phase.EXPLORE, trajectory=source)])
        book = Runbook(
            id=f"{number:02x}{i:03x}{spec.id.encode().hex()}"[:24].ljust(24, "0"),
            task_id=task.id,
            source_trajectory_id=source.id,
            planner="Base",
            lines=tuple(RunbookLine(text=t, cites=(min(n, len(honest) - 1),)) for n, t in enumerate(lines)),
        )
        persist(store, stage, RunbookWritten(runbook=book))
        context = ReviewContext.for_task(task, source, literal_lines=True)
        rules: Review = review_runbook(book, context, PolicyMode.HUMAN)
        persist(store, stage, RunbookReviewed(review=rules), human_review=True)
        if kind == "hard":
            assert rules.decision is Decision.REJECT
            hard = book.id
        elif kind == "soft":
            assert rules.findings
            soft = book.id
        else:
            assert not rules.findings
            passed.append(book.id)
    persist(store, stage, PhaseDone(phase=Phase.REVIEW, facts={}))
    return passed, soft, hard


def success(spec: TaskSpec, task: Task, number: int) -> Trajectory:
    """The solution as an agent would type it, one command a turn, with what `cat` shows."""
    commands = spec.solution(random.Random(spec.id))
    turns = []
    for i, command in enumerate([*commands, "done"]):
        read = command.split()[1] if command.startswith("cat ") else ""
        shown = spec.files.get(read, "")
        turns.append(Turn(index=i, action=command, observation=shown, exit_code=0, start=10 * i, end=10 * i + 5))
    base = factories.trajectory(700_000 + number, task=task.id, passed=True, suite=task.suite, version="Base")
    return replace(base, turns=tuple(turns), family=task.family)
