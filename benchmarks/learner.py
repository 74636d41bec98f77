"""The torch learner against TRL's trainers: tokens per CPU second of one update, same model, same batch.

    python benchmarks/learner.py                    # tiny and about 100 M parameters; installs TRL in a venv that is deleted
    python benchmarks/learner.py --only tiny --trl-python DIR/bin/python    # a venv that has TRL already

The batch is what agents leave: several turns, sampled tokens (about a third) between observations, lengths spread as
trajectories' are (log-normal). Peers, driven by their own `train()` with one optimiser step a batch:
* GRPOTrainer's policy update with a tool mask and token-level advantages, generation alone replaced: against `actor_step`.
  As TRL does, prompts and completions are padded over the whole generation batch before it is split.
* SFTTrainer on the same sampled tokens: against `distil_step`.
Both learners get the same memory: 4 rows of the longest sequence in a micro-batch, float32, no recomputation. One thread; CPU
seconds of the best of --repeat updates, so a busy machine changes little. The first update's gradient norms must agree.
Utilisation: 6 FLOPs per parameter and token (the output layer for sampled tokens only), against a measured matmul.
Exits with 1 when ours is not at least 1.5 times as fast as each, or the gradients differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import OptimConfig, TrainSequence

NEEDED, SAME = 1.5, 1e-3
TRL = ["trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19"]
TRL += ["pandas", "pyarrow", "python-dateutil", "six", "tzdata", "xxhash"]
MODELS = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 704, "rows": 32, "mean": 220},
    "100M": {"hidden_size": 640, "num_hidden_layers": 16, "vocab_size": 32000, "rows": 8, "mean": 90},
}
ROWS = 4  # of the longest sequence: what one micro-batch may hold
LR = 1e-4


def build_model(folder: Path, *, hidden_size: int, num_hidden_layers: int, vocab_size: int) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "eos_token": "w1"}\n'
    )
    return folder


def trajectories(rows: int, mean: int, vocab: int, seed: int = 0) -> list[TrainSequence]:
    """A prompt, then turns: a command of 4-24 sampled tokens, an observation of 8-48."""
    rng = np.random.default_rng(seed)
    out = []
    for length in (mean * rng.lognormal(-0.25, 0.7, rows)).astype(int).clip(32, 2048):
        mask = np.zeros(length, bool)
        at = 16
        while at < length:
            end = min(length, at + int(rng.integers(4, 25)))
            mask[at:end] = True
            at = end + int(rng.integers(8, 49))
        out.append(
            TrainSequence(
                tokens=rng.integers(2, vocab, length).astype(np.int32),
                loss_mask=mask,
                rollout_log_probs=np.full(length, -math.log(vocab), np.float32),
                advantages=rng.normal(size=length).astype(np.float32),
            )
        )
    return out


def ours(folder: Path, batch: list[TrainSequence], kind: str, budget: int, repeat: int) -> dict:
    learner = TorchLearner(max_tokens_per_gpu=budget, num_threads=1)
    learner.load(folder, None)
    learner.start_phase(actor=OptimConfig(lr=LR, clip_grad=1.0), critic=None)
    steps: dict[str, Callable[[], dict]] = {
        "grpo": lambda: learner.actor_step(batch, eps_clip=0.3, eps_clip_high=5.0),
        # SFT's mean is over tokens, ours over trajectories: the same sum
        "sft": lambda: learner.distil_step(batch, lr=LR, trajectories=sum(int(s.loss_mask.sum()) for s in batch)),
    }
    seconds, norms = [], []
    for _ in range(repeat):
        start = time.process_time()
        norms.append(steps[kind]()["actor/grad_norm"])
        seconds.append(time.process_time() - start)
    return {"seconds": min(seconds), "grad_norm": norms[0]}


def peer(python: Path, folder: Path, batch: list[TrainSequence], kind: str, repeat: int, scratch: Path) -> dict:
    arrays = {f"{i}.{k}": getattr(s, k) for i, s in enumerate(batch) for k in ("tokens", "loss_mask", "advantages")}
    np.savez(scratch / "batch.npz", rows=len(batch), old=batch[0].rollout_log_probs[0], **arrays)
    command = [str(python), str(Path(__file__).with_name("trl_peer.py")), str(folder), str(scratch / "batch.npz"), kind]
    done = subprocess.run(
        [*command, str(repeat), str(ROWS), str(LR)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"TRL's trainer failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_venv(folder: Path) -> Path:
    """TRL beside the packages of the environment that runs this."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *TRL], check=True)
    return python


def matmul_rate() -> float:
    """float32 FLOPs per CPU second of one thread."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 4096)
    best = math.inf
    for _ in range(4):
        start = time.process_time()
        torch.mm(a, b)
        best = min(best, time.process_time() - start)
    return 2 * 1024 * 1024 * 4096 / best


def flops(folder: Path, batch: list[TrainSequence]) -> float:
    """Of one update: forward and backward of every input token, the output layer for sampled tokens."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    head = model.lm_head.weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head  # tied: the embedding is counted once and costs no product
    inputs = sum(int(np.flatnonzero(s.loss_mask)[-1]) for s in batch)
    return 6.0 * (body * inputs + head * sum(int(s.loss_mask.sum()) for s in batch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--kinds", nargs="+", choices=("grpo", "sft"), default=["grpo", "sft"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--trl-python", type=Path, help="a Python that imports trl; by default one is set up and deleted"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rate = matmul_rate()
    print(f"{platform.machine()}, torch {torch.__version__}, 1 thread; matmul {rate / 1e9:.0f} GFLOP per CPU second")
    held = True
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        python = options.trl_python or make_venv(scratch / "trl")
        for size in [options.only] if options.only else MODELS:
            settings = dict(MODELS[size])
            rows, mean = settings.pop("rows"), settings.pop("mean")
            folder = build_model(scratch / size, **settings)
            batch = trajectories(rows, mean, settings["vocab_size"])
            lengths = [len(s.tokens) for s in batch]
            work = flops(folder, batch)
            print(
                f"{size}: {rows} trajectories, {sum(lengths)} tokens (longest {max(lengths)}), "
                f"{sum(int(s.loss_mask.sum()) for s in batch)} sampled"
            )
            for kind in options.kinds:
                mine = ours(folder, batch, kind, ROWS * max(lengths), options.repeat)
                theirs = peer(python, folder, batch, kind, options.repeat, scratch)
                ratio = theirs["seconds"] / mine["seconds"]
                gap = abs(mine["grad_norm"] - theirs["grad_norm"]) / mine["grad_norm"]
                held &= ratio >= NEEDED and gap <= SAME
                print(
                    f"  {kind:5s} ours {sum(lengths) / mine['seconds']:8.0f} tokens per CPU second "
                    f"({work / mine['seconds'] / rate:4.0%} of the matmul rate), TRL {sum(lengths) / theirs['seconds']:8.0f}: "
                    f"{ratio:5.2f} x; gradient norms differ by {gap:.1e}"
                )
    if not held:
        print(f"NOT HELD: {NEEDED} x against each and gradient norms within {SAME}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
