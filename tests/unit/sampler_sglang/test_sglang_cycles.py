"""Cycles on SGLang servers: where they are, which combinations are refused, and how weights get to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import Qwen3Config

from orchestrator.experiments.run import run_experiment
from orchestrator.experiments.spec import parse_spec
from orchestrator.inputs import open_sampler
from orchestrator.launch import SERVED, create_cycle, launch_config
from orchestrator.recipes import load_recipe
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.backends.sampler.embedded import EmbeddedSampler
from stages.backends.sampler.publish import KEPT, PublishedWeights
from stages.backends.sampler.sglang import SGLangSampler
from stages.errors import ConfigError, ModelError, SamplerError
from tests.unit.sampler_sglang.client import SIZES, ask, request, use
from tests.unit.sglang_replay import Replay, echo, recording, server

RECIPE = load_recipe("smoke", overrides={"sampler.backend": "sglang"})


def checkpoint(folder: Path, number: int, **sizes: Any) -> Path:
    """A folder with the architecture of the recordings and a weight of its own."""
    Qwen3Config(**(SIZES | sizes)).save_pretrained(folder)
    save_file({"w": np.full(4, number, np.float32)}, folder / "model.safetensors")
    return folder


def obeys(replay: Replay) -> Replay:
    """It takes any update and answers with the version that it was given."""

    def update(body: Any) -> Any:
        replay.answers["/model_info"][0]["body"]["weight_version"] = body["weight_version"]  # type: ignore[index]
        replay.on("/generate", echo("dense/gen_logprob", version=body["weight_version"]))
        return recording("dense2/upd_disk")

    return replay.on("/update_weights_from_disk", update).on("/generate", echo("dense/gen_logprob"))


def test_a_recipe_on_servers_needs_their_addresses(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1)
    for urls in ("", "gpu-1:30000"):
        with pytest.raises(ConfigError, match="RSI_SGLANG_URLS"):
            open_sampler(RECIPE, folder, Settings(sglang_urls=urls))
    with pytest.raises(ConfigError, match=r"sampler\.backend"):
        load_recipe("smoke", overrides={"sampler.backend": "vllm"})
    for key in ("rpr.0.top_p", "rpr.0.sampling"):  # local steps have no truncated draws: not settable, not biased
        with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
            load_recipe("smoke", overrides={key: 0.9})
    assert create_cycle(store, RECIPE, actor="test").digest_claim_void == SERVED
    assert create_cycle(store, load_recipe("smoke"), actor="test").digest_claim_void == ""


def test_nothing_is_stored_where_servers_or_the_way_of_weights_to_them_are_missing(
    store: Store, tmp_path: Path
) -> None:
    with_servers = {"home": tmp_path, "sglang_urls": "http://gpu-1:30000"}
    for given, match in (
        ({"home": tmp_path}, "where cycles are launched and where they run"),
        (with_servers | {"sglang_weights_path": "/mnt/w"}, "RSI_SGLANG_WEIGHTS_URL is empty"),
        (with_servers | {"sglang_weights_url": "memory://weights"}, "set RSI_SGLANG_WEIGHTS_PATH"),
    ):
        settings = Settings(**given)
        with pytest.raises(ConfigError, match=match):
            launch_config(store, RECIPE, actor="test", settings=settings)
        arms = [{"name": "a"}, {"name": "b", "set": {"rpr.0.actor_lr": 1e-3}}]
        values = {"name": "x", "question": "?", "recipe": "smoke", "set": {"sampler.backend": "sglang"}, "arm": arms}
        with pytest.raises(ConfigError, match=match):
            run_experiment(store, settings, parse_spec(values, "test"))
    assert store.cycles.list().items == []
    assert store.experiments.list().items == []


def test_a_cycles_sampler_publishes_versioned_weights_and_serves_them(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", 1), checkpoint(tmp_path / "b", 2)
    with server() as one, server() as two:
        obeys(one), obeys(two)
        settings = Settings(
            sglang_urls=f"{one.url}, {two.url}",
            sglang_weights_url=str(tmp_path / "shared"),
            sglang_weights_path="/mnt/weights",
        )
        sampler = open_sampler(RECIPE, first, settings)
        assert isinstance(sampler, SGLangSampler)

        async def job() -> list[str]:
            versions = []
            for folder, version in ((first, "Base"), (second, "RPR-1/main/update-1")):
                await sampler.update_weights_from_disk(folder, version)
                versions += [a.weight_version for a in await sampler.generate([request("a"), request("b")])]
            await sampler.aclose()
            return versions

        assert asyncio.run(job()) == ["Base"] * 2 + ["RPR-1/main/update-1"] * 2
        for replay in (one, two):
            sent = replay.sent("/update_weights_from_disk")
            names = [Path(body["model_path"]) for body in sent]
            assert [n.parent for n in names] == [Path("/mnt/weights")] * 2
            assert names[0] != names[1]
            for name, source in zip(names, (first, second), strict=True):
                copy = tmp_path / "shared" / name.name
                for file in ("config.json", "model.safetensors"):
                    assert (copy / file).read_bytes() == (source / file).read_bytes()
            version, owner = sent[1]["weight_version"].split("@")
            assert version == "RPR-1/main/update-1"
            assert len(owner) == 8


def test_two_clients_never_take_each_others_answers(tmp_path: Path) -> None:
    """Both cycles call their weights "Base"; the one that did not update last is told, and nothing is trained on."""
    folder = checkpoint(tmp_path / "m", 1)
    with server() as replay:
        obeys(replay)

        async def main() -> None:
            mine, other = (SGLangSampler([replay.url], model_path=folder, owner=o) for o in ("mine", "other"))
            await mine.update_weights_from_disk(folder, "Base")
            await other.update_weights_from_disk(folder, "Base")
            assert (await other.generate([request()]))[0].weight_version == "Base"
            with pytest.raises(SamplerError, match="'Base@other', expected 'Base@mine'; another process updates"):
                await mine.generate([request()])
            await mine.aclose()
            await other.aclose()

        asyncio.run(main())


def test_copies_are_whole_versioned_and_few(tmp_path: Path) -> None:
    publish = PublishedWeights(str(tmp_path / "shared"))
    folders = [checkpoint(tmp_path / str(n), n) for n in range(4)]
    first = publish(folders[0])
    assert publish(folders[0]) == first
    assert Path(first).is_relative_to(tmp_path / "shared")
    (Path(first) / "model.safetensors").unlink()
    (Path(first) / "published").unlink()  # as a copy looks that was cut short
    assert publish(folders[0]) == first
    assert (Path(first) / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    paths = [publish(f) for f in folders]
    assert [Path(p).exists() for p in paths] == [False] * (4 - KEPT) + [True] * KEPT
    memory = PublishedWeights("memory://weights", "/mnt/w")
    assert memory(folders[1]).startswith("/mnt/w/")
    with pytest.raises(ConfigError, match="RSI_SGLANG_WEIGHTS_PATH"):
        PublishedWeights("memory://weights")
    with pytest.raises(ConfigError, match="RSI_SGLANG_WEIGHTS_URL nowhere"):
        PublishedWeights("nowhere://x", "/y")


def test_a_copy_that_cannot_be_removed_costs_nothing_and_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = PublishedWeights(str(tmp_path / "shared"))
    folders = [checkpoint(tmp_path / str(n), n) for n in range(KEPT + 1)]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(type(publish._fs), "rm", refuse)
    first, *_, last = [publish(f) for f in folders]
    assert (Path(last) / "published").exists()
    assert (Path(first) / "model.safetensors").exists()
    assert not (Path(first) / "published").exists()


def test_another_architecture_is_neither_copied_nor_served(dense: Path, tmp_path: Path) -> None:
    publish = PublishedWeights(str(tmp_path / "shared"))
    wrong = checkpoint(tmp_path / "wrong", 1, num_hidden_layers=2)
    with server() as replay:
        obeys(replay)
        with pytest.raises(ModelError, match="another architecture"):
            use([replay], dense, lambda s: s.update_weights_from_disk(wrong, "1"), remote_path=publish)
        assert replay.sent("/pause_generation") == []
        assert not (tmp_path / "shared").exists()


def test_a_mixture_of_experts_without_routes_is_refused_where_they_are_replayed(moe: Path) -> None:
    with server("moe") as replay, pytest.raises(SamplerError, match="--enable-return-routed-experts"):
        ask(replay, moe, request(), need_routes=True)
    with server("moe", enable_return_routed_experts=True) as replay:
        replay.on("/generate", echo("moe/gen_routed", version="default"))
        assert use([replay], moe, lambda s: s.start(), need_routes=True) is None


def test_without_a_word_cycles_sample_in_their_own_process() -> None:
    from orchestrator.inputs import shipped_model

    sampler = open_sampler(load_recipe("smoke"), shipped_model(), Settings(sglang_urls="http://x:1"))
    assert isinstance(sampler, EmbeddedSampler)
    asyncio.run(sampler.aclose())
