"""The embedded sampler's answers have the names, shapes and nulls of recorded SGLang answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler.embedded import EmbeddedSampler
from stages.backends.sampler.wire import ModelShape, parse_answer, to_sglang
from tests.unit.sampler_models import VOCAB, save_model
from tests.unit.sglang_replay import recording


def shape(value: Any) -> Any:
    """Keys and types; of a list the set of its items' shapes."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items()}
    if isinstance(value, list):
        shapes = [shape(v) for v in value]
        return [s for i, s in enumerate(shapes) if s not in shapes[:i]]
    return type(value).__name__


def answers(folder: Path, *waves: list[GenerateRequest]) -> list[GenerateAnswer]:
    async def main() -> list[GenerateAnswer]:
        sampler = EmbeddedSampler(folder, weight_version="default")
        last: list[GenerateAnswer] = []
        for wave in waves:
            last = await sampler.generate(wave)
        await sampler.aclose()
        return last

    return asyncio.run(main())


def request(new: int = 6, routed: bool = False, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        rid="req-1",
        input_ids=[61, 106, 100, 102],
        sampling_params=SamplingParams(max_new_tokens=new, **params),
        return_routed_experts=routed,
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"), "dense")


def test_length_and_cache(dense: Path) -> None:
    (cold,) = answers(dense, [request()])
    (warm,) = answers(dense, [request()], [request()])
    assert shape(EmbeddedSampler.to_sglang(cold)) == shape(recording("notok/gen")["body"])  # nothing cached, no text
    real = recording("dense/gen_logprob")["body"]
    ours = to_sglang(warm, text="x")
    assert shape(ours) == shape(real)
    assert list(ours["meta_info"]) == list(real["meta_info"])
    assert (
        ours["meta_info"]["cached_tokens_details"]
        == real["meta_info"]["cached_tokens_details"]
        == {"device": 3, "host": 0}
    )


def test_stop_without_log_probs(dense: Path) -> None:
    (answer,) = answers(dense, [request(new=300, stop_token_ids=tuple(range(VOCAB)))])
    ours, real = to_sglang(answer, return_logprob=False), recording("notok/gen_stop_tok")["body"]
    real["meta_info"]["cached_tokens_details"] = None  # that server had the prompt cached
    assert shape(ours) == shape(real)
    assert ours["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer.output_ids[-1]}


def test_routed_experts(tmp_path: Path) -> None:
    (answer,) = answers(save_model(tmp_path, "moe"), [request(new=3, routed=True)])
    ours, real = to_sglang(answer, text=""), recording("moe/gen_routed")["body"]
    assert shape(ours) == shape(real)
    assert len(ours["meta_info"]["routed_experts"]) == len(
        real["meta_info"]["routed_experts"]
    )  # 6 rows, 3 layers, 2 experts


def test_abort(dense: Path) -> None:
    (answer,) = answers(dense, [request(new=3)])
    cut = GenerateAnswer(
        rid=answer.rid,
        output_ids=answer.output_ids,
        output_token_logprobs=answer.output_token_logprobs,
        finish_reason="abort",
        prompt_tokens=4,
        cached_tokens=3,
        weight_version="default",
    )
    assert shape(to_sglang(cut, return_logprob=False)) == shape(recording("notok/prefix_abort_q1")["body"])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_client_reads_what_the_embedded_sampler_writes(tmp_path: Path, kind: str) -> None:
    from stages.backends.sampler.folder import read_config

    folder = save_model(tmp_path, kind)
    wanted = request(new=7, routed=kind == "moe", sampling_seed=5)
    (answer,) = answers(folder, [wanted])
    again = parse_answer(to_sglang(answer), wanted, "req-1", ModelShape.of(read_config(folder), 512))
    for name in ("output_ids", "output_token_logprobs", "finish_reason", "prompt_tokens", "weight_version"):
        assert getattr(again, name) == getattr(answer, name)
    if kind == "moe":
        assert again.routed_experts is not None
        assert (again.routed_experts == answer.routed_experts).all()
