"""Greeting servers, several of them, and what happens when one dies."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.backends.protocols import GenerateAnswer
from stages.backends.sampler.sglang import SGLangSampler
from stages.errors import SamplerError
from tests.unit.sampler_sglang.client import ask, request, use
from tests.unit.sglang_replay import Replay, echo, held, recording, server, until


def test_another_architecture_or_vocabulary_is_refused_at_the_start(dense: Path, moe: Path) -> None:
    with server("moe") as replay, pytest.raises(SamplerError, match="serves a qwen3_moe, the actor is a qwen3"):
        ask(replay, dense, request())
    for size, match in ((400, "more than the actor's 320"), (300, "fewer than the actor's 320")):
        with server() as replay:
            replay.vocabulary = size
            with pytest.raises(SamplerError, match=match):
                ask(replay, dense, request())
            assert [path for path, _ in replay.requests] == ["/server_info", "/model_info", "/ready"]  # and no more


def test_servers_of_different_weights_are_refused(dense: Path) -> None:
    with server(version="1") as one, server(version="2") as two, pytest.raises(SamplerError, match="different weights"):
        use([one, two], dense, lambda s: s.generate([request()]))


def test_a_server_that_was_left_paused_goes_on(dense: Path) -> None:
    with server() as replay:
        replay.on("/generate", echo("dense/gen_logprob"))
        ask(replay, dense, request())
        assert replay.sent("/continue_generation") == []
        replay.on("/ready", {"status": 503, "body": {}})
        ask(replay, dense, request())
        assert replay.sent("/continue_generation") == [{}]


def test_connections_go_straight_to_the_server_and_notice_when_it_vanishes(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job(s: SGLangSampler) -> int:
        await s.generate([request()])
        response = await s._client.get(s.servers[0].url + "/model_info")
        made: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
        return made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with server() as replay:
        assert use([replay.on("/generate", echo("dense/gen_logprob"))], dense, job) == 1


def test_limits_and_abilities_come_from_the_server(moe: Path) -> None:
    async def job(s: SGLangSampler) -> tuple[Any, ...]:
        assert s.weight_version == ""
        await s.start()
        return s.weight_version, s.context_len, s.is_moe, s.seeds_honoured, await s.running()

    with server("moe", "3", max_total_num_tokens=400, enable_deterministic_inference=True) as replay:
        assert use([replay], moe, job) == ("3", 400, False, True, 0)
    with server("moe", "3", context_length=300, enable_return_routed_experts=True) as replay:
        assert use([replay], moe, job) == ("3", 300, True, False, 0)
    with server("moe", "3") as replay:  # as recorded: of 512 tokens a request may have 506
        assert use([replay], moe, job) == ("3", 506, False, False, 0)


def test_no_server_at_all_is_a_clear_error(dense: Path) -> None:
    with server() as replay:
        replay.dead = True
        with pytest.raises(SamplerError, match="no SGLang server is left; start one"):
            ask(replay, dense, request())
    with server() as replay, pytest.raises(SamplerError, match="/model_info answered no JSON object"):
        ask(replay.on("/model_info", {"status": 200, "body": ["another", "service"]}), dense, request())
    with pytest.raises(SamplerError, match="pass at least one address"):
        SGLangSampler([], model_path=dense)


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
