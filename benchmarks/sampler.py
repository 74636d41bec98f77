"""The embedded sampler against `transformers`' generate and its continuous batching, multi-turn, on a CPU.

    python benchmarks/sampler.py                 # the shipped Base (0.9 M parameters), 32 conversations of 4 turns
    python benchmarks/sampler.py --random 512    # a random Qwen3 of that hidden size instead (about 30 M parameters)
    python benchmarks/sampler.py --rows 240 --turns 4

Everyone gets the same conversations: fixed prompts, a fixed number of new tokens for every row and turn (mean 12, at most
34, as shell commands have), then an observation of fixed length. Sampling at temperature 1 from the full vocabulary.
* ours: one wave a turn; the cache survives turns.
* generate: one left-padded batch a turn with sdpa; every turn encodes its whole prompt, and the batch runs until its longest
  row is done (its extra tokens are not counted). It has no cache across turns for batches of rows of different length.
* continuous batching: its own manager over all turns, paged sdpa, block sharing (its prefix cache) on, log-probs on.
Counted are the asked-for tokens per CPU second (prompts included in the time), one thread, best of --repeat; so a busy
machine changes little. Exits with 1 when ours is not at least twice as fast as both.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import logging

from stages.backends.protocols import GenerateRequest, SamplingParams
from stages.backends.sampler.embedded import EmbeddedSampler

BASE = Path(__file__).resolve().parents[1] / "stages" / "assets" / "base"
NEEDED = 2.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Conversations: `prompts[row]`, then for every turn `new[turn][row]` tokens and `observations[turn][row]`."""

    prompts: list[list[int]]
    new: list[list[int]]
    observations: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.new))


def conversations(rows: int, turns: int, vocab: int, seed: int = 0) -> Work:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(8, vocab) for _ in range(rng.randint(low, high))]

    return Work(
        prompts=[ids(30, 80) for _ in range(rows)],
        new=[[min(34, 1 + int(rng.expovariate(1 / 12))) for _ in range(rows)] for _ in range(turns)],
        observations=[[ids(1, 30) for _ in range(rows)] for _ in range(turns)],
    )


def converse(work: Work, turn_of: Callable[[list[list[int]], list[int]], list[list[int]]]) -> float:
    """CPU seconds of all turns; `turn_of(prompts, new)` samples one turn of every row."""
    sequences = [list(p) for p in work.prompts]
    start = time.process_time()
    for new, observations in zip(work.new, work.observations, strict=True):
        replies = turn_of(sequences, new)
        for row, (count, reply) in enumerate(zip(new, replies, strict=True)):
            if len(reply) < count:
                raise AssertionError(f"row {row}: {len(reply)} tokens, {count} were asked for")
            sequences[row] = sequences[row] + reply[:count] + observations[row]
    return time.process_time() - start


# --------------------------------------------------------------------------- the three


def ours(folder: Path, work: Work) -> float:
    sampler = EmbeddedSampler(folder, num_threads=1)
    loop = asyncio.new_event_loop()
    calls = 0

    def turn(sequences: list[list[int]], new: list[int]) -> list[list[int]]:
        nonlocal calls
        calls += 1
        requests = [
            GenerateRequest(
                rid=str(row),
                input_ids=ids,
                sampling_params=SamplingParams(max_new_tokens=count, sampling_seed=1000 * calls + row),
            )
            for row, (ids, count) in enumerate(zip(sequences, new, strict=True))
        ]
        return [list(a.output_ids) for a in loop.run_until_complete(sampler.generate(requests))]

    try:
        return converse(work, turn)
    finally:
        loop.run_until_complete(sampler.aclose())
        loop.close()


def batched_generate(model: Any, work: Work) -> float:
    def turn(sequences: list[list[int]], new: list[int]) -> list[list[int]]:
        width = max(map(len, sequences))
        ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
        seen = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
        config = GenerationConfig(
            max_new_tokens=max(new), do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=seen, generation_config=config)
        return out[:, width:].tolist()

    return converse(work, turn)


def continuous_batching(model: Any, work: Work) -> float:
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    longest = max(map(len, work.prompts)) + len(work.new) * (34 + 30)
    blocks = len(work.prompts) * (longest // 32 + 2)
    settings = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=2048, return_logprobs=True)
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings
        ) as manager,
    ):
        calls = 0

        def turn(sequences: list[list[int]], new: list[int]) -> list[list[int]]:
            nonlocal calls
            calls += 1
            rows: dict[str, int] = {}
            for row, (ids, count) in enumerate(zip(sequences, new, strict=True)):
                rows[manager.add_request(ids, request_id=f"{calls}-{row}", max_new_tokens=count)] = row
            replies: list[list[int]] = [[] for _ in sequences]
            while rows:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise AssertionError("continuous batching gave no result for a minute")
                if result.is_finished():
                    replies[rows.pop(result.request_id)] = list(result.generated_tokens)
            return replies

        return converse(work, turn)


# --------------------------------------------------------------------------- run


def same_model(folder: Path, model: Any, work: Work) -> float:
    """Largest difference between our log-probs of a greedy turn and a full forward pass of the rival's model."""
    sampler = EmbeddedSampler(folder, num_threads=1)
    requests = [
        GenerateRequest(rid=str(i), input_ids=p, sampling_params=SamplingParams(max_new_tokens=8, temperature=0.0))
        for i, p in enumerate(work.prompts[:4])
    ]
    answers = asyncio.run(sampler.generate(requests))
    asyncio.run(sampler.aclose())
    worst = 0.0
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([[*request.input_ids, *answer.output_ids]])
        with torch.inference_mode():
            logp = torch.log_softmax(model(ids).logits[0, len(request.input_ids) - 1 : -1].float(), -1)
        expected = logp.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(answer.output_token_logprobs)).abs().max()))
    return worst


def random_model(folder: Path, hidden: int) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # the benchmark works on ids
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BASE, help="a Hugging Face folder")
    parser.add_argument("--random", type=int, metavar="HIDDEN", help="a random Qwen3 with this hidden size instead")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch), options.random) if options.random else options.model
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None  # a row runs until its number of tokens, for everyone
        work = conversations(options.rows, options.turns, model.config.vocab_size)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{platform.machine()}, torch {torch.__version__}, 1 thread; {model.config.model_type}, {size:.1f} M parameters"
        )
        print(
            f"{options.rows} conversations x {options.turns} turns, {work.tokens} sampled tokens; best of {options.repeat}"
        )
        gap = same_model(folder, model, work)
        print(f"same model: log-probs differ by at most {gap:.1e}")
        runs: dict[str, Callable[[], float]] = {
            "ours": lambda: ours(folder, work),
            "generate": lambda: batched_generate(model, work),
            "continuous batching": lambda: continuous_batching(model, work),
        }
        rates = {name: work.tokens / min(run() for _ in range(options.repeat)) for name, run in runs.items()}
    for name, rate in rates.items():
        print(f"{name:22s}{rate:9.0f} tokens per CPU second{rates['ours'] / rate:8.2f} x")
    slow = [name for name, rate in rates.items() if name != "ours" and rates["ours"] < NEEDED * rate]
    if slow or gap > 1e-4:
        print(f"NOT HELD: {NEEDED} x against {', '.join(slow)}" if slow else f"NOT HELD: gap {gap:.1e} > 1e-4")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
