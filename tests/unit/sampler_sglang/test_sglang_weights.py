"""New weights on servers: paused, flushed, checked, continued; what a pause cut is sampled anew."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.backends.protocols import GenerateAnswer
from stages.backends.sampler.sglang import SGLangSampler
from stages.errors import ModelError, SamplerError
from tests.unit.sampler_sglang.client import request, use
from tests.unit.sglang_replay import Replay, echo, held, recording, server, until


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


def test_what_a_pause_held_back_is_sampled_anew_too(dense: Path) -> None:
    """A request on its way while the server pauses waits there and is answered by the new weights."""

    async def job(s: SGLangSampler) -> GenerateAnswer:
        wave = asyncio.create_task(s.generate([request(new=3)]))
        await until(lambda: len(replay.sent("/generate")) == 1)
        await s.update_weights_from_disk(dense, "7")
        release.set()
        return (await wave)[0]

    release = threading.Event()
    with server() as replay:
        replay.on("/update_weights_from_disk", _after_update(replay, "7"))
        replay.on("/generate", held("dense2/gen_after_upd", release), echo("dense2/gen_after_upd"))
        answer = use([replay], dense, job)
        assert len(replay.sent("/generate")) == 2
    assert (answer.finish_reason, answer.weight_version) == ("length", "7")


def test_a_request_that_is_lost_in_a_pause_does_not_cost_the_server(dense: Path) -> None:
    """A paused server cannot say that it is healthy; it is asked once it goes on."""

    async def job(s: SGLangSampler) -> GenerateAnswer:
        wave = asyncio.create_task(s.generate([request(new=3)]))
        await until(lambda: len(replay.sent("/generate")) == 1)
        await s.update_weights_from_disk(dense, "7")
        return (await wave)[0]

    release = threading.Event()

    def drop(_: Any) -> None:
        release.wait(30)

    def pause(_: Any) -> Any:
        release.set()
        time.sleep(0.2)  # for a client that asks too early
        return recording("dense2/pause_abort")

    def health(_: Any) -> Any:
        return recording("dense/health") if replay.sent("/continue_generation") else {"status": 503, "body": None}

    with server() as replay:
        replay.on("/update_weights_from_disk", _after_update(replay, "7")).on("/pause_generation", pause)
        replay.on("/generate", drop, echo("dense2/gen_after_upd")).on("/health", health)
        assert use([replay], dense, job).weight_version == "7"


def test_a_server_that_hangs_in_its_pause_is_removed_after_one_time_limit(dense: Path) -> None:
    async def job(s: SGLangSampler) -> list[bool]:
        await s.update_weights_from_disk(dense, "7")
        return [srv.removed is None for srv in s.servers]

    release = threading.Event()
    with server() as one, server() as two:
        one.on("/update_weights_from_disk", _after_update(one, "7"))
        two.on("/pause_generation", held("dense2/pause_abort", release))
        assert use([one, two], dense, job, update_timeout_s=0.3) == [True, False]
        release.set()
        assert len(two.sent("/pause_generation")) == 1
        assert two.sent("/update_weights_from_disk") == []
        assert len(two.sent("/continue_generation")) == 1  # its pause may have come through


def test_servers_of_different_weights_agree_after_an_update(dense: Path) -> None:
    """What a worker leaves that was killed between two of them."""

    async def job(s: SGLangSampler) -> list[GenerateAnswer]:
        with pytest.raises(SamplerError, match="different weights 1, 2"):
            await s.generate([request()])
        assert s.weight_version == ""
        await s.update_weights_from_disk(dense, "7")
        return await s.generate([request(f"r{i}", new=3) for i in range(2)])

    with server(version="1") as one, server(version="2") as two:
        for replay in (one, two):
            replay.on("/update_weights_from_disk", _after_update(replay, "7"))
            replay.on("/generate", echo("dense2/gen_after_upd"))
        assert [a.weight_version for a in use([one, two], dense, job)] == ["7", "7"]


def test_a_server_that_comes_back_as_something_else_stays_removed(moe: Path) -> None:
    async def job(s: SGLangSampler) -> list[str]:
        await s.generate([request(f"r{i}") for i in range(2)])
        reasons = [s.servers[1].removed or ""]
        two.dead = False
        for version, change in (
            ("7", lambda: two.answers["/server_info"][0]["body"].update(enable_return_routed_experts=False)),  # type: ignore[index]
            ("8", lambda: two.on("/model_info", recording("dense/model_info"))),
        ):
            change()
            await s.update_weights_from_disk(moe, version)
            reasons.append(s.servers[1].removed or "")
        return reasons

    with (
        server("moe", enable_return_routed_experts=True) as one,
        server("moe", enable_return_routed_experts=True) as two,
    ):
        one.on("/generate", echo("dense/gen_logprob"))
        one.on("/update_weights_from_disk", _after_update(one, "7"), _after_update(one, "8"))
        two.on("/generate", lambda _: setattr(two, "dead", True))
        gone, lacks, other = use([one, two], moe, job)
        assert two.sent("/update_weights_from_disk") == []
    assert "/generate" in gone
    assert lacks == "it is back, but returns no routed experts"
    assert "serves a qwen3, the actor is a qwen3_moe" in other


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
