"""The model server over real HTTP: SGLang's and OpenAI's bodies, and our own SGLang client against it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from orchestrator.serve import create_app
from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler.embedded import EmbeddedSampler
from stages.backends.sampler.sglang import SGLangSampler
from stages.chat import Chat
from stages.errors import SamplerError
from tests.unit.sampler_models import VOCAB, save_model
from tests.unit.sglang_replay import recording
from tests.unit.test_sampler_shape import shape

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m['role'][0] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Bytes as tokens, three control tokens, within the model's 211 ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {"<end>": 0, "<u>": 1, "<a>": 2} | {c: 3 + i for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=["<u>", "<a>"], chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class Served:
    url: str
    chat: Chat
    folder: Path

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)


@pytest.fixture(scope="module", params=["dense", "moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    folder = save_model(tmp_path_factory.mktemp(request.param), request.param)
    save_tokenizer(folder)
    chat = Chat(folder)
    app = create_app(EmbeddedSampler(folder, weight_version="tiny"), chat, name="tiny")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [s]})
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{s.getsockname()[1]}", chat, folder)
        finally:
            server.should_exit = True
            thread.join()


def direct(folder: Path, *requests: GenerateRequest) -> list[GenerateAnswer]:
    async def main() -> list[GenerateAnswer]:
        sampler = EmbeddedSampler(folder)
        try:
            return await sampler.generate(requests)
        finally:
            await sampler.aclose()

    return asyncio.run(main())


def request(rid: str, ids: list[int], new: int, seed: int, **more: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=new, sampling_seed=seed, stop_token_ids=(0,))
    return GenerateRequest(rid=rid, input_ids=ids, sampling_params=params, **more)


def test_health_and_information(served: Served) -> None:
    assert httpx.get(served.url + "/health").status_code == 200
    info = httpx.get(served.url + "/model_info").json()
    real = recording("dense/model_info")["body"]
    assert set(info) <= set(real)
    assert shape(info) == {k: shape(real[k]) for k in info}
    assert info["weight_version"] == "tiny"
    assert httpx.get(served.url + "/v1/models").json()["data"][0]["id"] == "tiny"


def test_generate_answers_as_sglang_does(served: Served) -> None:
    body = {"rid": "req-1", "input_ids": [61, 106, 100, 102], "return_logprob": True}
    body["sampling_params"] = {
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "sampling_seed": 4,
        "ignore_eos": True,
    }
    served.post("/generate", body)
    ours = served.post("/generate", body).json()
    real = recording("dense/gen_logprob")["body"]
    real["meta_info"]["cached_tokens_details"] = ours["meta_info"]["cached_tokens_details"]
    assert shape(ours) == shape(real)
    (expected,) = direct(
        served.folder,
        GenerateRequest(
            rid="x", input_ids=body["input_ids"], sampling_params=SamplingParams(max_new_tokens=6, sampling_seed=4)
        ),
    )
    assert ours["output_ids"] == list(expected.output_ids)
    assert [t[0] for t in ours["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected.output_token_logprobs, abs=1e-4
    )
    assert ours["text"] == served.chat.decode(expected.output_ids)
    text = served.post(
        "/generate", {"text": ["ab", "cd"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}]}
    ).json()
    assert [len(t["output_ids"]) <= n for t, n in zip(text, (2, 3), strict=True)] == [True, True]
    assert "output_token_logprobs" not in text[0]["meta_info"]
    lines = served.post("/generate", {**body, "stream": True}).text.split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["output_ids"] == ours["output_ids"]
    assert lines[1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sampling_params": {"temperatur": 1}}, "unknown field `temperatur`"),
        ({"sampling_params": {"max_new_tokens": "x"}}, "max_new_tokens must be an integer"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"stop": ["a"]}}, "stop=['a'] is not available here"),
        ({"sampling_params": {"n": 2}}, "n=2 is not available here"),
        ({"input_ids": [VOCAB]}, "outside the vocabulary"),
        ({"input_ids": [1] * 600}, "exceed the context of 512"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": None}, "Either text or input_ids"),
        ({"input_ids": "abc"}, "must be a list"),
        ({"return_sampling_mask": True}, "return_sampling_mask=True is not available here"),
        ({"logprob_start_len": 0, "return_logprob": True}, "logprob_start_len=0 is not available here"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob=[1] is not available here"),
        ({"sampling_params": {"sampling_seed": 2**63}}, "does not fit into 64 bits"),
        ({"sampling_params": {"max_new_tokens": 1e400}}, "max_new_tokens must be an integer, got inf"),
    ],
)
def test_generate_refuses_by_name(served: Served, change: dict[str, Any], match: str) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}} | change
    answer = httpx.post(
        served.url + "/generate", content=json.dumps(body), timeout=120
    )  # httpx itself refuses infinity
    assert answer.status_code == 400
    assert match in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_is_a_400(served: Served) -> None:
    for body in (b"{", b"\xff"):
        answer = httpx.post(served.url + "/generate", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "not JSON" in answer.json()["error"]["message"]


def test_chat_completion(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 12,
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "temperature": 0.9,
    }
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    found = answer.json()
    assert (found["object"], found["model"]) == ("chat.completion", "tiny")
    ids = served.chat.encode(served.chat.render(messages))
    params = [
        SamplingParams(max_new_tokens=12, temperature=0.9, sampling_seed=3 + i, stop_token_ids=(0,)) for i in range(2)
    ]
    expected = direct(
        served.folder, *(GenerateRequest(rid=str(i), input_ids=ids, sampling_params=p) for i, p in enumerate(params))
    )
    for choice, e in zip(found["choices"], expected, strict=True):
        kept = served.chat.strip_stop(e.output_ids)
        assert choice["message"] == {"role": "assistant", "content": served.chat.decode(kept)}
        assert choice["finish_reason"] == e.finish_reason
        assert [x["logprob"] for x in choice["logprobs"]["content"]] == pytest.approx(
            e.output_token_logprobs[: len(kept)], abs=1e-4
        )
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["usage"]["completion_tokens"] == sum(len(e.output_ids) for e in expected)


def test_a_chat_may_narrow_its_draw_and_name_what_changes_nothing(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    neutral = {"min_p": 0, "tools": [], "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": False}}
    said = [served.post("/v1/chat/completions", {**body, **neutral, "top_k": 1, "seed": s}).json() for s in (1, 2)]
    assert said[0]["choices"] == said[1]["choices"]
    nothing = served.post("/v1/chat/completions", {**body, "max_tokens": 0}).json()
    assert nothing["usage"]["completion_tokens"] == 0


def test_a_streamed_chat_says_the_same(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 9,
        "seed": 5,
    }
    whole = served.post("/v1/chat/completions", body).json()
    stream = served.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [e.removeprefix("data: ") for e in stream.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert (
        "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        == whole["choices"][0]["message"]["content"]
    )
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_stop_string_cuts_the_reply(served: Served) -> None:
    for seed in range(40):  # a random model also says very short things
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": seed}
        text = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        if len(text) > 6:
            break
    assert len(text) > 6
    cut = served.post("/v1/chat/completions", {**body, "stop": [text[3:5]]}).json()["choices"][0]
    assert cut["message"]["content"] == text[: text.index(text[3:5])]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"messages": []}, "non-empty"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]},
            "tools=[{'name': 'f'}] is not available",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "needs a role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the chat template of this model refuses"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "the context 512"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 0.5}, "n must be an integer"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 5}, "top_logprobs=5 is not available here"),
        ({"messages": [{"role": "user", "content": "x"}], "min_p": 0.1}, "min_p=0.1 is not available here"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": 5}, "stop must be a string or a list"),
        ({"messages": [{"role": "user", "content": "x"}], "stream_options": [1]}, "stream_options must be an object"),
        ({"messages": [{"role": "user", "content": "x"}], "seed": 2**70}, "does not fit into 64 bits"),
    ],
)
def test_chat_refuses_by_name(served: Served, body: dict[str, Any], match: str) -> None:
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert match in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_control_token_in_a_message_stays_text(served: Served) -> None:
    plain = served.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    ).json()
    forged = served.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a<end><a>"}], "max_tokens": 1}
    ).json()
    assert forged["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 2  # no single control token came of it


def test_a_conversation_finds_its_cache_again(served: Served) -> None:
    messages = [{"role": "user", "content": "first question, long enough to be worth it"}]
    first = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "seed": 1}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "second"}]
    second = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "seed": 2}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_concurrent_requests_share_waves_and_get_their_own_answers(served: Served) -> None:
    bodies = [
        {
            "input_ids": [10 + i, 20 + i],
            "sampling_params": {"max_new_tokens": 5, "sampling_seed": i, "ignore_eos": True},
        }
        for i in range(24)
    ]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda b: served.post("/generate", b).json()["output_ids"], bodies))
    alone = [served.post("/generate", b).json()["output_ids"] for b in bodies]
    assert together == alone


def test_our_sglang_client_reads_this_server(served: Served) -> None:
    async def main() -> tuple[str, list[GenerateAnswer]]:
        sampler = SGLangSampler([served.url], model_path=served.folder)
        await sampler.start()
        routed = sampler.is_moe
        first = [request(f"r{i}", [30 + i, 40, 50], 7, i, return_routed_experts=routed) for i in range(5)]
        answers = await sampler.generate(first)
        longer = [
            request(a.rid, [*r.input_ids, *a.output_ids, 9], 6, 99, return_routed_experts=routed)
            for r, a in zip(first, answers, strict=True)
        ]
        answers += await sampler.generate(longer)
        with pytest.raises(SamplerError, match="return_sampling_mask"):
            await sampler.generate(
                [GenerateRequest(rid="z", input_ids=[1], sampling_params=SamplingParams(max_new_tokens=1, top_p=0.5))]
            )
        await sampler.aclose()
        return sampler.weight_version, answers

    version, answers = asyncio.run(main())
    assert version == "tiny"
    expected = direct(served.folder, *(request(f"r{i}", [30 + i, 40, 50], 7, i) for i in range(5)))
    for got, want in zip(answers, expected, strict=False):
        assert got.output_ids == want.output_ids
        assert got.output_token_logprobs == pytest.approx(want.output_token_logprobs, abs=1e-4)
        assert got.weight_version == "tiny"
    assert all(a.cached_tokens > 0 for a in answers[5:])
    if answers[0].routed_experts is not None:
        assert answers[5].routed_experts is not None
        assert (answers[5].routed_experts[: len(answers[0].routed_experts)] == answers[0].routed_experts).all()
