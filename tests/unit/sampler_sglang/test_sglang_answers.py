"""What one server answers, read and checked against recordings of a real one, replayed over real HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.errors import SamplerError
from tests.unit.sampler_sglang.client import PROMPT, ask, request, with_logprobs
from tests.unit.sglang_replay import altered, echo, recording, server

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
            (request(ids=[1] * 510, new=6), "510 prompt tokens . 6 new tokens exceed the context of 506"),
            (request(ids=[]), "empty"),
        ):
            with pytest.raises(SamplerError, match=match):
                ask(replay, dense, bad)
        assert replay.sent("/generate") == []
    with server("moe") as replay:
        with pytest.raises(SamplerError, match="--enable-return-routed-experts"):
            ask(replay, moe, request(return_routed_experts=True))
        assert replay.sent("/generate") == []
