"""What the runner does between records: who holds a stage, what people are told, which folders stay. No model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator.holding import Superseded, settle
from orchestrator.launch import create_cycle
from orchestrator.recipes import load_recipe
from orchestrator.runner import Runner
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Phase
from stages.errors import ConfigError
from stages.records import Record, StepDone

STEP = StepDone(phase=Phase.JOINT, step=1, metrics={"train/ppo_kl": 0.1})


@pytest.fixture
def runner(store: Store, tmp_path: Path) -> Runner:
    """A runner without a model: tests give it the records of its stages."""
    config = load_recipe("smoke", overrides={"rounds": 1})
    cycle = create_cycle(store, config, actor="test")
    return Runner(
        store=store,
        settings=Settings(home=tmp_path / "home"),
        cycle=cycle,
        config=config,
        suites=None,  # type: ignore[arg-type]
        backends=None,  # type: ignore[arg-type]
        chat=None,  # type: ignore[arg-type]
    )


def works_on(monkeypatch: pytest.MonkeyPatch, records: Iterator[Record]) -> None:
    """Let the runner's next stage yield these records."""
    monkeypatch.setattr(Runner, "_work_and_measure", lambda *_: records)


@pytest.mark.parametrize("state", sorted(set(m.CycleState) - {m.CycleState.QUEUED, m.CycleState.RESUMING}))
def test_a_second_process_is_refused(runner: Runner, state: m.CycleState) -> None:
    cycle_id = runner.cycle.id or 0
    runner.store.cycles.set_state(cycle_id, state)
    with pytest.raises(ConfigError, match=f"is {state}"), settle(runner.store, cycle_id):
        pytest.fail("it was let in")
    assert runner.store.cycles.get(cycle_id).state is state


def test_a_superseded_process_stops_and_writes_no_state(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cycle_id = runner.store, runner.cycle.id or 0
    stage = store.stages.named(cycle_id, "Base")
    assert stage is not None

    def records() -> Iterator[Record]:
        yield STEP
        store.stages.start(stage.id or 0)  # another process
        yield StepDone(phase=Phase.JOINT, step=2, metrics={})
        pytest.fail("it trained on")

    works_on(monkeypatch, records())
    with settle(store, cycle_id) as outcome:
        runner.run_stage("Base")
    assert outcome.state is m.CycleState.RUNNING  # of the process that has it now
    now = store.stages.get(stage.id or 0)
    assert (now.state, now.attempt) == (m.StageState.RUNNING, 2)
    assert "attempt 2 has taken over" in store.logs.read(cycle_id)[-1].text


def test_a_stage_taken_over_at_its_end_is_not_called_done(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = runner.store.stages.named(runner.cycle.id or 0, "Base")
    assert stage is not None

    def records() -> Iterator[Record]:
        yield STEP
        runner.store.stages.start(stage.id or 0)

    works_on(monkeypatch, records())
    with pytest.raises(Superseded):
        runner.run_stage("Base")
    assert runner.store.stages.get(stage.id or 0).state is m.StageState.RUNNING
