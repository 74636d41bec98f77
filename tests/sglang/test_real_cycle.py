"""A cycle whose recipe says sampler.backend = "sglang", on a real server, with its weights published to a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import models as m
from orchestrator.launch import create_cycle
from orchestrator.recipes import load_recipe
from orchestrator.runner import run_cycle
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.certificate import GAP
from stages.domain import Phase

pytestmark = pytest.mark.sglang


def test_a_small_cycle(dense_url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_SGLANG_URLS", dense_url)
    monkeypatch.setenv("RSI_SGLANG_WEIGHTS_URL", str(tmp_path / "shared"))
    small = {
        "sampler.backend": "sglang",
        "direct_ppo": True,
        "rounds": 1,
        "pool_size": 40,
        "validation_size": 4,
        "reported_suites": ["embedded:heldout-names"],
        "reported_size": 4,
        "rpr.0.joint_steps": 1,
        "rpr.0.keep_steps": [1],
        "rpr.0.global_batch_size": 8,
        "rpr.0.over_sampling_batch_size": 8,
        "rpr.0.profile.draw.n_tasks": 12,
    }
    cycle = create_cycle(store, load_recipe("smoke", overrides=small), actor="test")
    assert cycle.id is not None
    assert run_cycle(store, Settings(home=tmp_path / "home"), cycle.id) is m.CycleState.DONE
    stage = store.stages.named(cycle.id, "RPR-1")
    assert stage is not None
    assert stage.id is not None
    steps = [
        *store.metrics.steps(stage.id, Phase.CALIBRATE).values(),
        *store.metrics.steps(stage.id, Phase.JOINT).values(),
    ]
    assert len(steps) == 5
    for step in steps:
        assert step["rollout/drift_tokens"] == 0
        assert step["rollout/weight_versions"] == 1
        assert (step[GAP] or 0) < 1e-4
    assert {e.checkpoint for e in store.evaluations.list(cycle_id=cycle.id).items} == {"Base", "RPR-1"}
    assert 1 <= len(list((tmp_path / "shared").iterdir())) <= 2
    print(f"cycle: gaps {[f'{s[GAP]:.2e}' for s in steps]}")
