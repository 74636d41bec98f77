"""A small cycle whose learner is a Megatron process group of two gloo ranks; the same one killed in mid-PPO and resumed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orchestrator import models as m
from orchestrator.launch import create_cycle
from orchestrator.recipes import load_recipe
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.transitions import resume
from stages.domain import Phase

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
SMALL = {
    "rounds": 1,
    "reported_size": 2,
    "rsr.0.explore.draw.n_tasks": 16,
    "learner.backend": "megatron",
    "learner.offload": True,
    "learner.layout.tensor_model_parallel_size": 2,
    "learner.layout.sequence_parallel": True,
}
CHILD = """
import sys
from pathlib import Path
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
url, artifacts, home, cycle = sys.argv[1:]
run_cycle(Store.open(url, artifacts), Settings(home=Path(home)), int(cycle))
"""


def new_cycle(store: Store) -> int:
    cycle = create_cycle(store, load_recipe("smoke", overrides=SMALL), actor="test")
    assert cycle.id is not None
    return cycle.id


def digests(store: Store, cycle_id: int) -> dict[str, tuple[str, str | None]]:
    return {c.name: (c.actor_digest, c.critic_digest) for c in store.checkpoints.of_cycle(cycle_id) if c.retained}


def test_a_cycle_trains_on_a_megatron_group_and_resumes_in_mid_ppo_to_the_same_digests(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path / "home")
    whole = new_cycle(store)
    before = psutil.Process().children()
    assert run_cycle(store, settings, whole) is m.CycleState.DONE
    assert psutil.Process().children() == before  # the group has gone home
    stage = store.stages.named(whole, "RPR-1")
    assert stage is not None
    assert sorted(store.metrics.steps(stage.id, Phase.CALIBRATE)) == [1, 2, 3, 4]
    joint = store.metrics.steps(stage.id, Phase.JOINT)
    assert sorted(joint) == [1, 2]
    for step in joint.values():
        assert step["rollout/drift_tokens"] == 0
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-3  # embedded sampler against Megatron
    assert digests(store, whole)["RPR-1"][1] is not None

    killed = new_cycle(store)
    arguments = [database_url, store.artifacts.url, str(settings.home), str(killed)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=dict(os.environ))
    try:
        until = time.monotonic() + 600
        while not ((row := store.stages.named(killed, "RPR-1")) and store.metrics.last_step(row.id, Phase.JOINT)):
            assert child.poll() is None, "the child ended before it could be killed"
            assert time.monotonic() < until
            time.sleep(0.05)
        group = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGKILL)
        child.wait()
        _, left = psutil.wait_procs(group, timeout=30)
        assert not left  # no rank outlives its owner
    finally:
        child.kill()
        child.wait()
    store.cycles.set_state(killed, m.CycleState.FAILED, error="its process is gone")  # what the reconciler writes
    resume(store, killed, "test")
    assert run_cycle(store, settings, killed) is m.CycleState.DONE
    assert digests(store, killed) == digests(store, whole)
