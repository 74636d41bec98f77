"""Experiments on a real store, in real sandboxes: shared prefixes, stopping and killing, and what comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import models as m
from orchestrator.experiments.export import effect_rows, to_markdown
from orchestrator.experiments.report import report_of, summary
from orchestrator.experiments.run import Watch, match_arm, register, run_experiment
from orchestrator.experiments.spec import ExperimentSpec, load_spec, parse_spec
from orchestrator.experiments.spent import spent
from orchestrator.launch import create_cycle
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Phase
from stages.effects import ContrastKind
from stages.errors import CheckpointError, ConfigError, StoreError

TINY: dict[str, Any] = {
    "pool_size": 60,
    "validation_size": 4,
    "reported_size": 3,
    "reported_suites": ["embedded:heldout-names"],
    "rsr.*.explore.draw.n_tasks": 12,
    "rpr.*.profile.draw.n_tasks": 12,
    "rpr.*.joint_steps": 1,
    "rpr.*.keep_steps": [1],
    "rpr.*.global_batch_size": 6,
    "rpr.*.over_sampling_batch_size": 6,
}
CHILD = """
import json, sys
from pathlib import Path
from orchestrator.experiments.run import run_experiment
from orchestrator.experiments.spec import parse_spec
from orchestrator.settings import Settings
from orchestrator.store import Store
url, artifacts, home, spec = sys.argv[1:]
run_experiment(Store.open(url, artifacts), Settings(home=Path(home)), parse_spec(json.loads(spec), "test"))
"""


def two_arms(**more: Any) -> ExperimentSpec:
    """Direct PPO, so that a run takes seconds: the arms share Base and differ from RPR-1 on."""
    values = {
        "name": "two",
        "question": "Does it run?",
        "recipe": "smoke",
        "set": TINY | {"direct_ppo": True, "rounds": 1},
        "arm": [
            {"name": "tb_gae", "set": {"rpr.*.lambda_turn": 0.95}},
            {
                "name": "token_all, uncalibrated",
                "set": {"rpr.*.estimator": "token_all", "rpr.*.lambda_token_per_turn": 0.95, "rpr.*.calibrate": False},
            },
        ],
    }
    return parse_spec(values | more, "test")


def digests(store: Store, name: str) -> dict[tuple[str, int], tuple[str, str | None]]:
    row = store.experiments.named(name)
    assert row is not None
    found = {}
    for run in store.experiments.runs([row.id or 0]):
        assert run.cycle_id is not None
        last = store.stages.of_cycle(run.cycle_id)[-1]
        saved = store.checkpoints.named(run.cycle_id, last.name)
        assert saved is not None
        found[run.arm, run.seed] = (saved.actor_digest, saved.critic_digest)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_it_is_stopped_continued_and_reported(store: Store, settings: Settings) -> None:
    spec = two_arms()
    seen: list[str] = []

    def stop() -> bool:  # in the middle of the first arm
        return any("RPR-1" in text for text in seen) and seen[-1] == "asked"

    def record(branch: Any, stage: m.Stage, entry: Any) -> None:
        seen.append(f"{stage.name} {type(entry).__name__}")
        if seen[-1] == "RPR-1 StepDone":
            seen.append("asked")

    first = run_experiment(store, settings, spec, watch=Watch(record=record, stop=stop))
    assert (first.stopped, first.done, first.of, first.failures) == (True, 1, 3, {})
    row = store.experiments.named("two")
    assert row is not None
    half = report_of(store, row)
    assert half.state == "stopped"
    assert [r.state for r in half.runs] == ["paused", "waiting"]
    assert summary(half) == ["Nothing can be compared yet: no seed has all the arms of a contrast."]
    assert "2 of 2 runs are not done" in " ".join(half.doubts)

    bases = [c.id for c in store.cycles.list().items]
    second = run_experiment(store, settings, spec)
    assert (second.stopped, second.done, second.failures) == (False, 3, {})
    assert set(bases) < {c.id for c in store.cycles.list().items}  # Base was not run again, the other arm was made
    assert run_experiment(store, settings, spec).done == 3  # nothing is left to do

    check_report(store, row)
    check_records(store)
    with pytest.raises(ConfigError, match=r"begun with another specification \(question changed"):
        run_experiment(store, settings, two_arms(question="Another?"))


def check_report(store: Store, row: m.Experiment) -> None:
    report = report_of(store, row)
    assert report.state == "done"
    assert next((o.outcome, len(o.effects)) for o in report.outcomes) == ("strict success, heldout-names", 1)
    assert all(r.success["embedded:heldout-names"][1] == 3 for r in report.runs)
    assert "one seed" in report.doubts[0]
    (line, *_) = summary(report)
    assert line.startswith("Not shown: token_all, uncalibrated − tb_gae, strict success")
    assert "no interval over seeds" in line
    text = to_markdown(report)
    assert "no calibration, advantages: token_all" in text
    assert "rsi experiment run two --seeds 0" in text
    assert effect_rows(report)[0]["seed_0"] == pytest.approx(effect_rows(report)[0]["mean"])
    token = next(r for r in report.runs if r.arm.startswith("token_all"))
    assert [p.phase for p in token.ev] == [Phase.JOINT]
    assert token.spent is not None
    assert token.spent.by_phase[Phase.CALIBRATE] == (0, 0, 0)
    plain = next(r for r in report.runs if r.arm == "tb_gae")
    assert plain.spent is not None
    assert plain.spent.by_phase[Phase.CALIBRATE][2] == 4
    assert plain.spent.updates - token.spent.updates == 4
    assert plain.spent.by_phase[Phase.JOINT][2] == 2
    assert plain.spent.tokens > token.spent.tokens > 0


def check_records(store: Store) -> None:
    """A fork's parents lie in the prefix's cycle; what departs is logged; no cycle repeats a stage of its parent."""
    base, *arms = sorted(store.cycles.list().items, key=lambda c: c.id or 0)
    assert [s.name for s in store.stages.of_cycle(base.id or 0)] == ["Base"]
    parent = store.checkpoints.named(base.id, "Base")
    assert parent is not None
    for arm in arms:
        (stage,) = store.stages.of_cycle(arm.id or 0)
        assert (stage.name, stage.actor_parent_id) == ("RPR-1", parent.id)
    logged = [line.text for line in store.logs.read(arms[1].id or 0, min_level=30)]
    assert "RPR-1 departs from the specification: no calibration" in logged
    token = store.stages.of_cycle(arms[1].id or 0)[0]
    lam = store.metrics.steps(token.id or 0, Phase.JOINT)[1]["advantage/lambda_token"]
    assert lam is not None
    assert 0.95 < lam < 1.0


def test_a_fork_needs_its_checkpoint(store: Store, settings: Settings) -> None:
    cycle = create_cycle(store, load_recipe("smoke"), actor="test")
    for fork, said in (
        ({"cycle": cycle.id, "stage": "RSR-2"}, "no checkpoint 'RSR-2'"),
        ({"cycle": 77, "stage": "Base"}, "no cycle 77"),
    ):
        with pytest.raises((CheckpointError, StoreError), match=said):
            create_cycle(store, load_recipe("smoke", overrides={"fork": fork}), actor="test")


def test_a_matched_arm_waits_for_what_it_matches(store: Store) -> None:
    spec = parse_spec(
        {
            "name": "m",
            "question": "?",
            "recipe": "smoke",
            "set": TINY,
            "arm": [{"name": "loop"}, {"name": "direct", "match": "loop"}],
        },
        "test",
    )
    row = register(store, spec, actor="test")
    with pytest.raises(ConfigError, match="which is not done for seed 0"):
        match_arm(store, row.id or 0, spec, spec.arm_named("direct"), 0)


def test_two_processes_do_not_work_on_one_branch(store: Store) -> None:
    with (
        store.experiments.holding(5) as first,
        store.experiments.holding(5) as second,
        store.experiments.holding(6) as other,
    ):
        assert (first, second, other) == (True, False, True)
    with store.experiments.holding(5) as again:
        assert again


@pytest.mark.full
def test_the_factorial_is_killed_resumed_and_ends_in_the_same_result(
    store: Store, module_store: Store, database_url: str, settings: Settings, tmp_path: Path
) -> None:
    shipped = load_spec("factorial-smoke")
    spec = shipped.model_copy(update={"set": TINY})
    arguments = [database_url, store.artifacts.url, str(settings.home), json.dumps(spec.model_dump(mode="json"))]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=dict(os.environ))
    try:
        until = time.monotonic() + 900
        while time.monotonic() < until:
            assert child.poll() is None, "the child ended before it could be killed"
            row = store.experiments.named(spec.name)
            runs = store.experiments.runs([row.id or 0]) if row else []
            third = [r.cycle_id for r in runs if r.cycle_id is not None][2:]
            stages = store.stages.of_cycle(third[0]) if third else []
            if stages and store.metrics.last_step(stages[0].id or 0, Phase.CALIBRATE) >= 2:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the third arm never began")
        child.send_signal(signal.SIGKILL)
        child.wait()
    finally:
        child.kill()
        child.wait()
    assert sum(c.state is m.CycleState.DONE for c in store.cycles.list().items) == 3
    resumed = run_experiment(store, settings, spec)
    assert (resumed.done, resumed.of, resumed.failures) == (9, 9, {})
    assert run_experiment(module_store, Settings(home=tmp_path / "home-2"), spec).done == 9
    assert digests(store, spec.name) == digests(module_store, spec.name)
    row, twin = store.experiments.named(spec.name), module_store.experiments.named(spec.name)
    assert row is not None
    assert twin is not None
    report = report_of(store, row)
    same = [replace(e, over_tasks=None) for o in report.outcomes for e in o.effects]
    assert same == [replace(e, over_tasks=None) for o in report_of(module_store, twin).outcomes for e in o.effects]
    kinds = [e.contrast.kind for e in report.outcomes[0].effects]
    assert kinds == [ContrastKind.MAIN] * 3 + [ContrastKind.INTERACTION] * 4
    critics = {store.stages.of_cycle(r.cycle_id or 0)[0].critic_parent_id for r in report.runs}
    assert None in critics  # reset: no critic is inherited
    assert len(critics) == 2
    assert len({spent(store, r.cycle_id or 0).updates for r in report.runs}) == 1
