"""Launching refuses what cannot run and stores nothing; resuming says what is true; a demo stops what it started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import demo, reconcile, workers
from orchestrator import models as m
from orchestrator.commands import cycle as commands
from orchestrator.commands import terminal
from orchestrator.commands.cycle_view import score_table
from orchestrator.launch import create_cycle, launch_cycle
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.workers import FlowRun, FlowState
from stages.errors import RsiError
from stages.records import EvaluationDone
from stages.tasks.embedded import embedded_suite
from stages.tasks.generate import PoolKind
from tests import factories


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def refused(store: Store, settings: Settings, **overrides: object) -> str:
    with pytest.raises(RsiError) as error:
        launch_cycle("smoke", overrides=overrides, settings=settings, store=store)
    assert store.cycles.list().items == []
    return str(error.value)


def test_a_pool_that_overlaps_what_measures_is_refused_before_anything_is_stored(
    store: Store, settings: Settings
) -> None:
    size = load_recipe("smoke").validation_size
    same = embedded_suite(PoolKind.VALIDATION, size, settings.home / "suites").path
    assert "take them out of the pool" in refused(store, settings, pool=str(same), validation_suite=str(same))


def test_a_broken_pool_is_refused_before_anything_is_stored(store: Store, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    assert str(tmp_path / "pool") in refused(
        store, settings, pool=str(tmp_path / "pool"), validation_suite=str(tmp_path / "pool")
    )


def test_a_harness_that_waits_by_the_clock_claims_no_equal_digests(store: Store) -> None:
    for harness, replays, claimed in (("shell", None, True), ("terminus2", None, False), ("shell", "terminus2", False)):
        config = load_recipe("smoke", overrides={"rollout.harness": harness})
        rsr = tuple(
            r.model_copy(update={"replay": r.replay.model_copy(update={"harness": replays})}) for r in config.rsr
        )
        cycle = create_cycle(store, config.model_copy(update={"rsr": rsr}), actor="test")
        assert (cycle.digest_claim_void == "") is claimed


@pytest.fixture
def running(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> m.Cycle:
    """A cycle that says it runs, long settled; Prefect believes so too. `rsi` works on this store."""
    cycle = factories.cycle(store)
    store.cycles.set_state(cycle.id or 0, m.CycleState.RUNNING)
    store.cycles.beat(cycle.id or 0, "old-flow")

    @contextmanager
    def opened() -> Iterator[Store]:
        yield store

    monkeypatch.setattr(terminal, "opened_store", opened)
    monkeypatch.setattr(terminal, "settings", lambda: settings)
    monkeypatch.setattr(workers, "flow_runs", lambda ids, **_: {i: FlowRun(id=i, state=FlowState.RUNNING) for i in ids})
    monkeypatch.setattr(reconcile, "everything_is_local", lambda _: True)
    monkeypatch.setattr(reconcile, "SETTLE_S", 0.0)
    return cycle


def test_resuming_after_a_kill_finds_it_out_first(
    store: Store, running: m.Cycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed, submitted = [], []
    monkeypatch.setattr(reconcile, "running_flows", lambda _: frozenset())
    monkeypatch.setattr(workers, "mark_crashed", lambda flow, *_, **__: crashed.append(flow))
    monkeypatch.setattr(
        workers, "submit_cycle", lambda _, **said: submitted.append(said["previous_flow_run_id"]) or "new-flow"
    )
    result = CliRunner().invoke(commands.app, ["resume", str(running.id)])
    assert result.exit_code == 0, result.output
    now = store.cycles.get(running.id or 0)
    assert (now.state, now.flow_run_id) == (m.CycleState.RESUMING, "new-flow")
    assert (crashed, submitted) == (["old-flow"], ["old-flow"])
    assert f"Cycle {running.id} is resuming" in result.output


def test_resuming_what_a_process_holds_says_so(store: Store, running: m.Cycle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "running_flows", lambda _: frozenset({"old-flow"}))
    monkeypatch.setattr(workers, "submit_cycle", lambda *_, **__: pytest.fail("a second process was started"))
    result = CliRunner().invoke(commands.app, ["resume", str(running.id)])
    assert result.exit_code == 0, result.output
    assert "is running: a process holds it" in " ".join(result.output.split())
    assert "continues" not in result.output
    assert store.cycles.get(running.id or 0).state is m.CycleState.RUNNING


def test_a_demo_that_fails_without_a_terminal_stops_its_services(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []

    def fail(*_: object) -> int:
        acts.append("loop")
        raise RsiError("cycle 1 failed")

    monkeypatch.setattr(demo.control, "up", lambda _: acts.append("up"))
    monkeypatch.setattr(demo.control, "down", lambda _: acts.append("down"))
    monkeypatch.setattr(demo.control, "running_settings", lambda given: given)
    monkeypatch.setattr(demo, "_loop", fail)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    with pytest.raises(RsiError, match="cycle 1 failed"):
        demo.run_demo(settings=settings)
    assert acts == ["up", "loop", "down"]


def test_a_small_measurement_does_not_hide_a_large_one(store: Store) -> None:
    """`rsi evaluate 1 --tasks 5` after the cycle has measured 40: the tables go on to show the larger, as the console does."""
    cycle = factories.cycle(store)
    base = store.checkpoints.save(
        m.Checkpoint(cycle_id=cycle.id, name="Base", actor_digest="a" * 64, path="/nowhere", retained=True)
    )
    for attempts, passed in ((120, 41), (120, 42), (15, 6)):
        done = EvaluationDone(
            suite="embedded:heldout-names", suite_digest=f"{attempts}", checkpoint="Base", k=3, passed=passed,
            attempts=attempts, verdicts=attempts, tasks=(),
        )  # fmt: skip
        store.evaluations.save(done, cycle_id=cycle.id, checkpoint_id=base.id)
    assert cycle.id is not None
    for table in (demo.results(store, cycle.id), score_table(store, cycle.id)):
        out = terminal.console()
        with out.capture() as shown:
            out.print(table)
        assert "(42/120)" in shown.get()
