"""Our client against the real SGLang 0.5.23: ids, log-probs, seeds, supports, routes, aborts, updates, loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch

from orchestrator.inputs import shipped_model
from stages.backends.learner.torch_learner import TorchLearner
from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams, TrainSequence
from stages.backends.sampler.sglang import SGLangSampler
from stages.errors import ModelError, SamplerError

pytestmark = pytest.mark.sglang
R = TypeVar("R")
PROMPT = [1, 261, 306, 300, 302]


def use(url: str, model: Path, job: Callable[[SGLangSampler], Awaitable[R]], **options: Any) -> R:
    async def main() -> R:
        sampler = SGLangSampler([url], model_path=model, **options)
        try:
            return await job(sampler)
        finally:
            await sampler.aclose()

    return asyncio.run(main())


def request(
    rid: str, *, new: int = 24, start: int = 0, routed: bool = False, tail: Sequence[int] = (), **params: Any
) -> GenerateRequest:
    ids = [*PROMPT, *(ord(c) + 100 for c in rid), *tail]
    return GenerateRequest(
        rid=rid,
        input_ids=ids,
        sampling_params=SamplingParams(max_new_tokens=new, **params),
        return_routed_experts=routed,
        routed_experts_start_len=start,
    )


def sequences(requests: Sequence[GenerateRequest], answers: Sequence[GenerateAnswer]) -> list[TrainSequence]:
    batch = []
    for r, a in zip(requests, answers, strict=True):
        n = len(r.input_ids)
        tokens = np.array([*r.input_ids, *a.output_ids], np.int32)
        batch.append(
            TrainSequence(
                tokens=tokens,
                loss_mask=np.arange(len(tokens)) >= n,
                rollout_log_probs=np.array([0.0] * n + list(a.output_token_logprobs), np.float32),
                rollout_routed_experts=a.routed_experts,
            )
        )
    return batch


def learner_of(model: Path) -> TorchLearner:
    learner = TorchLearner(max_tokens_per_gpu=8192, num_threads=1)
    learner.load(model, None)
    return learner


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model(dense_url: str, temperature: float) -> None:
    wanted = [request(f"r{i}", temperature=temperature, sampling_seed=i + 1) for i in range(8)]
    answers = use(dense_url, shipped_model(), lambda s: s.generate(wanted))
    batch = sequences(wanted, answers)
    for sequence, mine in zip(
        batch, learner_of(shipped_model()).log_probs(batch, temperature=temperature), strict=True
    ):
        np.testing.assert_allclose(mine, sequence.rollout_log_probs, atol=1e-4)
    assert {a.weight_version for a in answers} == {"default"}


def test_a_seed_gives_the_same_ids_and_another_one_others(dense_url: str) -> None:
    async def job(s: SGLangSampler) -> list[list[GenerateAnswer]]:
        await s.start()
        assert s.seeds_honoured
        return [
            await s.generate([request(f"s{i}", sampling_seed=seed + i, new=30, temperature=1.5) for i in range(8)])
            for seed in (100, 100, 200)
        ]

    first, again, other = use(dense_url, shipped_model(), job)
    assert [a.output_ids for a in first] == [a.output_ids for a in again]
    for one, two in zip(first, again, strict=True):  # batch invariance is a GPU's
        np.testing.assert_allclose(one.output_token_logprobs, two.output_token_logprobs, atol=1e-5)
    assert [a.output_ids for a in first] != [a.output_ids for a in other]


def test_a_truncated_draw_has_log_probs_over_its_support(dense_url: str) -> None:
    wanted = [request(f"t{i}", temperature=1.0, top_p=0.8, sampling_seed=i + 1) for i in range(4)]
    for answer in use(dense_url, shipped_model(), lambda s: s.generate(wanted)):
        assert answer.output_token_sampling_logprobs is not None
        full = np.array(answer.output_token_logprobs)
        support = np.array(answer.output_token_sampling_logprobs)
        assert (support >= full - 1e-5).all()  # renormalised over at least 80 % of the mass
        assert (support <= full - np.log(0.8) + 1e-4).all()
    with pytest.raises(SamplerError, match="would be biased"):
        use(dense_url, shipped_model(), lambda s: s.generate(wanted), truncated="refuse")


def test_routes_are_those_of_the_model_from_any_row_on(moe_url: str, moe_model: Path) -> None:
    async def job(s: SGLangSampler) -> list[GenerateAnswer]:
        await s.start()
        assert s.is_moe
        whole = await s.generate([request(f"m{i}", routed=True) for i in range(6)])
        rest = request("m0", routed=True, start=4)
        return [*whole, *await s.generate([rest])]

    *whole, rest = use(moe_url, moe_model, job)
    wanted = [request(f"m{i}", routed=True) for i in range(6)]
    batch = sequences(wanted, whole)
    for sequence in batch:
        assert sequence.rollout_routed_experts is not None
        assert sequence.rollout_routed_experts.shape == (len(sequence.tokens) - 1, 3, 2)
    assert rest.routed_experts is not None
    prompt = len(request("m0").input_ids)
    np.testing.assert_array_equal(rest.routed_experts[: prompt - 4], whole[0].routed_experts[4:prompt])
    for sequence, mine in zip(batch, learner_of(moe_model).log_probs(batch), strict=True):
        np.testing.assert_allclose(mine, sequence.rollout_log_probs, atol=1e-4)


def test_a_cancelled_call_is_aborted_by_its_ids_and_others_go_on(moe_url: str, moe_model: Path) -> None:
    async def job(s: SGLangSampler) -> tuple[int, list[GenerateAnswer], int]:
        await s.start()
        kept = asyncio.create_task(s.generate([request("kept", new=300)]))
        given_up = asyncio.create_task(s.generate([request(f"long{i}", new=950) for i in range(3)]))
        before = 0
        while before < 4:
            await asyncio.sleep(0.05)
            before = max(before, await s.running())
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        answers = await kept
        assert await s.drained(timeout_s=30)
        return before, answers, await s.running()

    before, (answer,), after = use(moe_url, moe_model, job)
    assert (before, after) == (4, 0)
    assert answer.finish_reason in ("length", "stop")


def test_an_update_cuts_what_runs_and_serves_other_weights(moe_url: str, moe_model: Path, tmp_path: Path) -> None:
    other = learner_of(moe_model)
    with torch.no_grad():
        for p in other.actor.parameters():
            p.mul_(1.1)
    other.save_actor_only(tmp_path / "other", None)
    # more than the server's 8,192 tokens: some are cut before they began
    long = range(100, 700)
    wanted = [request(f"u{i}", new=200) for i in range(4)] + [request(f"v{i}", new=60, tail=long) for i in range(20)]

    async def job(s: SGLangSampler) -> list[GenerateAnswer]:
        await s.start()
        wave = asyncio.create_task(s.generate(wanted))
        while httpx.get(f"{moe_url}/v1/loads?include=core").json()["loads"][0]["num_waiting_reqs"] < 4:
            assert not wave.done()
            await asyncio.sleep(0.05)
        await s.update_weights_from_disk(tmp_path / "other" / "actor", "other")
        answers = await wave
        assert s.resent >= 1
        with pytest.raises(ModelError, match="another architecture"):
            await s.update_weights_from_disk(shipped_model(), "wrong")
        assert s.weight_version == "other"
        await s.update_weights_from_disk(moe_model, "default")
        return answers

    answers = use(moe_url, moe_model, job)
    assert "other" in {a.weight_version for a in answers} <= {"default", "other"}  # a short reply may have been quicker
    pairs = [(r, a) for r, a in zip(wanted, answers, strict=True) if a.weight_version == "other"]
    batch = sequences(*zip(*pairs, strict=True))
    for sequence, mine in zip(batch, other.log_probs(batch), strict=True):
        np.testing.assert_allclose(mine, sequence.rollout_log_probs, atol=1e-3)


def test_a_server_that_a_killed_worker_left_paused_goes_on(moe_url: str, moe_model: Path) -> None:
    httpx.post(f"{moe_url}/pause_generation", json={"mode": "abort"}, timeout=60).raise_for_status()
    (answer,) = use(moe_url, moe_model, lambda s: s.generate([request("again", new=4)]))
    assert len(answer.output_ids) == 4


def test_the_longest_request_is_served_in_full(moe_url: str, moe_model: Path) -> None:
    async def job(s: SGLangSampler) -> GenerateAnswer:
        await s.start()
        fill = [300] * (s.context_len - len(request("full").input_ids) - 4)
        with pytest.raises(SamplerError, match="exceed the context"):
            await s.generate([request("full", new=5, tail=fill)])
        return (await s.generate([request("full", new=4, tail=fill)]))[0]

    answer = use(moe_url, moe_model, job)
    assert answer.prompt_tokens > 1000
    assert answer.finish_reason == "stop" or len(answer.output_ids) == 4


def test_another_model_than_the_servers_is_refused_at_the_start(
    dense_url: str, moe_model: Path, tmp_path: Path
) -> None:
    config = json.loads((shipped_model() / "config.json").read_text())
    for size, match in ((704, "fewer"), (702, "more")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        with pytest.raises(SamplerError, match=match):
            use(dense_url, tmp_path, lambda s: s.start())
    with pytest.raises(SamplerError, match="serves a qwen3, the actor is a qwen3_moe"):
        use(dense_url, moe_model, lambda s: s.start())
