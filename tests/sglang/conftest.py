"""Two models and their servers: the shipped one with seeds that count, and a mixture of experts with its routes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from orchestrator.inputs import shipped_model
from tests.sglang.real_server import PYTHON, RealServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("sglang") and not os.environ.get(PYTHON):
            item.add_marker(pytest.mark.skip(reason="the real SGLang server: runs with `make test-sglang`"))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random untied mixture of experts that speaks the shipped model's vocabulary."""
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=703,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=False,  # tied ones are served as noise
        eos_token_id=3,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "rsi_prompts.json"):
        shutil.copy(shipped_model() / name, folder / name)
    return folder


FLAGS = {"dense_url": "--enable-deterministic-inference", "moe_url": "--enable-return-routed-experts"}


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RealServer]]:
    """Those that a chosen test needs, starting side by side: most of a start is one process's imports."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())} & FLAGS.keys()
    with ExitStack() as running:
        found = {}
        for name in sorted(wanted):
            model = request.getfixturevalue("moe_model") if name == "moe_url" else shipped_model()
            log = tmp_path_factory.mktemp(name) / "log"
            found[name] = running.enter_context(RealServer(model, log, FLAGS[name]))
        yield found


@pytest.fixture(scope="session")
def dense_url(servers: dict[str, RealServer]) -> str:
    return servers["dense_url"].url()


@pytest.fixture(scope="session")
def moe_url(servers: dict[str, RealServer]) -> str:
    return servers["moe_url"].url()
