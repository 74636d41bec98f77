"""The embedded sampler against Hugging Face's own forward pass, on random models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler.embedded import EmbeddedSampler
from stages.errors import ModelError, SamplerError
from tests.unit.sampler_models import KINDS, VOCAB, save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return folder


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def request(rid: str, ids: Sequence[int], new: int = 8, **more: Any) -> GenerateRequest:
    routed = {k: more.pop(k) for k in ("return_routed_experts", "routed_experts_start_len") if k in more}
    return GenerateRequest(rid=rid, input_ids=ids, sampling_params=SamplingParams(max_new_tokens=new, **more), **routed)


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def rescored(model: Any, ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[start:] from one full forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, start - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()


async def dialogue(
    sampler: EmbeddedSampler, turns: int, rows: int, seed: int
) -> list[tuple[list[int], list[GenerateAnswer]]]:
    """`rows` attempts of several turns with observations of random length, some ending early."""
    rng = random.Random(seed)
    seqs = [p for p in prompts(-(-rows // 2), seed) for _ in range(2)][:rows]  # pairs share their first prompt
    seen: list[list[GenerateAnswer]] = [[] for _ in seqs]
    live = list(range(rows))
    for turn in range(turns):
        wave = [
            request(
                f"r{i}",
                list(seqs[i]),
                rng.randint(1, 9),
                sampling_seed=1000 * turn + i,
                stop_token_ids=(1, 2, 3, 4, 5, 6),
                temperature=0.8,
            )
            for i in live
        ]
        for i, answer in zip(live, await sampler.generate(wave), strict=True):
            seen[i].append(answer)
            seqs[i] = seqs[i] + list(answer.output_ids) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        gone = [i for i in live if rng.random() < 0.3]
        await sampler.release([f"r{i}" for i in gone])
        live = [i for i in live if i not in gone]
    return list(zip(seqs, seen, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows_per_block", [3, 256])
def test_logprobs_over_turns_equal_a_full_forward_pass(
    folders: Callable[[str], Path], kind: str, rows_per_block: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    sampler = EmbeddedSampler(folders(kind), rows_per_block=rows_per_block)
    worst, count, reused = 0.0, 0, 0
    for ids, answers in run(dialogue(sampler, turns=4, rows=11, seed=3)):
        for answer in answers:
            reused += answer.cached_tokens
            n, end = len(answer.output_ids), answer.prompt_tokens + len(answer.output_ids)
            assert tuple(ids[answer.prompt_tokens : end]) == answer.output_ids
            expected = rescored(model, ids[:end], answer.prompt_tokens, 0.8)
            worst = max(worst, float(np.abs(np.array(expected) - answer.output_token_logprobs).max()))
            count += n
            assert answer.finish_reason == ("stop" if answer.output_ids[-1] in (1, 2, 3, 4, 5, 6) else "length")
            assert not set(answer.output_ids[:-1]) & {1, 2, 3, 4, 5, 6}
    run(sampler.aclose())
    assert count > 60
    assert worst < 1e-4
    assert (reused > 0) == (kind != "llama")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logits_equal_hugging_face(folders: Callable[[str], Path], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    sampler = EmbeddedSampler(folders(kind))
    decoder = sampler._decoder
    wave = [np.array(p) for p in prompts(5, seed=9)]
    with torch.inference_mode():
        (block,) = decoder.open([f"r{i}" for i in range(5)], wave, 1)
        got = decoder.prefill(block)
        for row, i in enumerate(block.order):
            torch.testing.assert_close(got[row], model(torch.tensor(wave[i])[None]).logits[0, -1], atol=1e-4, rtol=0)
    run(sampler.aclose())


def test_routed_experts_are_those_of_the_model(folders: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("moe")).eval()
    sampler = EmbeddedSampler(folders("moe"))
    ids = prompts(1, seed=5, low=10, high=10)[0]

    async def two_turns() -> tuple[list[int], GenerateAnswer]:
        first = (await sampler.generate([request("a", ids, 5, return_routed_experts=True), request("b", ids[:4], 9)]))[
            0
        ]
        longer = ids + list(first.output_ids) + [7, 8, 9]
        second = (
            await sampler.generate([request("a", longer, 4, return_routed_experts=True, routed_experts_start_len=6)])
        )[0]
        assert first.routed_experts is not None
        assert first.routed_experts.shape == (10 + 5 - 1, model.config.num_hidden_layers, 2)
        assert second.cached_tokens == 14
        return longer + list(second.output_ids), second

    full, answer = run(two_turns())
    run(sampler.aclose())
    with torch.no_grad():
        scores = model(torch.tensor([full[:-1]]), output_router_logits=True).router_logits
    expected = torch.stack([s.softmax(-1).topk(2, -1).indices for s in scores], 1).numpy()
    assert answer.routed_experts is not None
    assert answer.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(answer.routed_experts, expected[6:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_waves_give_the_same_bits(folders: Callable[[str], Path], kind: str) -> None:
    def once(history: int) -> list[Any]:
        sampler = EmbeddedSampler(folders(kind))
        for h in range(history):  # an earlier, finished phase must leave no trace
            run(sampler.generate([request(f"old{h}-{i}", p) for i, p in enumerate(prompts(40, seed=h, high=90))]))
            run(sampler.release([f"old{h}-{i}" for i in range(40)]))
        out = run(dialogue(sampler, turns=3, rows=13, seed=8))
        run(sampler.aclose())
        return out

    assert once(0) == once(0) == once(2)


def test_a_choice_depends_on_the_seed_and_not_on_batch_mates(folders: Callable[[str], Path]) -> None:
    sampler = EmbeddedSampler(folders("dense"))
    alone = run(sampler.generate([request("x", [5, 6, 7], 30, sampling_seed=11)]))[0]
    mates = [request(f"m{i}", p, 20, sampling_seed=i, top_p=0.9) for i, p in enumerate(prompts(20, seed=1))]
    together = run(
        sampler.generate(
            [*mates, request("y", [5, 6, 7], 30, sampling_seed=11), request("z", [5, 6, 7], 30, sampling_seed=12)]
        )
    )
    run(sampler.aclose())
    assert together[-2].output_ids == alone.output_ids
    assert together[-1].output_ids != alone.output_ids


def test_a_changed_prefix_is_recomputed_and_a_released_rid_forgotten(folders: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("dense")).eval()
    sampler = EmbeddedSampler(folders("dense"))
    ids = list(range(10, 30))
    run(sampler.generate([request("a", ids, 4)]))
    changed = [*ids[:12], 99, *ids[13:]]
    answer = run(sampler.generate([request("a", changed, 4)]))[0]
    assert answer.cached_tokens == 12
    assert rescored(model, changed + list(answer.output_ids), 20) == pytest.approx(
        answer.output_token_logprobs, abs=1e-4
    )
    assert (
        run(sampler.generate([request("a", changed, 4)]))[0].cached_tokens == 19
    )  # the last prompt token is always fed
    run(sampler.release(["a", "never seen"]))
    assert run(sampler.generate([request("a", changed, 4)]))[0].cached_tokens == 0
    run(sampler.aclose())


def test_new_weights_drop_every_cache(folders: Callable[[str], Path], tmp_path: Path) -> None:
    other = save_model(tmp_path, "dense", seed=77)
    model = AutoModelForCausalLM.from_pretrained(other).eval()
    sampler = EmbeddedSampler(folders("dense"))
    ids = list(range(10, 30))
    before = run(sampler.generate([request("a", ids, 6)]))[0]
    run(sampler.update_weights_from_disk(other, "v1"))
    after = run(sampler.generate([request("a", ids, 6)]))[0]
    assert (before.weight_version, after.weight_version, after.cached_tokens) == ("base", "v1", 0)
    assert rescored(model, ids + list(after.output_ids), 20) == pytest.approx(after.output_token_logprobs, abs=1e-4)
    with pytest.raises(ModelError, match="another architecture"):
        run(sampler.update_weights_from_disk(folders("moe"), "v2"))
    assert run(sampler.generate([request("a", ids, 6)]))[0].weight_version == "v1"
    run(sampler.aclose())


def test_idle_caches_are_evicted_when_slots_run_out(folders: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("dense")).eval()
    sampler = EmbeddedSampler(folders("dense"), max_slots=4)
    texts = prompts(6, seed=2, low=8)
    run(sampler.generate([request(str(i), texts[i], 2) for i in range(4)]))
    answers = run(sampler.generate([request(str(i), texts[i], 5) for i in (4, 2, 5)]))
    assert [a.cached_tokens > 0 for a in answers] == [False, True, False]
    for i, a in zip((4, 2, 5), answers, strict=True):
        assert rescored(model, texts[i] + list(a.output_ids), len(texts[i])) == pytest.approx(
            a.output_token_logprobs, abs=1e-4
        )
    with pytest.raises(SamplerError, match="max_slots=4"):
        run(sampler.generate([request(str(i), texts[i], 5) for i in range(5)]))
    run(sampler.aclose())


def test_the_event_loop_runs_while_a_wave_computes(folders: Callable[[str], Path]) -> None:
    async def main() -> tuple[int, list[str]]:
        sampler = EmbeddedSampler(folders("dense"))
        ticks, order = 0, []

        async def ask(name: str, new: int) -> None:
            await sampler.generate([request(name, [1, 2, 3], new)])
            order.append(name)

        jobs = [asyncio.create_task(ask("slow", 200)), asyncio.create_task(ask("quick", 1))]
        while not all(j.done() for j in jobs):
            await asyncio.sleep(0.001)
            ticks += 1
        await sampler.aclose()
        return ticks, order

    ticks, order = run(main())
    assert ticks > 5
    assert order == ["slow", "quick"]


def test_a_cancelled_wave_stops_and_the_sampler_goes_on(folders: Callable[[str], Path]) -> None:
    async def main() -> GenerateAnswer:
        sampler = EmbeddedSampler(folders("dense"))
        job = asyncio.create_task(sampler.generate([request("a", [1, 2, 3], 400)]))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        answer = (await sampler.generate([request("a", [1, 2, 3, 4], 3)]))[0]
        await sampler.aclose()
        return answer

    assert run(main()).cached_tokens == 0


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([request("a", [], 3)], "empty"),
        ([request("a", [1, VOCAB], 3)], f"token id {VOCAB} is outside"),
        ([request("a", [1, -1], 3)], "token id -1 is outside"),
        ([request("a", [1] * 500, 20)], "500 prompt tokens . 20 new tokens exceed the context of 512"),
        ([request("a", [1], 3), request("a", [2], 3)], "twice"),
        ([request("a", [1], 3, top_p=0.0)], "top_p"),
        ([request("a", [1], 3, top_k=0)], "top_k"),
        ([request("a", [1], 3, temperature=-1.0)], "temperature"),
        ([request("a", [1], 3, routed_experts_start_len=2)], "start_len=2"),
    ],
)
def test_bad_requests_are_named(folders: Callable[[str], Path], bad: list[GenerateRequest], match: str) -> None:
    sampler = EmbeddedSampler(folders("dense"))
    with pytest.raises(SamplerError, match=match):
        run(sampler.generate(bad))
    run(sampler.aclose())


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_a_model_error(tmp_path: Path, missing: str) -> None:
    save_model(tmp_path, "dense")
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        EmbeddedSampler(tmp_path)


def test_weights_of_another_shape_are_a_model_error(tmp_path: Path) -> None:
    save_model(tmp_path, "dense")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"intermediate_size": 96', '"intermediate_size": 80'))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \(96, 64\)"):
        EmbeddedSampler(tmp_path)


def test_two_waves_in_flight_do_not_touch_each_other(folders: Callable[[str], Path]) -> None:
    """The order in which two lanes call depends on timing; the bits of neither may."""

    async def lanes(order: Sequence[str]) -> dict[str, list[Any]]:
        sampler = EmbeddedSampler(folders("dense"))
        rng = {name: random.Random(name) for name in "ab"}
        seqs = {name: prompts(9, seed=ord(name)) for name in "ab"}
        out: dict[str, list[Any]] = {"a": [], "b": []}
        for name in order:
            live = [i for i in range(9) if (i + len(out[name])) % 4]
            wave = [
                request(f"{name}{i}", list(seqs[name][i]), 6, sampling_seed=i, stop_token_ids=tuple(range(40)))
                for i in live
            ]
            answers = await sampler.generate(wave)
            out[name].append(answers)
            for i, answer in zip(live, answers, strict=True):
                seqs[name][i] += [*answer.output_ids, *(rng[name].randrange(VOCAB) for _ in range(3))]
        await sampler.aclose()
        return out

    assert run(lanes("ababab")) == run(lanes("aaabbb")) == run(lanes("abbaba"))


def test_rids_of_different_waves_may_meet(folders: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("moe")).eval()
    sampler = EmbeddedSampler(folders("moe"))
    texts = prompts(5, seed=4, low=8)
    run(sampler.generate([request(str(i), texts[i], 3) for i in (0, 1)]))
    run(sampler.generate([request(str(i), texts[i], 3) for i in (2, 3)]))
    answers = run(sampler.generate([request(str(i), texts[i], 5, return_routed_experts=True) for i in (3, 4, 0)]))
    assert [a.cached_tokens > 0 for a in answers] == [True, False, True]
    for i, a in zip((3, 4, 0), answers, strict=True):
        full = texts[i] + list(a.output_ids)
        assert rescored(model, full, len(texts[i])) == pytest.approx(a.output_token_logprobs, abs=1e-4)
        with torch.no_grad():
            scores = model(torch.tensor([full[:-1]]), output_router_logits=True).router_logits
        expected = torch.stack([s.softmax(-1).topk(2, -1).indices for s in scores], 1).numpy()
        np.testing.assert_array_equal(a.routed_experts, expected)
    run(sampler.aclose())
