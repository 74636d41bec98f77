"""The smaller repositories: suites, arms, audits, reference rows, settings, rewards, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator import models as m
from orchestrator.persist import persist, persist_many
from orchestrator.store import Store
from orchestrator.store.connection import canonical, clean_json
from stages.domain import CheckRole, CheckSpec, FamilyScale, Phase, Stratum, Task, Verdict
from stages.records import AttemptFinished, EvaluationDone, StepDone
from tests import factories


def _task(name: str, suite: str = "train") -> Task:
    return Task(
        id=name,
        suite=suite,
        family="files",
        stratum=Stratum.HARD,
        instruction=f"do {name}\x00",
        root=Path("/pool") / name,
        digest=name * 2,
        checks=(CheckSpec(id="exists"), CheckSpec(id="gate", role=CheckRole.GATE)),
        categories=("files", "text"),
    )


def test_a_changed_suite_is_a_new_version(store: Store) -> None:
    first = store.suites.register("pool", "d1", m.Split.TRAIN, [_task("a"), _task("b")])
    again = store.suites.register("pool", "d1", m.Split.TRAIN, [_task("a"), _task("b")])
    second = store.suites.register("pool", "d2", m.Split.TRAIN, [_task("a"), _task("c")], version="2")
    assert first.id == again.id != second.id
    assert [s.version for s in store.suites.list()] == ["1", "2"]
    newest, old = store.suites.named("pool"), store.suites.named("pool", "d1")
    assert newest is not None
    assert old is not None
    assert (newest.digest, old.n_tasks) == ("d2", 2)
    task = store.suites.task("pool", "b")  # only the older version has it
    assert task is not None
    assert (task.suite_id, task.instruction, task.checks) == (
        first.id,
        "do b␀",
        [{"id": "exists", "role": "scenario"}, {"id": "gate", "role": "gate"}],
    )
    page = store.suites.tasks(second.id or 0, limit=1)
    assert ([t.task_id for t in page.items], page.next is not None) == (["a"], True)
    assert [t.task_id for t in store.suites.tasks(second.id or 0, after="a").items] == ["c"]


def test_attempts_find_their_suite(store: Store) -> None:
    store.suites.register("pool", "d1", m.Split.TRAIN, [_task("a")])
    store.suites.register("heldout", "d2", m.Split.HELD_OUT, [_task("b", "heldout")])
    assert store.suites.suite_of(["a", "b", "unknown"]) == {"a": "pool", "b": "heldout"}
    cycle_id = factories.cycle(store).id or 0
    stage = store.stages.start(factories.stages(store, cycle_id)[1].id or 0)
    silent = [replace(factories.trajectory(n, task=name), suite="") for n, name in enumerate(["a", "b", "x"])]
    persist_many(store, stage, [AttemptFinished(phase=Phase.EXPLORE, trajectory=t) for t in silent])
    assert [store.trajectories.get(t.id).suite for t in silent] == ["pool", "heldout", ""]


def test_rewards(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    stage = store.stages.start(factories.stages(store, cycle_id)[2].id or 0)
    attempts = [AttemptFinished(phase=Phase.JOINT, trajectory=factories.trajectory(n), step=1) for n in range(3)]
    persist_many(store, stage, attempts)
    ids = [a.trajectory.id for a in attempts]
    store.trajectories.set_trained({ids[0]: 1.25, ids[2]: 0.0})
    assert [store.trajectories.get(i).reward for i in ids] == [1.25, None, 0.0]


def test_curves_follow_the_loop(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    rows = factories.stages(store, cycle_id)
    for row in (rows[4], rows[2]):  # the later stage first
        stage = store.stages.start(row.id or 0)
        for phase in (Phase.CALIBRATE, Phase.JOINT):
            store.stages.start_phase(row.id or 0, phase, 2)
            for step in (1, 2):
                persist(store, stage, StepDone(phase=phase, step=step, metrics={"ev": float(step), "x": None}))
    curve = store.metrics.curve(["ev"], cycle_id=cycle_id)
    steps = [(Phase.CALIBRATE, 1), (Phase.CALIBRATE, 2), (Phase.JOINT, 1), (Phase.JOINT, 2)]
    assert [(p.stage, p.phase, p.step) for p in curve] == [(s, *x) for s in ("RPR-1", "RPR-2") for x in steps]
    assert store.metrics.names(rows[2].id or 0) == ["ev", "x"]
    assert [p.value for p in store.metrics.curve(["x"], stage_ids=[rows[2].id or 0])] == [None] * 4
    assert store.metrics.last_step(rows[2].id or 0, Phase.JOINT) == 2
    assert store.metrics.last_step(rows[2].id or 0, Phase.WARMUP) == 0


def test_scales_are_replaced_as_a_whole(store: Store) -> None:
    stage_id = factories.stages(store, factories.cycle(store).id or 0)[2].id or 0
    old = (FamilyScale(family="a", value=1, attempts=5), FamilyScale(family="b", value=2, attempts=5))
    new = (FamilyScale(family="a", value=3, attempts=9, floored=True),)
    assert store.profiles.load(stage_id) == ()
    first = store.profiles.save(stage_id, Phase.PROFILE, old)
    assert store.profiles.load(stage_id, Phase.PROFILE) == old
    assert store.profiles.save(stage_id, Phase.PROFILE, new) == first
    assert store.profiles.load(stage_id) == new
    assert [p.attempts for p in store.profiles.of_stage(stage_id)] == [9]


def test_arms(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    first = store.cycles.add_arm(m.Arm(cycle_id=cycle_id, name="fdr", from_stage="RPR-2", overrides={"reward": "fdr"}))
    again = store.cycles.add_arm(m.Arm(cycle_id=cycle_id, name="fdr", from_stage="RPR-2", retained=True))
    assert (first.id, [a.retained for a in store.cycles.arms(cycle_id)]) == (again.id, [True])


def test_settings_are_stored_once(store: Store) -> None:
    record = EvaluationDone(
        suite="s", suite_digest="d", checkpoint="gpt", k=1, passed=0, attempts=0, verdicts=0, tasks=(),
        settings={"temperature": 0.6, "harness": "shell"},
    )  # fmt: skip
    first = store.evaluations.save(record)
    assert store.evaluations.save(replace(record, passed=1, settings=dict(reversed(record.settings.items())))) == first
    other = store.evaluations.save(replace(record, settings={"temperature": 1.0}), resources={"memory_mb": 256})
    rows = {e.id: e for e in store.evaluations.list(suite="s").items}
    assert set(rows) == {first, other}
    assert rows[first].passed == 1
    digests = [d for e in rows.values() for d in (e.harness_digest, e.resource_digest) if d]
    found = store.evaluations.settings(digests)
    assert sorted(map(canonical, found.values())) == sorted(
        map(canonical, [record.settings, {"temperature": 1.0}, {"memory_mb": 256}])
    )


def test_evaluations_of_two_cycles_and_of_two_k_do_not_overwrite_each_other(store: Store) -> None:
    record = EvaluationDone(
        suite="s", suite_digest="d", checkpoint="RPR-1", k=1, passed=0, attempts=0, verdicts=0, tasks=()
    )  # fmt: skip
    ids = []
    for name in ("one", "two"):
        cycle_id = factories.cycle(store, name=name).id
        row = store.checkpoints.save(m.Checkpoint(cycle_id=cycle_id, name="RPR-1", actor_digest="a"))
        for k in (1, 3):
            ids.append(store.evaluations.save(replace(record, k=k), cycle_id=cycle_id, checkpoint_id=row.id))
    assert len(set(ids)) == 4
    assert store.evaluations.save(replace(record, k=3), cycle_id=cycle_id, checkpoint_id=row.id) == ids[-1]


def test_audits_and_references(store: Store) -> None:
    audit = store.audits.add(m.Audit(name="fdr against spr", formulas=[{"kind": "fdr"}], result={"share": 0.5}))
    assert store.audits.get(audit.id or 0).result == {"share": 0.5}
    assert [a.name for a in store.audits.list().items] == ["fdr against spr"]
    row = m.ReferenceRow(source="T1", label="base", suite="TB-2.1", value=43.8)
    store.references.load([row, m.ReferenceRow(source="T1", label="sft", suite="TB-2.1", value=49.4)])
    store.references.load([m.ReferenceRow(source="T1", label="base", suite="TB-2.1", value=43.9, note="corrected")])
    assert [(r.label, r.value, r.note) for r in store.references.list(suite="TB-2.1")] == [
        ("base", 43.9, "corrected"),
        ("sft", 49.4, ""),
    ]


def test_files_are_registered_once(store: Store) -> None:
    stored = store.artifacts.put(b"12345", m.ArtifactKind.FILE)
    store.files.register([stored, stored])
    store.files.register([stored])
    assert store.files.total_bytes() == 5
    row = store.files.get(stored.sha256)
    assert row is not None
    assert (row.kind, row.size) == (m.ArtifactKind.FILE, 5)


def test_what_json_columns_hold() -> None:
    value = {
        "nan": float("nan"), "inf": float("-inf"), "array": np.array([1, 2])[0], "path": Path("/x"), "word": Verdict.PASSED,
        "nul": "a\x00\ud800", 3: (1, None, True), "set": frozenset({"z"}),
    }  # fmt: skip
    assert clean_json(value) == {
        "nan": "nan", "inf": "-inf", "array": 1, "path": "/x", "word": "passed", "nul": "a␀�",
        "3": [1, None, True], "set": ["z"],
    }  # fmt: skip
    with pytest.raises(TypeError, match="no JSON value"):
        clean_json(object())
    assert canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1}) == '{"a":2,"b":1}'
