"""The parallel learner behind a socket: the torch learner's answers, refusals, and what happens to ranks that die or hang."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from stages.backends.learner.build import build_learner, check_model
from stages.backends.learner.megatron.group import PREFIX, Limits, own_folder
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.remote import RemoteLearner
from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.config import LearnerConfig
from stages.errors import BatchError, CheckpointError, ConfigError, LearnerError, ModelError

megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
Make = Callable[..., TorchLearner]
CLIP = {"eps_clip": 0.3, "eps_clip_high": 5.0}
QUICK = Limits(start=300.0, call=300.0, silence=12.0)


def remote(**more: object) -> RemoteLearner:
    options = {"max_tokens_per_gpu": 100, "offload": True}
    return RemoteLearner(
        layout=Layout(tensor=2, sequence_parallel=True),
        device="cpu",
        options=options,
        num_threads=1,
        limits=QUICK,
        **more,
    )


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where learners put their folders: short, for the path of a socket, and gone after the test."""
    with tempfile.TemporaryDirectory(prefix="rsi-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def learner(place: Path) -> Iterator[RemoteLearner]:
    one = remote()
    yield one
    one.close()


def ranks(of: int | None = None) -> list[psutil.Process]:
    """Ranks of the groups that this process, or another, has started: the children of its torchruns."""
    torchruns = [p for p in psutil.Process(of).children() if "torch.distributed.run" in p.cmdline()]
    return [rank for torchrun in torchruns for rank in torchrun.children()]


def living(processes: list[psutil.Process]) -> bool:
    return any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def wait_until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)


@megatron
def test_a_process_group_is_a_learner_like_the_torch_one_and_a_stuck_rank_ends_it(
    learner: RemoteLearner, tiny_dir: Path, tmp_path: Path, make_learner: Make, make_batch: Callable[..., list]
):
    batch = make_batch()
    found = []
    for one in (make_learner(), learner):
        one.load(tiny_dir, None)
        one.init_critic()
        one.start_phase(actor=OptimConfig(lr=1e-3), critic=OptimConfig(lr=1e-2, clip_grad=100.0))
        steps = [one.critic_step(batch, value_clip=4.0), one.actor_step(batch, **CLIP), one.distil_step(batch, lr=1e-3)]
        numbers = [v for s in steps for v in s.values() if v is not None]
        found.append(
            (numbers, np.concatenate(one.log_probs(batch, temperature=0.7)), np.concatenate(one.values(batch)))
        )
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5)

    assert learner.save(tmp_path / "c") == learner.save(tmp_path / "again")  # the same weights, the same bytes
    with pytest.raises(BatchError, match="outside the model's vocabulary"):
        learner.critic_step([replace(batch[0], tokens=batch[0].tokens + 61)], value_clip=4.0)
    with pytest.raises((CheckpointError, ModelError), match=r"lacks the tensor|another architecture"):
        learner.load(tiny_dir, tmp_path / "c/actor")
    np.testing.assert_array_equal(np.concatenate(learner.values(batch)), found[1][2])  # refused, and nothing changed
    (tmp_path / "again/actor_optimizer-00000.safetensors").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        learner.restore(tmp_path / "again")

    group = ranks()
    assert len(group) == 2
    os.kill(max(p.pid for p in group), signal.SIGSTOP)
    with pytest.raises(LearnerError, match="no sign of life for 12 s"):
        learner.values(batch)
    assert not living(group)
    assert not ranks()


@megatron
@pytest.mark.full
def test_a_rank_that_dies_is_named_and_the_learner_starts_anew_from_its_checkpoint(
    learner: RemoteLearner, tiny_dir: Path, tmp_path: Path, make_batch: Callable[..., list[TrainSequence]]
):
    learner.load(tiny_dir, None)
    learner.start_phase(actor=OptimConfig(lr=1e-3), critic=None)
    learner.actor_step(make_batch(), **CLIP)
    learner.save(tmp_path / "c")
    expected = learner.actor_step(make_batch(seed=1), **CLIP)
    os.kill(max(p.pid for p in ranks()), signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"died|exit code|went away"):
        learner.log_probs(make_batch(40))
    wait_until(lambda: not ranks())
    learner.restore(tmp_path / "c")
    assert learner.actor_step(make_batch(seed=1), **CLIP) == expected


OWNER = """
import sys
from pathlib import Path
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.remote import RemoteLearner
learner = RemoteLearner(layout=Layout(data=2), device="cpu", options={"max_tokens_per_gpu": 100}, num_threads=1)
learner.load(Path(sys.argv[1]), None)
print("loaded", flush=True)
sys.stdin.read()
"""


@megatron
@pytest.mark.full
def test_ranks_end_when_their_owner_is_killed(tiny_dir: Path, place: Path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "loaded\n"
        group = ranks(owner.pid)
        assert len(group) == 2
        owner.kill()
        owner.wait()
        wait_until(lambda: not living(group))
        left = set(place.glob(f"{PREFIX}*"))
        new, _ = own_folder()
        assert (len(left), set(place.glob(f"{PREFIX}*"))) == (1, {new})
    finally:
        owner.kill()
        owner.wait()


def test_a_start_sweeps_the_folders_of_killed_owners_only(place: Path):
    code = "from stages.backends.learner.megatron.group import *; f, _ = own_folder(); (f / SETTINGS).touch(); print(f, flush=True); time.sleep(99)"
    owners = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        killed, living_one = (Path(o.stdout.readline().strip()) for o in owners if o.stdout is not None)
        owners[0].kill()
        owners[0].wait()
        failed, old = place / f"{PREFIX}failed", place / f"{PREFIX}old"  # no settings: kept for a look, for a day
        failed.mkdir()
        old.mkdir()
        os.utime(old, (0, 0))
        (place / f"{PREFIX}link").symlink_to(place / "elsewhere")
        mine, lock = own_folder()
        assert set(place.iterdir()) == {living_one, failed, mine, place / f"{PREFIX}link"}
        assert killed.parent == place
        assert lock is not None
        os.close(lock)
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()


@megatron
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "attention heads cannot be divided by 3"),
        ({"pipeline_model_parallel_size": 4}, "layers cannot be divided by 4"),
        ({"expert_model_parallel_size": 2, "data_parallel_size": 2}, "no experts to spread"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_before_a_process_starts(
    tiny_dir: Path, layout: dict[str, int], message: str
):
    config = LearnerConfig.model_validate({"backend": "megatron", "layout": layout})
    with pytest.raises(ConfigError, match=message):
        check_model(config, tiny_dir)
    with pytest.raises(ConfigError, match=message):
        build_learner(config, seed=0).load(tiny_dir, None)
    assert not ranks()


@megatron
def test_too_few_gpus_are_refused_before_a_process_starts():
    layout = {"tensor_model_parallel_size": 8, "data_parallel_size": 8, "sequence_parallel": True}
    with pytest.raises(ConfigError, match="needs 64 GPUs and this machine shows"):
        build_learner(LearnerConfig.model_validate({"backend": "megatron", "device": "cuda", "layout": layout}), seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "torch", "layout": {"data_parallel_size": 2}}, "has one"),
        ({"backend": "megatron", "layout": {"sequence_parallel": True}}, "needs tensor_model_parallel_size > 1"),
        ({"backend": "megatron", "layout": {"expert_model_parallel_size": 4, "data_parallel_size": 2}}, "cannot hold"),
    ],
)
def test_a_layout_that_contradicts_itself_is_no_recipe(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate(values)
