"""The two models of the recordings: config files only."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.unit.sampler_sglang.client import SIZES


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    Qwen3Config(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32).save_pretrained(folder)
    return folder
