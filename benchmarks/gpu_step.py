"""One RPR step of a 0.6B-sized model (random weights) in bfloat16 on a GPU: the log-prob gap and the rate.

    python benchmarks/gpu_step.py                                  # torch learner, cuda, the size of Qwen3-0.6B
    python benchmarks/gpu_step.py --backend megatron --tensor 2    # Megatron under torchrun on two GPUs
    python benchmarks/gpu_step.py --size tiny --device cpu         # the same code where there is no GPU

Behaviour log-probs come from a float32 forward of the same weights, as a float32 sampler would return them. Then four
calibration updates of the critic and one joint update. Printed as one JSON object: mean and largest gap before the update,
seconds and tokens per second of each update, peak memory, and the share of this device's measured matmul rate.
Exits with 1 when an update is not finite, changes no weight, or the mean gap is over --gap.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from stages.backends.learner.build import build_learner
from stages.backends.learner.checkpoint import digest_weights
from stages.backends.protocols import Learner, OptimConfig, TrainSequence
from stages.config import LearnerConfig

SIZES: dict[str, dict[str, int]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
}


def build_model(folder: Path, size: str, device: str) -> Path:
    config = Qwen3Config(**SIZES[size], max_position_embeddings=32768, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def trajectories(rows: int, mean: int, vocab: int) -> list[TrainSequence]:
    """A third of the tokens is sampled, in runs of 4-200; lengths are log-normal."""
    rng = np.random.default_rng(0)
    batch = []
    for length in (mean * rng.lognormal(-0.125, 0.5, rows)).astype(int).clip(64, 16384):
        mask = np.zeros(length, bool)
        at = 32
        while at < length:
            run = int(rng.integers(4, 201))
            mask[at : at + run] = True
            at += 3 * run
        values = rng.normal(size=length).astype(np.float32)
        batch.append(
            TrainSequence(
                tokens=rng.integers(0, vocab, length).astype(np.int32),
                loss_mask=mask,
                rollout_log_probs=np.zeros(length, np.float32),
                advantages=values,
                value_targets=values,
                old_values=np.zeros(length, np.float32),
            )
        )
    return batch


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    n = 8192 if device == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        torch.mm(a, a)
        wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def one_step(learner: Learner, folder: Path, batch: list[TrainSequence], device: str) -> dict[str, Any]:
    learner.load(folder, None)
    learner.init_critic()
    learner.start_phase(actor=OptimConfig(lr=5e-7), critic=OptimConfig(lr=1.5e-5, clip_grad=100.0))
    found = learner.log_probs(batch)
    gaps = np.concatenate([np.abs(f - s.rollout_log_probs)[s.loss_mask] for f, s in zip(found, batch, strict=True)])
    seconds, metrics = [], {}
    updates = [lambda: learner.critic_step(batch, value_clip=4.0)] * 5
    for update in [*updates, lambda: learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0)]:
        wait(device)
        start = time.perf_counter()
        metrics |= update()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return {
        "gap_mean": float(gaps.mean()),
        "gap_max": float(gaps.max()),
        "critic_s": min(seconds[1:5]),  # the first one warms up
        "actor_s": seconds[5],
        "metrics": metrics,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel processes (megatron)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mean", type=int, default=2000, help="mean tokens of a trajectory")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=8192)
    parser.add_argument("--gap", type=float, default=0.05, help="largest mean gap that passes, nats")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; --size tiny --device cpu runs the same code", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    layout = {"tensor_model_parallel_size": options.tensor, "sequence_parallel": options.tensor > 1}
    shared = {
        "device": options.device,
        "max_tokens_per_gpu": options.max_tokens_per_gpu,
        "gradient_checkpointing": True,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = build_model(Path(name) / "model", options.size, options.device)
        batch = trajectories(options.rows, options.mean, SIZES[options.size]["vocab_size"])
        exact = build_learner(LearnerConfig.model_validate(shared), seed=0)
        exact.load(folder, None)
        scores = exact.log_probs(batch)
        batch = [replace(s, rollout_log_probs=p) for s, p in zip(batch, scores, strict=True)]
        del exact
        if options.device == "cuda":
            torch.cuda.empty_cache()  # for the ranks of a parallel learner
        config = {**shared, "backend": options.backend, "layout": layout, "dtype": "bfloat16", "offload": True}
        learner = build_learner(LearnerConfig.model_validate(config), seed=0)
        try:
            found = one_step(learner, folder, batch, options.device)
            digest, _ = learner.save(Path(name) / "after")
        finally:
            learner.close()
        changed = digest != digest_weights(folder)
    with torch.device("meta"):
        meta = Qwen3ForCausalLM(Qwen3Config(**SIZES[options.size], tie_word_embeddings=True))
    parameters, head = sum(p.numel() for p in meta.parameters()), meta.lm_head.weight.numel()
    tokens, sampled = sum(len(s.tokens) for s in batch), sum(int(s.loss_mask.sum()) for s in batch)
    work = 6.0 * ((parameters - head) * tokens + head * sampled)  # tied: the embedding itself is no product
    rate = matmul_rate(options.device, torch.bfloat16) * max(1, options.tensor)
    own = options.device == "cuda" and options.backend == "torch"
    finite = all(math.isfinite(v) for v in found["metrics"].values() if v is not None)
    report = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "backend": options.backend,
        "size": options.size,
        "parameters_M": round(parameters / 1e6, 1),
        "tokens": tokens,
        "sampled_tokens": sampled,
        **{k: v for k, v in found.items() if k != "metrics"},
        "actor_tokens_per_s": tokens / found["actor_s"],
        "critic_tokens_per_s": tokens / found["critic_s"],
        "matmul_tflops": rate / 1e12,
        "actor_share_of_matmul": work / found["actor_s"] / rate,
        "peak_memory_GiB": torch.cuda.max_memory_allocated() / 2**30 if own else None,  # a rank's is not seen from here
        "updated": changed,
        "finite": finite,
    }
    print(json.dumps(report, indent=1))
    return 0 if finite and changed and found["gap_mean"] <= options.gap else 1


if __name__ == "__main__":
    sys.exit(main())
