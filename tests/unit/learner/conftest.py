"""Tiny random models and batches for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import TrainSequence

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 folder with tied embeddings and a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "dense"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, initializer_range=0.2))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE folder: 4 experts, 2 per token, untied embeddings."""
    return build_moe(tmp_path_factory.mktemp("tiny") / "moe", experts=4, top_k=2)


@pytest.fixture(scope="session")
def wide_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 experts, 4 per token: their scores lie so close that rounding flips routes."""
    return build_moe(tmp_path_factory.mktemp("tiny") / "wide", experts=16, top_k=4)


def build_moe(folder: Path, *, experts: int, top_k: int) -> Path:
    config = Qwen3MoeConfig(
        **SIZES,
        tie_word_embeddings=False,
        initializer_range=0.2,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


@pytest.fixture
def make_learner() -> Callable[..., TorchLearner]:
    def build(**kwargs: object) -> TorchLearner:
        return TorchLearner(**{"max_tokens_per_gpu": 64, "num_threads": 1, **kwargs})  # type: ignore[arg-type]

    return build


@pytest.fixture
def make_batch() -> Callable[..., list[TrainSequence]]:
    return random_batch


def random_batch(n: int = 7, seed: int = 0, shortest: int = 9, longest: int = 40) -> list[TrainSequence]:
    """Sequences of several turns with everything that an update reads."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(n):
        length = int(rng.integers(shortest, longest + 1))
        mask = rng.random(length) < 0.5
        mask[0] = False
        mask[length // 2] = True
        values = rng.normal(size=length).astype(np.float32)
        batch.append(
            TrainSequence(
                tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                rollout_log_probs=(-4 + 0.3 * rng.normal(size=length)).astype(np.float32),
                advantages=rng.normal(size=length).astype(np.float32),
                value_targets=values + rng.normal(size=length).astype(np.float32),
                old_values=values,
            )
        )
    return batch


def float32_sampler(folder: Path, batch: list[TrainSequence]) -> list[TrainSequence]:
    """What a float32 sampler returns for these ids: log-probs and the experts of every layer and token."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    top_k, out = model.config.num_experts_per_tok, []
    for seq in batch:
        ids = torch.from_numpy(seq.tokens.astype(np.int64))[None]
        with torch.no_grad():
            answer = model(input_ids=ids, output_router_logits=True)
        log_probs = torch.log_softmax(answer.logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        routes = torch.stack([layer.topk(top_k, -1).indices for layer in answer.router_logits], 1)[:-1]
        out.append(
            replace(
                seq,
                rollout_log_probs=np.concatenate([[np.float32(0)], log_probs]),
                rollout_routed_experts=routes.numpy().astype(np.int32),
            )
        )
    return out


@pytest.fixture
def sampled() -> Callable[[Path, list[TrainSequence]], list[TrainSequence]]:
    return float32_sampler
