"""Which worker a cycle goes to, and what a GPU worker takes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.embedded.gpu_classes import gpu_classes
from orchestrator.embedded.prefect_server import DEPLOYMENTS, POOLS
from orchestrator.embedded.services import worker_command
from orchestrator.inputs import open_backends, refuse_unsupported, shipped_model
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.workers import deployment_of, gpu_class_of
from stages.config import CycleConfig
from stages.errors import ConfigError


def stored(config: CycleConfig) -> dict:
    return config.model_dump(mode="json", by_alias=True)


def test_cycles_that_compute_on_gpus_go_to_the_gpu_pool() -> None:
    assert deployment_of(stored(load_recipe("smoke"))).pool == "cpu"
    assert deployment_of(stored(load_recipe("paper"))).pool == "gpu"
    on_cpu = load_recipe("smoke", overrides={"learner.backend": "megatron"})
    assert deployment_of(stored(on_cpu)).pool == "cpu"
    assert {d.pool for d in DEPLOYMENTS} == set(POOLS)


def test_a_gpu_worker_takes_one_cycle_at_a_time() -> None:
    assert "--limit" not in worker_command("cpu")
    command = worker_command("gpu")
    assert command[command.index("--limit") + 1] == "1"


def test_the_paper_layout_is_four_way_context_parallel_and_is_refused_where_the_gpus_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spec §2.3: 4-way context parallelism, 8,192 tokens a GPU, log-prob chunks of 1,024."""
    paper = load_recipe("paper")
    learner = paper.learner
    assert (learner.layout.context_parallel_size, learner.max_tokens_per_gpu, learner.log_probs_chunk_size) == (
        4,
        8192,
        1024,
    )
    many = load_recipe("paper", overrides={"learner.layout.data_parallel_size": 32})
    monkeypatch.setenv("RSI_SGLANG_URLS", "http://127.0.0.1:1")  # nothing is asked there: the GPUs are missed before
    with pytest.raises(ConfigError, match=r"256 GPUs and this machine shows|megatron-core, which is not installed"):
        open_backends(many, shipped_model())


def test_the_paper_recipe_samples_on_servers_and_is_refused_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RSI_SGLANG_URLS", raising=False)
    assert load_recipe("paper").sampler.backend == "sglang"
    with pytest.raises(ConfigError, match="RSI_SGLANG_URLS is ''"):
        open_backends(load_recipe("paper"), shipped_model())


def test_a_layout_that_does_not_fit_the_base_model_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    refuse_unsupported(load_recipe("paper"))
    layout = {"learner.backend": "megatron", "learner.layout.tensor_model_parallel_size": 8}
    with pytest.raises(ConfigError, match="cannot be divided by 8"):
        refuse_unsupported(load_recipe("smoke", overrides=layout))


def test_a_gpu_class_is_a_queue_of_the_gpu_pool() -> None:
    command = worker_command("gpu", gpu_class="h100")
    assert command[command.index("--work-queue") + 1] == "h100"
    assert command[command.index("--name") + 1].endswith("-gpu-h100")
    classed = load_recipe("paper", overrides={"learner.gpu_class": "h100"})
    assert (gpu_class_of(stored(classed)), gpu_class_of(stored(load_recipe("paper")))) == ("h100", "")
    for value, match in (("H 100", "gpu_class"), ("h100", "learner.device")):
        with pytest.raises(ConfigError, match=match):
            load_recipe("smoke", overrides={"learner.gpu_class": value})
    assert gpu_classes(Settings(gpu_classes=" h100=2, l40s=1 ")) == {"h100": 2, "l40s": 1}
    for wrong in ("h100", "h100=0", "h100=1,h100=2", "default=1"):
        with pytest.raises(ConfigError, match="RSI_GPU_CLASSES"):
            gpu_classes(Settings(gpu_classes=wrong))
