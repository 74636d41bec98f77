"""TRL's side of `benchmarks/learner.py`, run by a Python that has TRL: FOLDER BATCH.npz KIND REPEAT ROWS LR -> one JSON line."""

from __future__ import annotations

import json
import sys
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.norms: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.start = time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.process_time() - self.start)

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


def padded(rows: list[np.ndarray], *, left: bool, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for i, row in enumerate(rows):
        where = slice(out.shape[1] - len(row), None) if left else slice(0, len(row))
        out[i, where] = torch.from_numpy(np.asarray(row)).to(dtype)
    return out


class Recorded(GRPOTrainer):
    """Its own training loop and loss, on trajectories that exist already."""

    recorded: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
        return dict(self.recorded)


def recorded(data: dict, old: float) -> dict[str, torch.Tensor]:
    """As TRL holds them: prompt and completion apart, padded over the whole generation batch."""
    starts = [int(np.flatnonzero(m)[0]) for m in data["loss_mask"]]
    ids = list(zip(data["tokens"], starts, strict=True))
    masks = list(zip(data["loss_mask"], starts, strict=True))
    completion = [np.ones(len(t) - s) for t, s in ids]
    return {
        "prompt_ids": padded([t[:s] for t, s in ids], left=True, dtype=torch.int64),
        "prompt_mask": padded([np.ones(s) for _, s in ids], left=True, dtype=torch.int64),
        "completion_ids": padded([t[s:] for t, s in ids], left=False, dtype=torch.int64),
        "completion_mask": padded(completion, left=False, dtype=torch.int64),
        "tool_mask": padded([m[s:] for m, s in masks], left=False, dtype=torch.int64),
        "advantages": padded(
            [a[s:] for a, (_, s) in zip(data["advantages"], ids, strict=True)], left=False, dtype=torch.float32
        ),
        "old_per_token_logps": padded([c * old for c in completion], left=False, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(int(m.sum()) for m in data["loss_mask"])),
    }


def main() -> None:
    folder, path, kind, repeat, rows, lr = sys.argv[1:]
    torch.set_num_threads(1)
    loaded = np.load(path)
    total = int(loaded["rows"])
    data = {k: [loaded[f"{i}.{k}"] for i in range(total)] for k in ("tokens", "loss_mask", "advantages")}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    clock = Clock()
    shared = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": int(rows),
        "gradient_accumulation_steps": total // int(rows),
        "max_steps": int(repeat),
        "learning_rate": float(lr),
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    trainer: GRPOTrainer | SFTTrainer
    if kind == "grpo":
        config = GRPOConfig(**shared, num_generations=2, beta=0.0, epsilon=0.3, epsilon_high=5.0, loss_type="dapo")
        prompts = Dataset.from_list([{"prompt": "w2"}] * total)
        trainer = Recorded(
            model=model,
            args=config,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.recorded = recorded(data, float(loaded["old"]))
    else:
        examples = [
            {"input_ids": t.tolist(), "completion_mask": m.astype(int).tolist()}
            for t, m in zip(data["tokens"], data["loss_mask"], strict=True)
        ]
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**shared, max_length=None, completion_only_loss=True),
            train_dataset=Dataset.from_list(examples),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    real, sys.stdout = sys.stdout, sys.stderr
    trainer.train()
    print(json.dumps({"seconds": min(clock.seconds), "grad_norm": clock.norms[0]}), file=real)


if __name__ == "__main__":
    main()
