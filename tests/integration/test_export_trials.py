"""`rsi export trials`: stored attempts become Harbor jobs that `rsi import harbor` reads back to the same outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import models as m
from orchestrator.cli import app
from orchestrator.commands import terminal
from orchestrator.export_trials import export_checkpoint, export_cycle, export_evaluation
from orchestrator.import_trials import import_harbor
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import EndReason, Phase, Stratum, Task
from stages.errors import StoreError, TrialError
from stages.records import EvaluationDone
from tests import factories

SUITE = "bench"


@pytest.fixture
def evaluation(store: Store) -> m.Evaluation:
    """RPR-2 measured twice on each of three tasks, some attempts ended by a cap; and one explored attempt."""
    cycle = factories.cycle(store)
    assert cycle.id is not None
    row = store.checkpoints.save(
        m.Checkpoint(cycle_id=cycle.id, name="RPR-2", actor_digest="a" * 64, path="/nowhere", retained=True)
    )
    tasks = [
        Task(id=f"t{n}", suite=SUITE, family="f", stratum=Stratum.EASY, instruction=f"Do {n}.", root=Path(), digest=f"d{n}")
        for n in range(3)
    ]  # fmt: skip
    store.suites.register(SUITE, "x" * 64, m.Split.HELD_OUT, tasks, version="1.0")
    ends = [EndReason.DONE, EndReason.TURN_CAP, EndReason.TOKEN_CAP]
    made = [
        factories.trajectory(n, task=f"t{n // 2}", suite=SUITE, version="RPR-2", turns=3, end=ends[n % 3])
        for n in range(6)
    ]
    stage = factories.stages(store, cycle.id)[-1].id
    more = {"cycle_id": cycle.id, "stage_id": stage, "checkpoint_ids": [row.id]}
    store.trajectories.add(made, phase=Phase.EVALUATE, **{**more, "checkpoint_ids": [row.id] * 6})
    explored = factories.trajectory(9, task="t1", suite=SUITE, version="RPR-2", turns=2)
    store.trajectories.add([explored], phase=Phase.EXPLORE, **more)
    done = EvaluationDone(
        suite=SUITE, suite_digest="x" * 64, checkpoint="RPR-2", k=2, passed=sum(t.strict for t in made), attempts=6,
        verdicts=6, tasks=(), settings={"harness": "shell", "temperature": 0.6, "api_key": "hidden"},
    )  # fmt: skip
    return store.evaluations.get(store.evaluations.save(done, cycle_id=cycle.id, stage_id=stage, checkpoint_id=row.id))


def outcomes(store: Store, **where: object) -> list[tuple[object, ...]]:
    out = []
    for row in store.trajectories.list(TrajectoryFilter(**where), limit=100).items:
        detail = store.trajectories.detail(row.id)
        checks = tuple((c.check_id, c.role, c.status, c.message) for c in detail.checks)
        turns = tuple((t.index, t.action, t.observation, t.segment) for t in detail.turns)
        out.append((row.task_id, row.verdict, row.end_reason, row.strict, row.progress, row.n_checks, checks, turns))
    return sorted(out, key=repr)


def test_the_round_trip_gives_the_same_outcomes_checks_and_turns(
    store: Store, evaluation: m.Evaluation, tmp_path: Path
) -> None:
    assert evaluation.id is not None
    (job,) = export_evaluation(store, evaluation.id, tmp_path / "rpr-2")
    assert (job.trials, job.suite, job.model) == (6, SUITE, "RPR-2")
    assert b"hidden" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*.json"))
    report = import_harbor(store, [tmp_path / "rpr-2"])
    assert (report.trials, report.with_checks, report.with_turns, report.skipped, report.notes) == (6, 6, 6, (), ())
    (back,) = report.evaluations
    assert (back.checkpoint, back.passed, back.verdicts, back.tasks) == ("rpr-2", evaluation.passed, 6, 3)
    mine = outcomes(store, checkpoint_id=evaluation.checkpoint_id, phase=Phase.EVALUATE)
    assert outcomes(store, checkpoint_id=back.checkpoint_id) == mine
    again = store.evaluations.get(back.evaluation_id)
    assert again.settings["agent.temperature"] == 0.6


def test_a_cycle_and_a_checkpoint_become_a_folder_of_jobs(
    store: Store, evaluation: m.Evaluation, tmp_path: Path
) -> None:
    assert evaluation.cycle_id is not None
    assert evaluation.checkpoint_id is not None
    jobs = export_cycle(store, evaluation.cycle_id, tmp_path / "cycle")
    names = {"RPR-2__explore__bench": 1, "RPR-2__evaluate__bench": 6}
    assert {j.folder.name: j.trials for j in jobs} == names
    assert {p.name for p in (tmp_path / "cycle").iterdir()} == set(names)
    same = export_checkpoint(store, store.checkpoints.get(evaluation.checkpoint_id), tmp_path / "checkpoint")
    assert {j.folder.name: j.trials for j in same} == names
    with pytest.raises(TrialError, match="nothing is overwritten"):
        export_cycle(store, evaluation.cycle_id, tmp_path / "cycle")
    other = factories.cycle(store, "empty")
    with pytest.raises(TrialError, match="no attempt to export"):
        export_cycle(store, other.id or 0, tmp_path / "none")
    with pytest.raises(StoreError):
        export_cycle(store, 999, tmp_path / "none")
    assert {p.name for p in tmp_path.iterdir()} - {"artifacts"} == {"checkpoint", "cycle"}  # no half of a failed one


def test_a_suite_that_was_measured_again_at_another_size(
    store: Store, evaluation: m.Evaluation, tmp_path: Path
) -> None:
    """What `rsi evaluate` measures is another version of the suite: what the cycle attempted keeps its own tasks."""
    edited = Task(id="t0", suite=SUITE, family="f", stratum=Stratum.EASY, instruction="Do it.", root=Path(), digest="e")
    store.suites.register(SUITE, "y" * 64, m.Split.HELD_OUT, [edited], version="1.0")
    assert evaluation.cycle_id is not None
    jobs = export_cycle(store, evaluation.cycle_id, tmp_path / "cycle")
    told = [json.loads(p.read_text())["task_checksum"] for j in jobs for p in j.folder.glob("*/result.json")]
    assert sorted(told) == ["d0", "d0", "d1", "d1", "d1", "d2", "d2"]
    report = import_harbor(store, [j.folder for j in jobs])
    assert (report.trials, report.skipped) == (7, ())
    measured = EvaluationDone(
        suite=SUITE, suite_digest="y" * 64, checkpoint="RPR-2", k=2, passed=1, attempts=2, verdicts=2, tasks=()
    )
    later = store.evaluations.save(measured, cycle_id=evaluation.cycle_id, checkpoint_id=evaluation.checkpoint_id)
    with pytest.raises(TrialError, match=f"no transcripts; `rsi export trials cycle:{evaluation.cycle_id}"):
        export_evaluation(store, later, tmp_path / "evaluation")


def test_the_command(store: Store, evaluation: m.Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened() -> Iterator[Store]:
        yield store

    monkeypatch.setattr(terminal, "opened_store", opened)
    for what, jobs in ((f"evaluation:{evaluation.id}", "6 trials in 1 job folder:"), (f"checkpoint:{evaluation.cycle_id}/RPR-2", "7 trials in 2 job folders:")):  # fmt: skip
        folder = tmp_path / what.partition(":")[0]
        done = CliRunner().invoke(app, ["export", "trials", what, str(folder)])
        assert done.exit_code == 0, done.output
        assert jobs in done.output
        assert folder.is_dir()
    for what in ("cycle", "cycle:x", "task:1", ""):
        done = CliRunner().invoke(app, ["export", "trials", what, str(tmp_path / "wrong")])
        assert done.exit_code != 0
        assert not (tmp_path / "wrong").exists()
