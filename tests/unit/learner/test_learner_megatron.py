"""The Megatron learner against the torch learner, on CPU and gloo, in processes of their own (the shim is process-global).

What this does not cover: Transformer Engine kernels, NCCL, grouped GEMM, overlap of communication.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.backends.protocols import OptimConfig, TrainSequence

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
full = pytest.mark.skipif(os.environ.get("CI_FULL") != "1", reason="long; runs with CI_FULL=1")
HERE = Path(__file__).parent
MOE_LAYOUTS = {
    "EP2": {"expert": 2},
    "TP2+SP+EP2": {"tensor": 2, "sequence_parallel": True, "expert": 2},
    "TP2+SP+ETP2": {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2},
    "PP2": {"pipeline": 2},
    "CP2+EP2": {"context": 2, "expert": 2},
    "DP2+dist-opt": {"distributed_optimizer": True},
}
DENSE_LAYOUTS = {
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "DP2": {},
    "DP2+dist-opt": {"distributed_optimizer": True},
}


def run(ranks: int, cases: list[dict], folders: dict[str, Path], work: Path, timeout_s: float) -> dict[str, dict]:
    work.mkdir(parents=True, exist_ok=True)
    plan, out = work / "cases.json", work / "out.json"
    plan.write_text(json.dumps({**{k: str(v) for k, v in folders.items()}, "work": str(work), "cases": cases}))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    logs, started = [work / f"rank{r}.log" for r in range(ranks)], []
    try:
        for r in range(ranks):
            env = {**os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(HERE.parents[2])}
            command = [sys.executable, str(HERE / "megatron_case.py"), str(plan), str(out)]
            with logs[r].open("w") as log:
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [p.wait(timeout=timeout_s) for p in started]
    finally:
        for p in started:
            if p.poll() is None:
                p.kill()
                p.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads(out.read_text())


def assert_same_step(found: dict[str, float]) -> None:
    """One RPR step: log-probs 1e-5, losses and other metrics 2e-5, the updates of both models 1e-3 relative."""
    assert found["log_probs"] <= 1e-5
    assert found["metrics"] <= 2e-5
    assert found["grad_norm"] <= 1e-4
    assert found["values"] <= 1e-4
    assert found["warm"] <= 1e-4
    assert found["actor_update"] <= 1e-3
    assert found["critic_update"] <= 1e-3


def assert_same_replay(found: dict[str, float]) -> None:
    assert found["replay_log_probs"] <= 1e-5
    assert found["replay_effect"] > 0.05  # forced routes change what the model says
    assert found["replay_loss_effect"] > 1e-3  # ... and the loss
    assert found["flips"] > 0.3
    assert found["replay train/pg_loss"] <= 2e-5
    assert found["replay actor/grad_norm"] <= 1e-4
    assert found["replay train/replayed_token_share"] == 0
    assert found["replay train/route_flip_share"] == 0


def test_one_process_makes_the_torch_learners_step(tiny_dir: Path, moe_dir: Path, tmp_path: Path):
    cases = [
        {"name": "dense", "model": "dense", "layout": {}, "parts": ["step"]},
        {"name": "moe", "model": "moe", "layout": {}, "parts": ["replay"]},
        {"name": "too few", "model": "dense", "layout": {"tensor": 4}, "parts": ["step"]},
        {"name": "no experts", "model": "dense", "layout": {"sequence_parallel": True}, "parts": ["step"]},
        {
            "name": "torn",
            "model": "dense",
            "layout": {"distributed_optimizer": True},
            "options": {"offload": True},
            "parts": ["step"],
        },
    ]
    found = run(1, cases, {"dense": tiny_dir, "moe": moe_dir}, tmp_path, 400)
    assert_same_step(found["dense"])
    assert_same_replay(found["moe"])
    assert "multiple of 4 processes (GPUs), but there are 1" in found["too few"]["refused"]
    assert "needs tensor parallelism" in found["no experts"]["refused"]
    assert "needs dtype bfloat16" in found["torn"]["refused"]


def test_two_processes_make_the_torch_learners_step_and_take_over_its_checkpoints(
    tiny_dir: Path, moe_dir: Path, tmp_path: Path
):
    parts = ["step", "next", "to-torch", "from-torch"]
    tensor = {"tensor": 2, "sequence_parallel": True}
    expert = {"expert": 2, "distributed_optimizer": True}
    cases = [
        {"name": "dense", "model": "dense", "layout": tensor, "parts": [*parts, "gradients"]},
        {"name": "moe", "model": "moe", "layout": expert, "parts": [*parts, "replay"]},
    ]
    found = run(2, cases, {"dense": tiny_dir, "moe": moe_dir}, tmp_path, 400)
    for name in ("dense", "moe"):
        assert_same_step(found[name])
        assert found[name]["to_torch"] <= 1e-4
        assert found[name]["from_torch"] <= 1e-4
    assert found["dense"]["gradients"] <= 1e-4
    assert found["dense"]["tensors"] >= 50
    assert_same_replay(found["moe"])


@pytest.mark.full
@full
def test_every_layout_makes_the_torch_learners_step(tiny_dir: Path, moe_dir: Path, wide_moe_dir: Path, tmp_path: Path):
    """Two gloo processes; dense and MoE; replay with and without recomputation; checkpoints across layouts; bf16."""
    dense = [{"name": k, "model": "dense", "layout": v, "parts": ["step"]} for k, v in DENSE_LAYOUTS.items()]
    moe = [
        {
            "name": f"moe {k}",
            "model": "moe",
            "layout": v,
            "options": {"gradient_checkpointing": i % 2 == 1},
            "parts": ["step", "replay"],
        }
        for i, (k, v) in enumerate(MOE_LAYOUTS.items())
    ]
    gradients = [
        {"name": f"gradients {k}", "model": m, "layout": v, "parts": ["gradients"]}
        for m, k, v in (
            ("dense", "TP2", {"tensor": 2}),
            ("dense", "PP2", {"pipeline": 2}),
            ("dense", "CP2", {"context": 2}),
            ("moe", "EP2", {"expert": 2}),
        )
    ]
    sharded = {"distributed_optimizer": True}
    saved = [
        {
            "name": "save PP2",
            "model": "dense",
            "layout": {"pipeline": 2, **sharded},
            "parts": ["step", "next", "frozen"],
        },
        {"name": "load DP2", "model": "dense", "layout": sharded, "parts": ["resume:save PP2", "unsaved"]},
        {
            "name": "load TP2",
            "model": "dense",
            "layout": {"tensor": 2, "sequence_parallel": True, **sharded},
            "parts": ["resume:save PP2"],
        },
        {"name": "save EP2", "model": "moe", "layout": {"expert": 2}, "parts": ["step", "next"]},
        {"name": "load EP2+TP2", "model": "moe", "layout": MOE_LAYOUTS["TP2+SP+EP2"], "parts": ["resume:save EP2"]},
        {"name": "load EP1", "model": "moe", "layout": {"pipeline": 2, **sharded}, "parts": ["resume:save EP2"]},
    ]
    bf16 = [
        {
            "name": f"{dtype} {replay}",
            "model": "wide",
            "layout": {"expert": 2},
            "options": {"dtype": dtype, "use_rollout_routing_replay": replay, "max_tokens_per_gpu": 4096},
            "parts": ["gap"],
        }
        for dtype, replay in (("bfloat16", False), ("bfloat16", True), ("float32", True))
    ]
    bf16 += [  # float32 masters travel from a whole optimiser to a sharded one
        {
            "name": "bf16 save",
            "model": "dense",
            "layout": {"tensor": 2},
            "options": {"dtype": "bfloat16"},
            "parts": ["save", "next"],
        },
        {
            "name": "bf16 load",
            "model": "dense",
            "layout": {"tensor": 2, **sharded},
            "options": {"dtype": "bfloat16", "offload": True},
            "parts": ["resume:bf16 save"],
        },
    ]
    refused = [
        {"name": "dense EP2", "model": "dense", "layout": {"expert": 2}, "parts": ["step"]},
        {"name": "moe TP2 without SP", "model": "moe", "layout": {"tensor": 2}, "parts": ["step"]},
        {"name": "moe ETP1", "model": "moe", "layout": {"tensor": 2, "sequence_parallel": True}, "parts": ["step"]},
    ]
    folders = {"dense": tiny_dir, "moe": moe_dir, "wide": wide_moe_dir}
    found = run(2, dense + moe + gradients + saved + bf16 + refused, folders, tmp_path, 900)
    for name in [c["name"] for c in dense + moe] + ["save PP2", "save EP2"]:
        assert_same_step(found[name])
    for case in moe:
        assert_same_replay(found[case["name"]])
    for case in gradients:
        assert found[case["name"]]["gradients"] <= 1e-4
        assert found[case["name"]]["tensors"] >= 50
    assert found["save PP2"]["carried"] == 1.0
    resumed = {
        "save PP2": ("load DP2", "load TP2"),
        "save EP2": ("load EP2+TP2", "load EP1"),
        "bf16 save": ("bf16 load",),
    }
    for source, others in resumed.items():
        for other in others:
            for which in ("next", "next_actor", "next_loss"):
                assert found[other][which] == pytest.approx(found[source][which], rel=1e-4)
    assert "was not written" in found["load DP2"]["unsaved"]
    assert found["load DP2"]["after"] > 0
    without, replayed = (np.array(found[f"bfloat16 {r}"]["gap"]) for r in (False, True))
    assert len(without) >= 5000
    assert found["bfloat16 True"]["flips"] >= 0.01
    assert max(found["float32 True"]["gap"]) <= 1e-5
    paired = without - replayed
    assert paired.mean() > 3 * paired.std() / np.sqrt(len(paired))
    assert "no experts to spread" in found["dense EP2"]["refused"]
    assert "needs sequence_parallel" in found["moe TP2 without SP"]["refused"]
    assert "expert_tensor must equal tensor" in found["moe ETP1"]["refused"]  # else wrong gradients, silently


def test_a_command_survives_the_wire():
    from stages.backends.learner.megatron.wire import decode, encode

    one = TrainSequence(
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 1, 0, 1, 1], bool),
        rollout_log_probs=np.linspace(-2, 0, 5, dtype=np.float32),
        rollout_routed_experts=np.zeros((4, 2, 2), np.int32),
    )
    name, kwargs = decode(
        encode("actor_step", {"batch": [one, one], "eps_clip": 0.3, "path": Path("/x/y"), "optim": OptimConfig(lr=1.0)})
    )
    assert (name, kwargs["eps_clip"], kwargs["path"], kwargs["optim"]) == (
        "actor_step",
        0.3,
        Path("/x/y"),
        OptimConfig(lr=1.0),
    )
    for back in kwargs["batch"]:
        for field in ("tokens", "loss_mask", "rollout_log_probs", "rollout_routed_experts"):
            np.testing.assert_array_equal(getattr(back, field), getattr(one, field))
            assert getattr(back, field).dtype == getattr(one, field).dtype
        assert back.advantages is None
    assert decode(encode("close", {})) == ("close", {})
