"""One small complete cycle on a real Postgres, in real sandboxes; then the same one killed in mid-PPO and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator import reviewing, workers
from orchestrator.launch import create_cycle, pause_cycle
from orchestrator.lineage import Proof, prove_critic
from orchestrator.measure import measure, suite_named
from orchestrator.recipes import load_recipe
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.trajectories import TrajectoryFilter
from orchestrator.token_view import turn_tokens
from orchestrator.transitions import resume
from stages.backends.learner.checkpoint import digest_weights
from stages.domain import Decision, Phase
from stages.errors import ConfigError, StoreError

NAMES = ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
CHILD = """
import sys
from pathlib import Path
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
url, artifacts, home, cycle = sys.argv[1:]
store = Store.open(url, artifacts)
run_cycle(store, Settings(home=Path(home)), int(cycle))
"""


def new_cycle(store: Store, **overrides: object) -> int:
    cycle = create_cycle(store, load_recipe("smoke", overrides=overrides), actor="test")
    assert cycle.id is not None
    return cycle.id


def digests(store: Store, cycle_id: int) -> dict[str, tuple[str, str | None]]:
    return {c.name: (c.actor_digest, c.critic_digest) for c in store.checkpoints.of_cycle(cycle_id) if c.retained}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_a_cycle_completes_and_one_killed_in_mid_ppo_ends_in_the_same_digests(
    store: Store, settings: Settings, database_url: str
) -> None:
    whole = new_cycle(store)
    assert run_cycle(store, settings, whole) is m.CycleState.DONE
    check_records(store, whole)
    (measured,) = measure(
        store,
        settings,
        [store.checkpoints.named(whole, "RPR-2")],
        [suite_named("heldout-names", 3, settings)],
        attempts_per_task=2,
    )
    assert measured.attempts == 6
    assert len(store.evaluations.list(cycle_id=whole).items) == 11

    killed = new_cycle(store)
    with child(store, settings, database_url, killed) as process:
        wait_for_step(store, killed, "RPR-1", Phase.JOINT, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = store.trajectories.count(TrajectoryFilter(cycle_id=killed))
    assert len(digests(store, killed)) == 2  # Base and RSR-1 stand; RPR-1 was under way
    store.cycles.set_state(killed, m.CycleState.FAILED, error="its process is gone")  # what the reconciler writes
    resume(store, killed, "test")
    assert run_cycle(store, settings, killed) is m.CycleState.DONE
    assert store.trajectories.count(TrajectoryFilter(cycle_id=killed)) >= before
    assert digests(store, killed) == digests(store, whole)


def check_records(store: Store, cycle_id: int) -> None:
    found = digests(store, cycle_id)
    assert list(found) == NAMES
    rows = {c.name: c for c in store.checkpoints.of_cycle(cycle_id)}
    # the critic: none before RPR-1, a new one there, untouched by RSR-2, trained on by RPR-2
    assert found["RSR-1"][1] is None
    assert prove_critic(store, rows["RSR-1"].id).proof is Proof.NO_CRITIC
    proof = prove_critic(
        store, rows["RSR-2"].id, digests=lambda f: (digest_weights(f / "actor"), digest_weights(f / "critic"))
    )
    assert proof.proof is Proof.UNCHANGED
    assert proof.recomputed
    assert found["RPR-1"][1] != found["RPR-2"][1]
    stages = {s.name: s for s in store.stages.of_cycle(cycle_id)}
    for name in ("RPR-1", "RPR-2"):
        calibration = store.metrics.steps(stages[name].id, Phase.CALIBRATE)
        assert sorted(calibration) == [1, 2, 3, 4]
        assert all("train/pg_loss" not in step and "critic/value_loss" in step for step in calibration.values())
        joint = store.metrics.steps(stages[name].id, Phase.JOINT)
        assert sorted(joint) == [1, 2]
        for step in joint.values():
            assert step["rollout/drift_tokens"] == 0
            assert step["train/train_rollout_logprob_abs_diff"] < 1e-3
            assert step["critic/vf_explained_var"] is not None
        assert store.selections.get(stages[name].id, Phase.JOINT) is not None
        assert store.profiles.load(stages[name].id)
    boundaries = store.trajectories.boundaries(stages["RPR-1"].id)
    assert boundaries["drift_tokens"] == 0
    assert boundaries["strict_prefix"] > 0
    where = TrajectoryFilter(stage_id=stages["RPR-1"].id, phase=Phase.JOINT)
    trained = next(t for t in store.trajectories.list(where).items if t.reward is not None)
    turn = turn_tokens(store, trained.id, 0)
    assert turn.scored
    assert all(t.text is not None and t.value is not None and t.advantage is not None for t in turn.tokens if t.trained)
    for name in ("RSR-1", "RSR-2"):
        arms = {row[0]: row for row in store.replays.success(stages[name].id)}
        assert {"own", "none", "other"} <= set(arms)
        assert store.runbooks.counts(stage_id=stages[name].id)
    evaluations = store.evaluations.list(cycle_id=cycle_id).items
    assert {(e.checkpoint, e.suite) for e in evaluations} == {
        (name, f"embedded:{suite}") for name in NAMES for suite in ("heldout-names", "heldout-combinations")
    }
    assert all(e.attempts == e.verdicts == 12 for e in evaluations)


def test_a_pause_takes_effect_between_records_and_loses_nothing(store: Store, settings: Settings) -> None:
    cycle_id = new_cycle(store, rounds=1)

    def pause(row: m.Stage, record: object) -> None:
        if row.name == "RSR-1" and store.cycles.get(cycle_id).state is m.CycleState.RUNNING:
            pause_cycle(store, cycle_id, actor="test")

    assert run_cycle(store, settings, cycle_id, on_record=pause) is m.CycleState.PAUSED
    assert store.stages.named(cycle_id, "RSR-1").state is m.StageState.PAUSED
    assert list(digests(store, cycle_id)) == ["Base"]


class child:
    """A process of ours that works on a cycle; whatever happens, it does not outlive the test."""

    def __init__(self, store: Store, settings: Settings, url: str, cycle_id: int) -> None:
        arguments = [url, store.artifacts.url, str(settings.home), str(cycle_id)]
        self._process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=dict(os.environ))

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def wait_for_step(store: Store, cycle_id: int, stage: str, phase: Phase, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, "the child ended before it could be killed"
        row = store.stages.named(cycle_id, stage)
        if row and store.metrics.last_step(row.id, phase):
            return
        time.sleep(0.05)
    pytest.fail(f"{stage} did not reach {phase}")


def test_a_human_gate_suspends_the_cycle_until_people_have_decided(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "submit_cycle", lambda *_, **__: "flow")  # no Prefect here; the flow is run below
    cycle_id = new_cycle(store, **{"rounds": 1, "rsr.0.review.policy": "human", "reported_size": 2})
    assert run_cycle(store, settings, cycle_id) is m.CycleState.SUSPENDED
    stage = store.stages.named(cycle_id, "RSR-1")
    assert stage.state is m.StageState.SUSPENDED
    waiting = store.runbooks.list(states=[m.RunbookState.WAITING], cycle_id=cycle_id, limit=200).items
    assert len(waiting) > 2
    with pytest.raises(StoreError, match="no runbook"):
        reviewing.decide(store, "f" * 24, "ada", Decision.APPROVE)
    rejected, *others = waiting
    first = reviewing.decide(store, rejected.id, "ada", Decision.REJECT, reason="copies")
    assert first.open
    for row in others:
        seen = [f.id or 0 for f in store.reviews.findings(row.id, 1)]
        last = reviewing.decide(store, row.id, "ada", Decision.APPROVE, reason="checked", seen=seen)
    assert not last.open
    assert store.cycles.get(cycle_id).state is m.CycleState.RESUMING  # by itself
    assert run_cycle(store, settings, cycle_id) is m.CycleState.DONE
    assert store.runbooks.get(rejected.id).state is m.RunbookState.REJECTED
    assert not store.replays.of_runbook(rejected.id)
    assert store.replays.of_runbook(others[0].id)
    with pytest.raises(ConfigError, match="consumed"):
        reviewing.decide(store, others[0].id, "bob", Decision.REJECT, reason="late")


@pytest.mark.parametrize("candidates", [["parent"], ["midpoint"]])
def test_whatever_candidate_is_kept_the_critic_passes_through_untouched(
    store: Store, settings: Settings, candidates: list[str]
) -> None:
    """Spec §2.1: Δφ = 0, byte for byte; and a discarded distillation shows as its parent."""
    small = {"reported_size": 2, "rsr.0.explore.draw.n_tasks": 16, "rpr.0.joint_steps": 1, "rpr.0.keep_steps": [1]}
    cycle_id = new_cycle(
        store, **small, **{"rsr.0.distil.candidates": candidates, "rpr.1.joint_steps": 1, "rpr.1.keep_steps": [1]}
    )
    assert run_cycle(store, settings, cycle_id) is m.CycleState.DONE
    found = digests(store, cycle_id)
    assert found["RSR-2"][1] == found["RPR-1"][1] is not None
    assert "RPR-2 seed critic" not in {c.name for c in store.checkpoints.of_cycle(cycle_id)}
    kept = candidates == ["parent"]
    assert (found["RSR-1"][0] == found["Base"][0]) is kept
    assert store.checkpoints.named(cycle_id, "RSR-2").parent_kept is kept
