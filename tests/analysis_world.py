"""A finished cycle whose last evaluation has its attempts stored, and steps that kept what they trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from orchestrator import models as m
from orchestrator.persist import persist, persist_many
from orchestrator.store import Store
from stages.domain import EndReason, Phase, Stratum, Task, Trajectory, Verdict
from stages.records import AttemptFinished, StepDone, TaskScore, TrainedOn
from tests import factories
from tests.console_cycle import HOSTILE, RATES, SUITES, Seeded, evaluation, seed_cycle


@dataclass(frozen=True, slots=True)
class Analysed:
    store: Store
    seeded: Seeded
    checkpoints: list[m.Checkpoint]  # Base … RPR-2
    trained: Trajectory  # with values and advantages
    suspicious: Trajectory  # passed, and flagged


def seed_analysis(store: Store, folder: Path) -> Analysed:
    seed_suite(store)
    seeded = seed_cycle(store, folder)
    cycle_id = seeded.cycle.id or 0
    checkpoints = [c for name in RATES if (c := store.checkpoints.named(cycle_id, name)) is not None]
    for number, (stage, checkpoint) in enumerate(zip(seeded.stages, checkpoints, strict=True)):
        measured = evaluation(checkpoint.name, SUITES[0], RATES[checkpoint.name], seed=stage.index)
        persist_many(store, stage, [_attempt(t, a, number, checkpoint.name) for t in measured.tasks for a in range(3)])
    trained = _train(store, seeded)
    suspicious = replace(
        factories.trajectory(7_000_001, passed=True, task=f"{SUITES[0]}-0001", suite=SUITES[0]),
        flags=("broke_verifier",),
        verifier_log=f"tests/test.sh was replaced {HOSTILE}",
    )
    persist_many(store, seeded.stages[2], [AttemptFinished(phase=Phase.JOINT, trajectory=suspicious, step=1)])
    return Analysed(store, seeded, checkpoints, trained, suspicious)


def _attempt(task: TaskScore, attempt: int, checkpoint: int, name: str) -> AttemptFinished:
    number = 6_000_000 + 100_000 * checkpoint + 10 * int(task.task_id[-4:]) + attempt
    won = task.verdicts[attempt] is Verdict.PASSED
    made = factories.trajectory(
        number,
        task=task.task_id,
        suite=SUITES[0],
        passed=won,
        turns=3,
        tokens=60,
        version=name,
        end=EndReason.DONE if won else EndReason.TURN_CAP,
    )
    return AttemptFinished(
        phase=Phase.EVALUATE,
        trajectory=replace(made, attempt=attempt, family=task.family, stratum=Stratum(task.stratum)),
    )


def _train(store: Store, seeded: Seeded) -> Trajectory:
    """One more joint step of RPR-1, with values and advantages of its attempts."""
    stage = seeded.stages[2]
    base = factories.trajectory(7_000_000, passed=False, turns=2, tokens=40, version="RSR-1")
    segment = replace(base.segments[0], turn_ids=np.where(base.segments[0].loss_mask, 1, -1).astype(np.int32))
    made = replace(base, segments=(segment,))
    persist_many(store, stage, [AttemptFinished(phase=Phase.JOINT, trajectory=made, step=13)])
    on = TrainedOn(
        trajectory_id=made.id,
        reward=0.625,
        values=(np.linspace(-1, 1, 40, dtype=np.float32),),
        advantages=(np.where(segment.loss_mask, np.linspace(1, -1, 40), 0).astype(np.float32),),
    )
    metrics = {"critic/vf_explained_var": 0.31, "rollout/success": 0.7}
    metrics |= {f"critic/vf_explained_var/turn/{t}": 0.1 * t for t in range(3)}
    metrics |= {"critic/vf_explained_var/family/family-1": -0.2}
    persist(store, stage, StepDone(phase=Phase.JOINT, step=13, metrics=metrics, trained_on=(on,)))
    return made


def seed_suite(store: Store, *, tasks: int = 40) -> None:
    """The first suite's tasks, with instructions and categories."""
    words = ("debugging", "system administration", "data")
    store.suites.register(
        SUITES[0],
        "d" * 64,
        m.Split.HELD_OUT,
        [
            Task(
                id=f"{SUITES[0]}-{i:04d}",
                suite=SUITES[0],
                family=f"family-{i % 10}",
                stratum=Stratum.MEDIUM,
                instruction=f"Make the file number {i}. {HOSTILE}",
                root=Path("tasks"),
                digest=f"{i:064x}",
                categories=(words[i % 3],),
            )
            for i in range(tasks)
        ],
    )
