"""The experiments' pages against a real store: numbers, honesty about what is missing, files, empty state."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from orchestrator import models as m
from orchestrator.experiments.run import register
from orchestrator.experiments.spec import ExperimentSpec, parse_spec
from orchestrator.launch import create_cycle
from orchestrator.store import Store
from stages.domain import Phase
from tests.console_cycle import evaluation
from tests.console_people import client_as

SUITE = "embedded:heldout-names"
HOSTILE = '<img src=x onerror="alert(1)">'
ARMS = ("inherited", "cold", "uncalibrated")
RATES = {"inherited": 0.8, "cold": 0.3, "uncalibrated": 0.75}


def spec(**more: Any) -> ExperimentSpec:
    sets = ({}, {"rpr.1.critic_reset": "cold"}, {"rpr.1.calibrate": False})
    arms = [{"name": name, "title": HOSTILE, "set": changes} for name, changes in zip(ARMS, sets, strict=True)]
    values = {"name": "seeded", "question": f"Is {HOSTILE} shown as text?", "recipe": "smoke", "seeds": [0, 1, 2]}
    return parse_spec(values | {"arm": arms, "notes": [f"A note {HOSTILE}"]} | more, "test")


def done(store: Store, spec: ExperimentSpec, experiment_id: int, arm: str, seed: int, *, missing: bool = False) -> None:
    """One finished run: a cycle with its last stage alone, an evaluation and an EV curve."""
    config = spec.config(spec.arm_named(arm), seed).model_copy(update={"last_stage": "Base"})
    cycle = create_cycle(store, config, actor="test")
    (stage,) = store.stages.of_cycle(cycle.id or 0)
    saved = store.checkpoints.save(
        m.Checkpoint(cycle_id=cycle.id, stage_id=stage.id, name=stage.name, actor_digest="a" * 64, retained=True)
    )
    found = evaluation(stage.name, SUITE, RATES[arm] + 0.01 * seed, seed=seed)
    store.evaluations.save(found, cycle_id=cycle.id, stage_id=stage.id, checkpoint_id=saved.id)
    steps = [] if arm == "uncalibrated" else [(Phase.CALIBRATE, s) for s in (1, 2, 3, 4)]
    for phase, step in [*steps, (Phase.JOINT, 1), (Phase.JOINT, 2)]:
        store.stages.start_phase(stage.id or 0, phase, 4)
        value = None if missing and step == 2 else 0.1 * step + 0.01 * seed - (0.3 if arm == "cold" else 0.0)
        store.metrics.add(stage.id or 0, phase, step, {"critic/vf_explained_var": value})
    store.cycles.set_state(cycle.id or 0, m.CycleState.DONE)
    store.experiments.set_run(experiment_id, arm, seed, cycle_id=cycle.id)


@pytest.fixture(scope="module")
def store(module_store: Store) -> Store:
    """Experiment 1: all arms of seeds 0 to 2, but one. Experiment 2: nothing has run."""
    store = module_store
    row = register(store, spec(), actor="test")
    for seed in (0, 1, 2):
        for arm in ARMS:
            if (arm, seed) != ("uncalibrated", 2):
                done(store, spec(), row.id or 0, arm, seed, missing=seed == 1)
    register(store, spec(name="planned", seeds=[0]), actor="test")
    return store


@pytest.fixture(scope="module")
def client(store: Store) -> Iterator[TestClient]:
    with client_as(store) as opened:
        yield opened


def test_the_list_says_how_far_each_is(client: TestClient) -> None:
    text = client.get("/experiments").text
    assert "8 of 9" in text
    assert "0 of 3" in text
    assert "planned" in text
    assert HOSTILE not in text
    assert "critic-inheritance" in text  # what is shipped


def test_a_page_shows_effects_and_says_what_is_missing(client: TestClient) -> None:
    text = client.get("/experiments/1").text
    assert HOSTILE not in text
    assert "1 of 9 runs are not done: uncalibrated, seed 2 (waiting)" in text
    assert "3 seeds: the t interval has 2 degrees of freedom" in text
    assert "no calibration</span>" in text  # labelled as non-standard
    assert "critic reset: cold</span>" in text
    assert text.count("<svg") >= 3 + 3 + 3  # a plot per outcome, a panel per arm, the key of the seeds
    assert "rsi experiment run seeded --seeds 0,1,2" in text
    assert "style=" not in text
    assert "<script>" not in text


def test_files_agree_with_the_page(client: TestClient) -> None:
    effects = list(csv.DictReader(io.StringIO(client.get("/experiments/1/report.csv").text)))
    cold = next(e for e in effects if e["contrast"] == "cold − inherited" and e["outcome"].startswith("strict"))
    assert cold["seeds"] == "3"
    mean = float(cold["mean"])
    assert -0.65 < mean < -0.35
    assert float(cold["low_over_seeds"]) < mean < float(cold["high_over_seeds"])
    assert mean == pytest.approx(sum(float(cold[f"seed_{s}"]) for s in (0, 1, 2)) / 3)
    plain = next(
        e for e in effects if e["contrast"] == "uncalibrated − inherited" and e["outcome"].startswith("strict")
    )
    assert (plain["seeds"], plain["seed_2"]) == ("2", "")
    runs = list(csv.DictReader(io.StringIO(client.get("/experiments/1/report.runs.csv").text)))
    assert len(runs) == 9
    page = client.get("/experiments/1").text
    assert f"{100 * mean:+.1f}".replace("-", "−") in page
    document = json.loads(client.get("/experiments/1/report.json").text)
    assert document["state"] == "stopped"
    assert len(document["runs"]) == 9
    assert "| cold − inherited |" in client.get("/experiments/1/report.md").text
    first = next(e for e in effects if e["outcome"] == "EV, first joint batch" and e["contrast"] == "cold − inherited")
    assert float(first["mean"]) == pytest.approx(-0.3)
    assert first["low_over_seeds"] == ""  # every seed agrees exactly: no variance, so no interval


def test_what_is_not_there_is_404_and_what_has_not_begun_says_so(client: TestClient) -> None:
    assert client.get("/experiments/99").status_code == 404
    assert client.get("/experiments/1/report.exe").status_code == 404
    text = client.get("/experiments/2").text
    assert "No arm is done yet" in text
    assert "Nothing can be compared yet" in text


def test_an_empty_store_teaches(database_url: str, tmp_path: Path) -> None:
    empty = Store.open(database_url, tmp_path / "artifacts")
    with client_as(empty) as client:
        text = client.get("/experiments").text
        assert "No experiment yet" in text
        assert "rsi experiment plan" in text
    empty.close()
