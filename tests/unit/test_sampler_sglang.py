"""The SGLang client against recordings of a real server, replayed over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler.sglang import SGLangSampler
from stages.errors import ModelError, SamplerError
from tests.unit.sglang_replay import Replay, altered, echo, held, recording, server, until

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
PROMPT = [261, 306, 300, 302]
# SGLang 0.5.23 silently ignores a top-level key that it does not know and refuses an unknown sampling parameter
TOP_LEVEL = {
    *("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"),
    *("return_routed_experts", "routed_experts_start_len", "return_sampling_mask", "sampling_logprobs_mode"),
}
SAMPLING = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "sampling_seed"),
}


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


def request(rid: str = "a", ids: list[int] = PROMPT, new: int = 6, **more: Any) -> GenerateRequest:
    routed = {k: more.pop(k) for k in ("return_routed_experts", "routed_experts_start_len") if k in more}
    return GenerateRequest(rid=rid, input_ids=ids, sampling_params=SamplingParams(max_new_tokens=new, **more), **routed)


def use(replays: list[Replay], folder: Path, job: Callable[[SGLangSampler], Any], **options: Any) -> Any:
    async def main() -> Any:
        sampler = SGLangSampler([r.url for r in replays], model_path=folder, **options)
        try:
            return await job(sampler)
        finally:
            await sampler.aclose()

    return asyncio.run(main())


def ask(replay: Replay, folder: Path, *requests: GenerateRequest, **options: Any) -> list[GenerateAnswer]:
    return use([replay], folder, lambda s: s.generate(requests), **options)


def with_logprobs(body: dict[str, Any]) -> None:
    """Some recordings did not ask for log-probs; the client always does."""
    body["meta_info"].setdefault("output_token_logprobs", [[-1.0, i, None] for i in body["output_ids"]])


# --------------------------------------------------------------------------- one server, one answer


@pytest.mark.parametrize(
    "name", ["dense/gen_logprob", "dense/gen_stop_token", "dense2/gen_stop_eos", "notok/gen", "det/seed7_a"]
)
def test_a_recorded_answer_is_read_as_it_is(dense: Path, name: str) -> None:
    with server() as replay:
        (answer,) = ask(replay.on("/generate", echo(name)), dense, request())
    body = recording(name)["body"]
    meta = body["meta_info"]
    assert list(answer.output_ids) == body["output_ids"]
    assert list(answer.output_token_logprobs) == [t[0] for t in meta["output_token_logprobs"]]
    assert (answer.finish_reason, answer.rid) == (meta["finish_reason"]["type"], "a")
    assert (answer.prompt_tokens, answer.cached_tokens) == (meta["prompt_tokens"], meta["cached_tokens"])
    assert answer.weight_version == "default"
    assert answer.output_token_sampling_logprobs is None
    assert answer.routed_experts is None


def test_the_request_body_holds_only_what_the_server_knows(dense: Path) -> None:
    with server() as replay:
        ask(
            replay.on("/generate", echo("dense/gen_logprob")),
            dense,
            request(stop_token_ids=(3, 4), sampling_seed=2**62),
        )
        (body,) = replay.sent("/generate")
    assert set(body) <= TOP_LEVEL
    assert set(body["sampling_params"]) <= SAMPLING
    assert body["input_ids"] == PROMPT
    assert len(body["rid"]) == 32
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 6, "sampling_seed": 2**62}
    assert wanted.items() <= body["sampling_params"].items()
    assert body["sampling_params"]["stop_token_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("name", "new", "start"),
    [
        ("moe/gen_routed", 3, 0),
        ("moe/gen_routed_cached", 3, 0),
        ("moe/gen_routed_start_prompt", 3, 4),
        ("moe/gen_routed_max1", 1, 4),
        ("moe/gen_routed_max0", 0, 0),
    ],
)
def test_routed_experts_are_decoded(moe: Path, name: str, new: int, start: int) -> None:
    with server("moe", "3", enable_return_routed_experts=True) as replay:
        wanted = request(new=new, temperature=0.0, return_routed_experts=True, routed_experts_start_len=start)
        (answer,) = ask(replay.on("/generate", altered(name, with_logprobs)), moe, wanted)
        (sent,) = replay.sent("/generate")
    assert (sent["return_routed_experts"], sent["routed_experts_start_len"]) == (True, start)
    assert answer.routed_experts is not None
    assert answer.routed_experts.dtype == np.int32
    assert answer.routed_experts.shape == (4 + new - 1 - start, 3, 2)
    raw = np.frombuffer(base64.b64decode(recording(name)["body"]["meta_info"]["routed_experts"]), "<i4")
    np.testing.assert_array_equal(answer.routed_experts.ravel(), raw)
    if name == "moe/gen_routed_start_prompt":  # the last two rows of the whole
        full = np.frombuffer(
            base64.b64decode(recording("moe/gen_routed")["body"]["meta_info"]["routed_experts"]), "<i4"
        )
        np.testing.assert_array_equal(answer.routed_experts, full.reshape(6, 3, 2)[4:])


def test_a_truncated_draw_brings_the_log_probs_over_its_support(dense: Path) -> None:
    with server() as replay:
        replay.on("/generate", echo("dense2/gen_sampling_mask_selected"))
        (answer,) = ask(replay, dense, request(new=3, temperature=0.7, top_p=0.6))
        (body,) = replay.sent("/generate")
    assert body["return_sampling_mask"] is True
    assert body["sampling_params"]["top_k"] == 320  # finite, or the server refuses; the vocabulary is smaller than 4096
    assert answer.output_token_sampling_logprobs == (0.0, -0.6101001501083374, -0.634197473526001)
    assert answer.output_token_logprobs[1] == pytest.approx(-1.104121, abs=1e-6)


def test_a_truncated_draw_is_refused_where_it_would_bias_training(dense: Path) -> None:
    with server() as replay:
        for biased in ({"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}):
            with pytest.raises(SamplerError, match="would be biased"):
                ask(replay, dense, request(**biased), truncated="refuse")
        replay.on("/generate", echo("dense2/gen_topp_only_logprob"))
        (answer,) = ask(replay, dense, request(new=3, temperature=0.7, top_p=0.6), truncated="plain")
        assert answer.output_token_sampling_logprobs is None
        assert len(replay.sent("/generate")) == 1
        assert "return_sampling_mask" not in replay.sent("/generate")[0]


@pytest.mark.parametrize("name", ["notok/prefix_abort_q1", "orig/retracted_then_aborted", "dense2/abort_all_result"])
def test_an_aborted_answer_may_be_partial(dense: Path, name: str) -> None:
    with server() as replay:
        (answer,) = ask(replay.on("/generate", altered(name, with_logprobs)), dense, request(new=400))
    assert answer.finish_reason == "abort"
    assert list(answer.output_ids) == recording(name)["body"]["output_ids"]


ERRORS = {
    "dense/err_topp0": r"top_p must be in \(0, 1\]",
    "dense/err_unknown_sampling": "unknown field `temperatur`",
    "dense/err_type": "must be list or null; got str",
    "dense/err_type2": "expected i64",
    "dense/err_empty_ids": "400",
    "dense/gen_sampling_mask_topp1": "return_sampling_mask requires",
    "dense2/err_404": "HTTP 404: Not Found",
    "dense2/err_too_long": "longer than the model's context length",
    "dense2/err_total_too_long": "Requested token count exceeds",
    "dense2/err_rid_in_use": "Duplicate request ID detected: long-2",
    "moe/err_routed_start_hi": "routed_experts_start_len=9",
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_refusal_is_passed_on_and_not_repeated(dense: Path, name: str) -> None:
    with server() as replay:
        replay.on("/generate", recording(name))
        with pytest.raises(SamplerError, match=ERRORS[name]):
            ask(replay, dense, request())
        assert len(replay.sent("/generate")) == 1


def _drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["meta_info"].pop(key)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["meta_info"].__setitem__(key, value)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no log-probs": (_drop("output_token_logprobs"), "not an SGLang answer"),
    "another id": (_set("id", "x"), "carries id x"),
    "fewer ids": (lambda b: b["output_ids"].pop(), "5 output ids, 6 log-probs"),
    "one id altered": (lambda b: b["output_ids"].__setitem__(2, 7), "differ"),
    "completion_tokens": (_set("completion_tokens", 9), "completion_tokens 9"),
    "prompt_tokens": (_set("prompt_tokens", 5), "the server saw 5 prompt tokens, 4 were sent"),
    "NaN": (lambda b: b["meta_info"]["output_token_logprobs"][1].__setitem__(0, float("nan")), "not a finite number"),
    "finish": (_set("finish_reason", {"type": "later"}), "unknown finish_reason"),
    "vocabulary": (
        lambda b: (b["output_ids"].__setitem__(0, 320), b["meta_info"]["output_token_logprobs"][0].__setitem__(1, 320)),
        "another model is served",
    ),
    "version": (
        _set("weight_versions", [{"version": "7", "start": 0, "end": 6}]),
        "weight version '7', expected 'default'",
    ),
    "not an answer": (lambda b: b.clear(), "not an SGLang answer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_answer_that_breaks_the_contract_is_refused(dense: Path, case: str) -> None:
    change, match = BROKEN[case]
    with server() as replay:
        replay.on("/generate", altered("dense/gen_logprob", change))
        with pytest.raises(SamplerError, match=match):
            ask(replay, dense, request())


def test_an_answer_of_two_weight_versions_is_refused(dense: Path) -> None:
    with server(version="v-abort") as replay:
        replay.on("/generate", echo("dense2/pause_retract_result"))
        with pytest.raises(SamplerError, match="several weight versions"):
            ask(replay, dense, request(new=400))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("router/gen_routed_via_router", "routed_experts is missing"),  # a gateway dropped the key
        ("moe/gen_routed_start_prompt", "may ignore routed_experts_start_len"),
    ],
)
def test_routes_that_are_missing_or_of_another_length_are_refused(moe: Path, name: str, match: str) -> None:
    with server(
        "moe", recording(name)["body"]["meta_info"]["weight_version"], enable_return_routed_experts=True
    ) as replay:
        replay.on("/generate", altered(name, with_logprobs))
        with pytest.raises(SamplerError, match=match):
            ask(replay, moe, request(new=3, temperature=0.0, return_routed_experts=True))


def test_a_missing_mask_is_refused(dense: Path) -> None:
    with server() as replay:
        replay.on("/generate", echo("dense2/gen_topp_only_logprob"))
        with pytest.raises(SamplerError, match="return_sampling_mask was asked for and is missing"):
            ask(replay, dense, request(new=3, temperature=0.7, top_p=0.6))


def test_what_would_kill_a_server_is_never_sent(dense: Path, moe: Path) -> None:
    with server() as replay:
        for bad, match in (
            (request(ids=[1, 320]), "token id 320 is outside"),
            (request(ids=[-1]), "token id -1 is outside"),
            (request(ids=[1] * 510, new=6), "510 prompt tokens . 6 new tokens exceed the context of 512"),
            (request(ids=[]), "empty"),
        ):
            with pytest.raises(SamplerError, match=match):
                ask(replay, dense, bad)
        assert replay.sent("/generate") == []
    with server("moe") as replay:
        with pytest.raises(SamplerError, match="--enable-return-routed-experts"):
            ask(replay, moe, request(return_routed_experts=True))
        assert replay.sent("/generate") == []


# --------------------------------------------------------------------------- start


def test_another_architecture_or_vocabulary_is_refused_at_the_start(dense: Path, moe: Path, tmp_path: Path) -> None:
    with server("moe") as replay, pytest.raises(SamplerError, match="serves a qwen3_moe, the actor is a qwen3"):
        ask(replay, dense, request())
    Qwen3Config(**{**SIZES, "vocab_size": 400}).save_pretrained(tmp_path)
    with server() as replay:
        replay.answers["/model_info"][0]["body"]["model_path"] = str(tmp_path)  # type: ignore[index]
        with pytest.raises(SamplerError, match="vocabulary of 400, the actor has 320"):
            ask(replay, dense, request())


def test_servers_of_different_weights_are_refused(dense: Path) -> None:
    with server(version="1") as one, server(version="2") as two, pytest.raises(SamplerError, match="different weights"):
        use([one, two], dense, lambda s: s.generate([request()]))


def test_limits_and_abilities_come_from_the_server(moe: Path) -> None:
    async def job(s: SGLangSampler) -> tuple[Any, ...]:
        assert s.weight_version == ""
        await s.start()
        return s.weight_version, s.context_len, s.is_moe, s.seeds_honoured, await s.running()

    with server("moe", "3", max_total_num_tokens=400, enable_deterministic_inference=True) as replay:
        assert use([replay], moe, job) == ("3", 400, False, True, 0)
    with server("moe", "3", context_length=300, enable_return_routed_experts=True) as replay:
        assert use([replay], moe, job) == ("3", 300, True, False, 0)


def test_no_server_at_all_is_a_clear_error(dense: Path) -> None:
    with server() as replay:
        replay.dead = True
        with pytest.raises(SamplerError, match="no SGLang server is left; start one"):
            ask(replay, dense, request())
    with pytest.raises(SamplerError, match="pass at least one address"):
        SGLangSampler([], model_path=dense)


# --------------------------------------------------------------------------- several servers


def test_new_attempts_go_to_the_least_loaded_and_stay_there(dense: Path) -> None:
    async def job(s: SGLangSampler) -> list[dict[str, int]]:
        waves = []
        for _ in range(3):
            await s.generate([request(f"r{i}") for i in range(6)])  # all in flight together: one call gathers them
            homes = {rid: s.servers.index(home) for rid, home in s._home.items()}
            waves.append(homes)
        await s.release(["r0"])
        assert "r0" not in s._home
        return waves

    with server() as one, server() as two:
        for replay in (one, two):
            replay.on("/generate", echo("dense/gen_logprob", delay_s=0.05))
        waves = use([one, two], dense, job)
        assert len(one.sent("/generate")) == len(two.sent("/generate")) == 9
    assert waves[0] == waves[1] == waves[2]


def test_a_server_that_dies_is_removed_and_its_requests_are_sent_again(dense: Path) -> None:
    async def job(s: SGLangSampler) -> list[GenerateAnswer]:
        answers = await s.generate([request(f"r{i}") for i in range(8)])
        assert [srv.removed is None for srv in s.servers] == [False, True]
        assert s.resent == 4
        answers += await s.generate([request(f"r{i}") for i in range(8)])
        return answers

    with server() as one, server() as two:
        release = threading.Event()

        def die(_: Any) -> None:
            while len(one.sent("/generate")) < 4:
                release.wait(0.01)
            one.dead = True

        one.on("/generate", die)
        two.on("/generate", echo("dense/gen_logprob"))
        answers = use([one, two], dense, job)
        assert len(two.sent("/generate")) == 16
    assert [a.rid for a in answers] == [f"r{i}" for i in range(8)] * 2


def test_a_request_that_kills_servers_is_not_sent_to_a_third(dense: Path) -> None:
    with server() as one, server() as two, server() as three:

        def deadly(replay: Replay) -> Callable[[Any], None]:
            return lambda _: setattr(replay, "dead", True)

        for replay in (one, two, three):
            replay.on("/generate", deadly(replay))
        with pytest.raises(SamplerError, match="2 servers failed while it ran"):
            use([one, two, three], dense, lambda s: s.generate([request()]))
        assert len(one.requests) > 0
        assert three.sent("/generate") == []


def test_a_lost_connection_to_a_healthy_server_aborts_and_repeats(dense: Path) -> None:
    async def job(s: SGLangSampler) -> GenerateAnswer:
        (answer,) = await s.generate([request()])
        assert s.servers[0].removed is None
        return answer

    with server() as replay:
        replay.on("/generate", lambda _: None, echo("dense/gen_logprob"))
        assert use([replay], dense, job).finish_reason == "length"
        first, second = replay.sent("/generate")
        assert first["rid"] != second["rid"]
        assert replay.sent("/abort_request") == [{"rid": first["rid"]}]


def test_a_server_that_never_answers_runs_into_its_time_limit(dense: Path) -> None:
    with server() as replay:
        release = threading.Event()
        replay.on("/generate", held("dense/gen_logprob", release))
        with pytest.raises(SamplerError, match=r"no answer within 0.2 s"):
            ask(replay, dense, request(), timeout_s=0.2)
        release.set()
        assert len(replay.sent("/abort_request")) == 2


def test_a_cancelled_call_aborts_its_requests_by_exact_id(dense: Path) -> None:
    async def job(s: SGLangSampler) -> None:
        wave = asyncio.create_task(s.generate([request("a"), request("b")]))
        await until(lambda: len(replay.sent("/generate")) == 2)
        wave.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wave

    release = threading.Event()
    with server() as replay:
        replay.on("/generate", held("dense/gen_logprob", release))
        use([replay], dense, job)
        release.set()
        sent = {body["rid"] for body in replay.sent("/generate")}
        assert {body["rid"] for body in replay.sent("/abort_request")} == sent
        assert len(sent) == 2


def test_one_bad_answer_cancels_the_rest_of_the_wave(dense: Path) -> None:
    with server() as replay:
        release = threading.Event()
        slow = held("dense/gen_logprob", release)

        def refuse(_: Any) -> Any:
            while len(replay.sent("/generate")) < 2:
                release.wait(0.01)
            return recording("dense/err_topp0")

        replay.on("/generate", refuse, slow)
        with pytest.raises(SamplerError, match="top_p must be"):
            ask(replay, dense, request("a"), request("b"))
        release.set()
        assert len(replay.sent("/abort_request")) == 1


# --------------------------------------------------------------------------- new weights


def _after_update(replay: Replay, version: str) -> Callable[[Any], Any]:
    """The update's recorded answer; from then on the server reports the version that it was given."""

    def answer(body: Any) -> Any:
        replay.answers["/model_info"][0]["body"]["weight_version"] = version  # type: ignore[index]
        return recording("dense2/upd_disk")

    return answer


def test_an_update_pauses_flushes_checks_and_continues(dense: Path) -> None:
    async def job(s: SGLangSampler) -> tuple[str, str]:
        await s.update_weights_from_disk(dense, "7")
        (answer,) = await s.generate([request(new=3)])
        return s.weight_version, answer.weight_version

    with server() as replay:
        replay.on("/update_weights_from_disk", _after_update(replay, "7")).on("/generate", echo("dense2/gen_after_upd"))
        assert use([replay], dense, job, remote_path=lambda p: f"/shared/{p.name}") == ("7", "7")
        paths = [p for p, _ in replay.requests]
        start = paths.index("/pause_generation")
        assert paths[start:] == [
            *("/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation", "/generate")
        ]
        assert replay.sent("/pause_generation") == [{"mode": "abort"}]
        wanted = {"model_path": f"/shared/{dense.name}", "weight_version": "7", "flush_cache": True}
        assert replay.sent("/update_weights_from_disk") == [wanted]


def test_what_a_pause_cut_is_sampled_anew_from_the_new_weights(dense: Path) -> None:
    async def job(s: SGLangSampler) -> GenerateAnswer:
        wave = asyncio.create_task(s.generate([request(new=400)]))
        await until(lambda: len(replay.sent("/generate")) == 1)
        await s.update_weights_from_disk(dense, "7")
        answer = (await wave)[0]
        assert s.resent == 1
        return answer

    release = threading.Event()

    def pause(_: Any) -> Any:  # a real server answers here once everything is aborted
        release.set()
        return recording("dense2/pause_abort")

    with server() as replay:
        replay.on("/update_weights_from_disk", _after_update(replay, "7")).on("/pause_generation", pause)
        replay.on(
            "/generate", held("dense2/pause_abort_result", release, version="default"), echo("dense2/gen_after_upd")
        )
        answer = use([replay], dense, job)
        assert len(replay.sent("/generate")) == 2
    assert (answer.finish_reason, answer.weight_version) == ("length", "7")


def test_a_refused_update_keeps_the_old_weights(dense: Path) -> None:
    async def job(s: SGLangSampler) -> str:
        with pytest.raises(ModelError, match="Failed to get weights iterator"):
            await s.update_weights_from_disk(dense, "8")
        await s.generate([request()])
        return s.weight_version

    with server() as replay:
        replay.on("/update_weights_from_disk", recording("dense2/upd_disk_missing")).on(
            "/generate", echo("dense/gen_logprob")
        )
        assert use([replay], dense, job) == "default"
        assert len(replay.sent("/continue_generation")) == 1


def test_another_architecture_is_refused_before_any_server_hears_of_it(dense: Path, moe: Path, tmp_path: Path) -> None:
    async def job(s: SGLangSampler) -> None:
        for folder, match in ((moe, "another architecture"), (tmp_path, "config.json is missing")):
            with pytest.raises(ModelError, match=match):
                await s.update_weights_from_disk(folder, "8")

    with server() as replay:
        use([replay], dense, job)
        assert replay.sent("/pause_generation") == []


def test_a_server_that_keeps_its_old_version_is_removed_and_may_come_back(dense: Path) -> None:
    async def job(s: SGLangSampler) -> list[bool]:
        await s.update_weights_from_disk(dense, "7")
        seen = [srv.removed is None for srv in s.servers]
        two.on("/update_weights_from_disk", _after_update(two, "8"))
        await s.update_weights_from_disk(dense, "8")
        return seen + [srv.removed is None for srv in s.servers]

    with server() as one, server() as two:
        one.on("/update_weights_from_disk", _after_update(one, "7"), _after_update(one, "8"))
        two.on("/update_weights_from_disk", recording("dense2/upd_disk"))  # says yes, changes nothing
        assert use([one, two], dense, job) == [True, False, True, True]


def test_servers_are_polled_until_an_abort_took_effect(dense: Path) -> None:
    busy = recording("v1_loads_core")
    busy["loads"][0] |= {"num_running_reqs": 1, "num_waiting_reqs": 2}

    async def job(s: SGLangSampler) -> tuple[int, bool, bool]:
        await s.start()
        return await s.running(), await s.drained(timeout_s=0.0), await s.drained(timeout_s=5.0)

    with server() as replay:
        full, idle = {"status": 200, "body": busy}, {"status": 200, "body": recording("v1_loads_core")}
        replay.on("/v1/loads", full, full, full, idle)
        assert use([replay], dense, job) == (3, False, True)
