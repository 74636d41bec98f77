"""Two parents per checkpoint, and Δφ = 0 by digest (design: invariant 1)."""

from pathlib import Path

import pytest

from orchestrator import lineage
from orchestrator import models as m
from orchestrator.lineage import Proof, Side
from orchestrator.store import Store
from stages.errors import CheckpointError, StoreError
from tests import factories


@pytest.fixture
def five(store: Store) -> dict[str, m.Checkpoint]:
    """Base → RSR-1 → RPR-1 → RSR-2 → RPR-2 as a cycle makes them: RPR-1 brings the critic."""
    cycle_id = factories.cycle(store).id
    plan = [  # name, actor, critic, actor parent, critic parent
        ("Base", "a0", None, None, None),
        ("RSR-1", "a1", None, "Base", None),
        ("RPR-1", "a2", "c2", "RSR-1", None),
        ("RPR-1 step 3", "a9", "c9", "RSR-1", None),
        ("RSR-2", "a3", "c2", "RPR-1", "RPR-1"),
        ("RPR-2", "a4", "c4", "RSR-2", "RSR-2"),
    ]
    made: dict[str, m.Checkpoint] = {}
    for name, actor, critic, actor_parent, critic_parent in plan:
        made[name] = store.checkpoints.save(
            m.Checkpoint(
                cycle_id=cycle_id,
                name=name,
                step=3 if "step" in name else None,
                path=f"/weights/{name}",
                actor_digest=actor,
                critic_digest=critic,
                actor_parent_id=made[actor_parent].id if actor_parent else None,
                critic_parent_id=made[critic_parent].id if critic_parent else None,
                retained="step" not in name,
            )
        )
    return made


def test_the_graph(store: Store, five: dict[str, m.Checkpoint]) -> None:
    graph = lineage.of_cycle(store, five["Base"].cycle_id or 0)
    names = {row.id: row.name for row in graph.checkpoints}
    assert list(names.values()) == ["Base", "RSR-1", "RPR-1", "RSR-2", "RPR-2"]
    edges = {(names[e.parent_id], names[e.child_id], e.side): e.unchanged for e in graph.edges}
    assert edges == {
        ("Base", "RSR-1", Side.ACTOR): False,
        ("RSR-1", "RPR-1", Side.ACTOR): False,
        ("RPR-1", "RSR-2", Side.ACTOR): False,
        ("RPR-1", "RSR-2", Side.CRITIC): True,
        ("RSR-2", "RPR-2", Side.ACTOR): False,
        ("RSR-2", "RPR-2", Side.CRITIC): False,
    }
    above = lineage.ancestors(store, [five["RSR-2"].id or 0])
    assert [row.name for row in above.checkpoints] == ["Base", "RSR-1", "RPR-1", "RSR-2"]
    assert len(lineage.of_cycle(store, five["Base"].cycle_id or 0, candidates=True).checkpoints) == 6


def test_proofs(store: Store, five: dict[str, m.Checkpoint]) -> None:
    found = {name: lineage.prove_critic(store, row.id or 0).proof for name, row in five.items()}
    assert found == {
        "Base": Proof.NO_CRITIC,
        "RSR-1": Proof.NO_CRITIC,
        "RPR-1": Proof.NEW,
        "RPR-1 step 3": Proof.NEW,
        "RSR-2": Proof.UNCHANGED,
        "RPR-2": Proof.CHANGED,
    }


def test_a_proof_from_bytes(store: Store, five: dict[str, m.Checkpoint]) -> None:
    on_disk = {Path(row.path): (row.actor_digest, row.critic_digest) for row in five.values()}
    found = lineage.prove_critic(store, five["RSR-2"].id or 0, lambda path: on_disk[path])
    assert (found.proof, found.recomputed, found.before, found.after) == (Proof.UNCHANGED, True, "c2", "c2")
    on_disk[Path("/weights/RPR-1")] = ("a2", "tampered")
    with pytest.raises(CheckpointError, match="RPR-1: the files in /weights/RPR-1 have other digests"):
        lineage.prove_critic(store, five["RSR-2"].id or 0, lambda path: on_disk[path])


def test_saving_again_keeps_the_id(store: Store, five: dict[str, m.Checkpoint]) -> None:
    old = five["RSR-1"]
    again = m.Checkpoint(cycle_id=old.cycle_id, name="RSR-1", actor_digest="a1'", actor_parent_id=old.actor_parent_id)
    saved = store.checkpoints.save(again)
    assert (saved.id, saved.actor_digest) == (old.id, "a1'")
    assert [row.name for row in store.checkpoints.children(five["RPR-1"].id or 0)] == ["RSR-2"]


def test_imported_checkpoints_have_no_cycle(store: Store) -> None:
    first = store.checkpoints.save(m.Checkpoint(name="gpt", actor_digest="x"))
    second = store.checkpoints.save(m.Checkpoint(name="gpt", actor_digest="y"))
    assert first.id == second.id
    assert store.checkpoints.named(None, "gpt") is not None


def test_finding_by_digest(store: Store) -> None:
    kept = store.checkpoints.save(m.Checkpoint(name="x", actor_digest="ab" * 32, critic_digest="cd" * 32))
    assert [row.id for row in store.checkpoints.with_digest("cdcdcdcd")] == [kept.id]
    with pytest.raises(StoreError, match="at least 8"):
        store.checkpoints.with_digest("ab%")


def test_retaining_one_of_several(store: Store) -> None:
    cycle_id = factories.cycle(store).id or 0
    stage_id = factories.stages(store, cycle_id)[2].id
    rows = [
        store.checkpoints.save(
            m.Checkpoint(cycle_id=cycle_id, stage_id=stage_id, name=f"RPR-1 step {n}", step=n, actor_digest=f"a{n}")
        )
        for n in (1, 2, 3)
    ]
    store.checkpoints.retain(rows[0].id or 0)
    store.checkpoints.retain(rows[2].id or 0)
    assert [row.step for row in store.checkpoints.list(retained=True).items] == [3]
    store.checkpoints.add_metrics(rows[2].id or 0, {"validation": 0.5, "none": None})
    store.checkpoints.add_metrics(rows[2].id or 0, {"heldout": 0.25})
    assert store.checkpoints.named(cycle_id, "RPR-1 step 3").metrics == {  # type: ignore[union-attr]
        "validation": 0.5,
        "none": None,
        "heldout": 0.25,
    }
