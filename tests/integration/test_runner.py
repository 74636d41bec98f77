"""What the runner does between records: who holds a stage, what people are told, which folders stay. No model runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from orchestrator import gate, reviewing, transitions, workers
from orchestrator import models as m
from orchestrator.finished import StoredPhases
from orchestrator.holding import Superseded, settle
from orchestrator.launch import create_cycle
from orchestrator.persist import persist
from orchestrator.recipes import load_recipe
from orchestrator.runner import Runner
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.backends.learner.checkpoint import digest_weights
from stages.domain import Decision, Phase, Review, Runbook, RunbookLine
from stages.errors import ConfigError
from stages.loop import SEED_CRITIC, ReviewPending
from stages.records import CheckpointSaved, PhaseDone, Record, RunbookReviewed, RunbookWritten, StepDone
from stages.review import PolicyMode, ReviewPolicy

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
    monkeypatch.setattr(Runner, "_work_and_measure", lambda *_: (record for record in records))


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


def test_a_step_over_a_limit_is_logged_and_told(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cycle_id = runner.store, runner.cycle.id or 0
    works_on(monkeypatch, iter([replace(STEP, metrics={"train/ppo_kl": 3.0, "train/ratio_max": 1e6}), STEP]))
    runner.run_stage("Base")
    (warnings,) = ([line.text for line in store.logs.read(cycle_id, min_level=30)],)
    assert len(warnings) == 2
    assert any("train/ppo_kl is 3, over 1" in text for text in warnings)
    told = [e.payload for e in store.events.after(0) if e.kind == m.EventKind.ALARM]
    assert {(p["stage"], p["phase"], p["step"]) for p in told} == {("Base", "joint", 1)}
    assert all(any(p["text"] in text for text in warnings) for p in told)


def weights(folder: Path, byte: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save({"w": np.full(4, byte, np.uint8)}))
    return folder


def saved(work: Path, name: str, actor: int, critic: int | None, *, step: int | None = None) -> CheckpointSaved:
    """A checkpoint folder with real digests."""
    actor_digest = digest_weights(weights(work / "actor", actor))
    critic_digest = digest_weights(weights(work / "critic", critic)) if critic is not None else None
    return CheckpointSaved(name=name, path=work, actor_digest=actor_digest, critic_digest=critic_digest, step=step)


def test_a_published_folder_with_other_bytes_is_written_again(runner: Runner, tmp_path: Path) -> None:
    row = runner.store.stages.named(runner.cycle.id or 0, "RPR-1")
    assert row is not None
    first = runner._published(row, saved(tmp_path / "one", "RPR-1", 1, 2))
    assert isinstance(first, CheckpointSaved)
    inode = (first.path / "actor" / "model.safetensors").stat().st_ino
    same = runner._published(row, saved(tmp_path / "one", "RPR-1", 1, 2))
    assert same == first
    assert (first.path / "actor" / "model.safetensors").stat().st_ino == inode  # not copied again
    for actor, critic in ((1, 3), (4, 3), (4, None)):
        again = runner._published(row, saved(tmp_path / f"{actor}-{critic}", "RPR-1", actor, critic))
        assert isinstance(again, CheckpointSaved)
        assert again.path == first.path
        assert digest_weights(again.path / "actor") == again.actor_digest
        assert (again.path / "critic").exists() == (critic is not None)
        if critic is not None:
            assert digest_weights(again.path / "critic") == again.critic_digest


def test_a_cancelled_stage_leaves_no_work_folder(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cycle_id = runner.store, runner.cycle.id or 0
    work = runner.home / "work" / "RPR-1"

    def records() -> Iterator[Record]:
        yield saved(work / "joint" / "step-1", "step 1", 1, 2, step=1)
        transitions.cancel(store, cycle_id, "ada")
        yield STEP
        pytest.fail("it trained on")

    works_on(monkeypatch, records())
    with settle(store, cycle_id) as outcome:
        runner.run_stage("RPR-1")
    assert outcome.state is m.CycleState.CANCELLED
    row = store.stages.named(cycle_id, "RPR-1")
    assert row is not None
    assert row.state is m.StageState.CANCELLED
    assert not work.exists()
    (candidate,) = store.checkpoints.of_cycle(cycle_id, candidates=True)
    assert (candidate.name, candidate.path) == ("RPR-1 step 1", "")


def test_a_pause_keeps_the_work_folder_and_a_sweep_clears_what_has_ended(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cycle_id = runner.store, runner.cycle.id or 0
    work = runner.home / "work"

    def records() -> Iterator[Record]:
        yield saved(work / "RPR-1" / "step-1", "step 1", 1, 2, step=1)
        transitions.pause(store, cycle_id, "ada")
        yield STEP

    works_on(monkeypatch, records())
    with settle(store, cycle_id) as outcome:
        runner.run_stage("RPR-1")
    assert outcome.state is m.CycleState.PAUSED
    row = store.stages.named(cycle_id, "RPR-1")
    assert row is not None
    assert row.state is m.StageState.PAUSED
    runner.sweep()
    assert (work / "RPR-1" / "step-1" / "actor").is_dir()
    store.stages.set_state(row.id or 0, m.StageState.DONE)  # and its process died before it had cleared up
    runner.sweep()
    assert not (work / "RPR-1").exists()
    assert [c.path for c in store.checkpoints.of_cycle(cycle_id, candidates=True)] == [""]


def test_a_resumed_stage_keeps_its_seed_critic_and_its_facts(runner: Runner, tmp_path: Path) -> None:
    store, cycle_id = runner.store, runner.cycle.id or 0
    row = store.stages.named(cycle_id, "RPR-1")
    assert row is not None
    assert row.id is not None
    row = store.stages.start(row.id)
    seed = saved(tmp_path / "seed", f"RPR-1 {SEED_CRITIC}", 1, 2)
    persist(store, row, seed)
    runner._enter_seed_critic(row, seed.name)
    known = store.checkpoints.named(cycle_id, seed.name)
    assert known is not None
    persist(store, row, PhaseDone(phase=Phase.PROFILE, facts={"attempts": 8}))
    finished = store.stages.phases(row.id)[Phase.PROFILE].finished_at

    again = store.stages.start(row.id, critic_parent_id=None)
    assert again.critic_parent_id == known.id
    persist(store, again, seed)  # yielded once more
    assert store.checkpoints.get(known.id or 0).critic_parent_id is None  # it is not its own parent
    persist(store, again, PhaseDone(phase=Phase.PROFILE, facts={}))
    phase = store.stages.phases(row.id)[Phase.PROFILE]
    assert (phase.facts, phase.finished_at) == ({"attempts": 8}, finished)


def test_a_verdict_that_came_before_the_process_let_go_wakes_the_cycle(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    monkeypatch.setattr(workers, "submit_cycle", lambda cycle_id, **_: submitted.append(cycle_id) or "flow")
    store, cycle_id = runner.store, runner.cycle.id or 0
    stage = store.stages.named(cycle_id, "RSR-1")
    assert stage is not None
    policy = ReviewPolicy(mode=PolicyMode.HUMAN, required_reviewers=1)
    monkeypatch.setattr(gate, "policy_of", lambda *_: policy)
    book = Runbook(
        id="b" * 24,
        task_id="t",
        source_trajectory_id="s",
        planner="Base",
        lines=(RunbookLine(text="ls", cites=(0,)),),
        raw_text="1. ls",
    )
    persist(store, stage, RunbookWritten(runbook=book))
    rules = Review(runbook_id=book.id, revision=1, reviewer="rules", decision=Decision.APPROVE)
    finished = StoredPhases(store, stage, policy)
    assert finished.approved() is None
    persist(store, stage, RunbookReviewed(review=rules), human_review=True)
    persist(store, stage, PhaseDone(phase=Phase.REVIEW))
    assert finished.approved() is None  # the phase is done, people are not

    def suspended(verdicts: Sequence[Decision]) -> m.CycleState:
        with settle(store, cycle_id) as outcome:
            for decision in verdicts:
                reviewing.decide(store, book.id, "ada", decision, reason="read")
            store.stages.set_state(stage.id or 0, m.StageState.SUSPENDED)
            raise ReviewPending("people")
        return outcome.state

    assert suspended([]) is m.CycleState.SUSPENDED
    assert submitted == []
    transitions.resume(store, cycle_id, "ada")
    # approve, reject, approve: three acts, and the last one counts
    assert suspended([Decision.APPROVE, Decision.REJECT, Decision.APPROVE]) is m.CycleState.RESUMING
    assert [r.decision for r in store.reviews.of(book.id, 1) if r.reviewer == "person:ada"] == [
        m.ReviewDecision.APPROVE, m.ReviewDecision.REJECT, m.ReviewDecision.APPROVE
    ]  # fmt: skip
    assert store.runbooks.get(book.id).state is m.RunbookState.APPROVED
    assert finished.approved() == {book.id}  # read anew by the same object
    assert submitted == [cycle_id]
