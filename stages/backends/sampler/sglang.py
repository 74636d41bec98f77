"""The sampler on SGLang servers: the same protocol as the embedded one, over HTTP.

Every attempt stays on the server that holds its prefix; a new one goes to the least loaded. A server that dies is removed
and its requests are sent again elsewhere: sampling has no side effect, so nothing is counted twice. Weights change on all
servers or the server that failed is removed, and no answer of another weight version is accepted.

Talk to servers, not to a gateway: gateways re-serialise requests and drop what they do not know. Seeds are honoured only
by servers started with --enable-deterministic-inference (`seeds_honoured`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from stages.backends.protocols import GenerateAnswer, GenerateRequest
from stages.backends.sampler.folder import read_config
from stages.backends.sampler.server import Server, ServerGone, ServerRefused, open_client
from stages.backends.sampler.wire import (
    GREEDY_BELOW,
    ModelShape,
    check_requests,
    is_truncated,
    parse_answer,
    request_body,
)
from stages.errors import ModelError, SamplerError

log = logging.getLogger(__name__)

MOST_DEATHS = 2  # a request that saw so many servers die is not sent to a third

Truncated = Literal["mask", "refuse", "plain"]


def _room(server: Server) -> int:
    """Tokens of the longest request. A server keeps some of its context for itself and cuts a longer one without a word."""
    limits = ("context_length", "max_total_num_tokens", "max_req_input_len")
    return min((int(n) for limit in limits if (n := server.info.get(limit))), default=2**31)


class SGLangSampler:
    """The `Sampler` protocol on one or more SGLang servers that hold the same weights.

    `model_path`: the folder whose architecture the servers must have (config only). `truncated` says what a request with
    top_p < 1 or top_k gets: "mask" log-probs over its sampling support beside the full ones, "refuse" an error (training),
    "plain" the full ones only, which are biased as behaviour log-probs (evaluation). `remote_path` maps a checkpoint folder
    to the name under which the servers see it, and may copy it there. `need_routes`: a mixture of experts is refused on
    servers that do not return its routes. `owner`: a word that only this client puts behind the versions which it gives to
    the servers, so that two clients which update the same servers cannot take each other's answers for their own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_path: Path,
        context_len: int | None = None,
        truncated: Truncated = "mask",
        timeout_s: float = 1800.0,
        update_timeout_s: float = 1800.0,
        remote_path: Callable[[Path], str] = str,
        need_routes: bool = False,
        owner: str = "",
    ) -> None:
        if not urls:
            raise SamplerError("no SGLang server was given; pass at least one address such as http://host:30000")
        config = read_config(model_path)
        self.context_len = int(context_len or config.max_position_embeddings)
        self._shape = ModelShape.of(config, self.context_len)
        self.vocab_size = self._shape.vocab_size
        self.weight_version = ""  # unknown until the servers were asked
        self.is_moe = False
        self.seeds_honoured = False
        self.resent = 0  # requests that were sent again after a server died or paused
        self._truncated = truncated
        self._remote_path, self._need_routes = remote_path, need_routes
        self._owner = f"@{owner}" if owner else ""
        self._served = ""  # the version as servers and answers name it
        self._found: tuple[str, ...] = ()  # the versions that the servers had at the start, until our first update
        self._client = open_client(
            verify=any(url.startswith("https") for url in urls)
        )  # certificates take 0.1 s to load
        self.servers = [
            Server(url, self._client, timeout_s=timeout_s, update_timeout_s=update_timeout_s) for url in urls
        ]
        self._home: dict[str, Server] = {}
        self._mask_top_k = 4096
        self._started = False
        self._starting = asyncio.Lock()
        self._open = asyncio.Event()  # clear while weights change
        self._open.set()
        self._epoch = 0

    # ------------------------------------------------------------------ protocol

    async def start(self) -> None:
        """Ask every server what it is; the other calls do it by themselves. Raises SamplerError when none can be used."""
        async with self._starting:
            if self._started:
                return
            await asyncio.gather(*(self._greet(s) for s in self.servers))
            alive = self._alive()
            self._found = tuple(sorted({str(s.info.get("weight_version")) for s in alive}))
            self.weight_version = self._served = self._found[0] if len(self._found) == 1 else ""
            self.is_moe = bool(self._shape.experts) and all(s.info.get("enable_return_routed_experts") for s in alive)
            if self._shape.experts and self._need_routes and not self.is_moe:
                raise SamplerError(
                    "this mixture of experts is trained with the sampler's routes (spec §6.2): start every server with"
                    " --enable-return-routed-experts, or set learner.use_rollout_routing_replay = false"
                )
            self.seeds_honoured = all(bool(s.info.get("enable_deterministic_inference")) for s in alive)
            self._mask_top_k = min(int(s.info.get("sampling_mask_max_tokens") or 4096) for s in alive)
            self.context_len = min(self.context_len, *map(_room, alive))
            self._started = True

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateAnswer]:
        """Answers in request order. Raises SamplerError when one cannot be had; the others are then aborted."""
        await self.start()
        if len(self._found) > 1:
            raise SamplerError(f"the servers hold different weights {', '.join(self._found)}: update them first")
        self._check(requests)
        jobs = [asyncio.create_task(self._one(r)) for r in requests]
        try:
            return list(await asyncio.gather(*jobs))
        except BaseException:
            for job in jobs:
                if not job.cancelling():  # a second cancel would cut the first one's abort short
                    job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise

    async def release(self, rids: Sequence[str]) -> None:
        """Forget where attempts live; servers evict their caches by themselves."""
        for rid in rids:
            self._home.pop(rid, None)

    async def update_weights_from_disk(self, model_path: Path, weight_version: str) -> None:
        """Pause (what runs is aborted and sent again later), update with a flush, check the version, continue.

        A server that fails is removed; one that was removed and is back is taken in again. Raises ModelError before any
        change for a folder of another architecture, or when every server refuses; SamplerError when none is left.
        """
        await self.start()
        self._check_folder(model_path)
        where = await asyncio.to_thread(self._remote_path, model_path)
        self._open.clear()
        try:
            self._epoch += 1
            targets = await self._targets()
            results = await asyncio.gather(
                *(self._update_one(s, where, weight_version + self._owner) for s in targets), return_exceptions=True
            )
            failed = {s: r for s, r in zip(targets, results, strict=True) if isinstance(r, BaseException)}
            for error in failed.values():
                if not isinstance(error, SamplerError):
                    raise error
            if len(failed) == len(targets) and all(isinstance(e, ServerRefused) for e in failed.values()):
                raise ModelError(
                    f"no server could load {where}; the old weights still serve: {next(iter(failed.values()))}"
                )
            for server, error in failed.items():
                self._remove(server, f"update to {weight_version}: {error}")
            self._alive()
            self.weight_version, self._served = weight_version, weight_version + self._owner
            self._found = ()
        finally:
            self._open.set()

    async def aclose(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------------ beyond the protocol

    async def running(self) -> int:
        """Requests that run or wait on all servers, ours and others' (`/v1/loads`)."""
        return sum(await asyncio.gather(*(s.running() for s in self._alive())))

    async def drained(self, timeout_s: float = 60.0) -> bool:
        """True once the servers are idle: an abort is accepted at once and takes effect later."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while await self.running():
            if loop.time() > end:
                return False
            await asyncio.sleep(0.2)
        return True

    # ------------------------------------------------------------------ one request

    async def _one(self, request: GenerateRequest) -> GenerateAnswer:
        deaths = 0
        while True:
            await self._open.wait()
            epoch, expected, version = self._epoch, self._served, self.weight_version
            server = self._choose(request.rid)
            masked = self._truncated == "mask" and is_truncated(request)
            wire_rid = uuid.uuid4().hex  # fixed length: the server aborts by prefix
            top_k = min(self._mask_top_k, self.vocab_size) if masked else None
            try:
                body = await server.generate(request_body(request, wire_rid, mask_top_k=top_k))
            except ServerGone as error:
                await self._lost(server, wire_rid, error)
                deaths += 1
                self.resent += 1
                if deaths >= MOST_DEATHS:
                    raise SamplerError(
                        f"request {request.rid}: {deaths} servers failed while it ran, the last with: {error}; it is not"
                        " sent to another"
                    ) from error
                continue
            except asyncio.CancelledError:
                await server.abort(wire_rid)
                raise
            answer = parse_answer(body, request, wire_rid, self._shape, masked=masked)
            if epoch != self._epoch and (answer.finish_reason == "abort" or answer.weight_version != expected):
                self.resent += 1  # our own pause cut it or held it back: sample it anew from the new weights
                continue
            if answer.weight_version != expected:
                raise SamplerError(
                    f"answer to {request.rid} was sampled by weight version {answer.weight_version!r}, expected"
                    f" {expected!r}; another process updates {server.url}"
                )
            return replace(answer, weight_version=version)

    def _choose(self, rid: str) -> Server:
        home = self._home.get(rid)
        if home is None or home.removed is not None:
            home = min(self._alive(), key=lambda s: s.in_flight)
            self._home[rid] = home
        return home

    async def _lost(self, server: Server, wire_rid: str, error: ServerGone) -> None:
        """After a failed call: a server that is still healthy only loses this request, another is removed."""
        await self._open.wait()  # while it is paused it cannot say that it is healthy
        if server.removed is not None:
            return
        if await server.healthy():
            await server.abort(wire_rid)
        else:
            self._remove(server, str(error))

    def _remove(self, server: Server, why: str) -> None:
        log.error("SGLang server %s is removed: %s", server.url, why)
        server.removed = why

    def _alive(self) -> list[Server]:
        alive = [s for s in self.servers if s.removed is None]
        if not alive:
            reasons = "; ".join(f"{s.url}: {s.removed}" for s in self.servers)
            raise SamplerError(f"no SGLang server is left; start one and try again ({reasons})")
        return alive

    # ------------------------------------------------------------------ checks and updates

    async def _greet(self, server: Server) -> None:
        """Learn what it is; one that cannot be asked is removed. Raises SamplerError when it serves something else."""
        server.removed = None
        try:
            server.info = {**await server.server_info(), **await server.model_info()}
            await server.go_on()
            last, more = await server.refuses_id(self.vocab_size - 1), await server.refuses_id(self.vocab_size)
        except SamplerError as e:
            self._remove(server, str(e))
            return
        found = server.info.get("model_type")
        if found != self._shape.model_type:
            raise SamplerError(
                f"{server.url} serves a {found}, the actor is a {self._shape.model_type}; start it with the actor"
            )
        if last:
            raise SamplerError(
                f"{server.url} serves a model with fewer than the actor's {self.vocab_size} token ids, one of them is wrong:"
                f" {last}"
            )
        if not more:
            raise SamplerError(
                f"{server.url} serves a model with more than the actor's {self.vocab_size} token ids; one of them is wrong"
            )

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        check_requests(requests, self.vocab_size, self.context_len)
        for r in requests:
            if self._truncated == "refuse" and (is_truncated(r) or r.sampling_params.temperature < GREEDY_BELOW):
                raise SamplerError(
                    f"request {r.rid}: temperature {r.sampling_params.temperature}, top_p {r.sampling_params.top_p}, top_k"
                    f" {r.sampling_params.top_k}: its log-probs would be biased as behaviour log-probs; train with top_p 1, or"
                    ' open the sampler with truncated="mask"'
                )
            if r.return_routed_experts and self._shape.experts and not self.is_moe:
                raise SamplerError(
                    f"request {r.rid} wants routed experts; start every server with --enable-return-routed-experts"
                )

    def _check_folder(self, model_path: Path) -> None:
        """SGLang loads weights of another size without a word and samples noise; so compare first."""
        found = ModelShape.of(read_config(model_path), self._shape.context_len)
        if found != self._shape:
            raise ModelError(
                f"{model_path} has another architecture than the servers: {found} instead of {self._shape}"
            )

    async def _targets(self) -> list[Server]:
        """Servers to update: those in use, and those that were removed, answer again and can do as much as the others."""
        for server in [s for s in self.servers if s.removed is not None]:
            try:
                await self._greet(server)
            except SamplerError as error:
                self._remove(server, str(error))
                continue
            if server.removed is None and (lacks := self._lacks(server)):
                self._remove(server, f"it is back, but {lacks}")
        return self._alive()

    def _lacks(self, server: Server) -> str:
        """What the first servers could do and this one cannot; empty: nothing."""
        info = server.info
        if self.is_moe and not info.get("enable_return_routed_experts"):
            return "returns no routed experts"
        if self.seeds_honoured and not info.get("enable_deterministic_inference"):
            return "does not honour seeds"
        if int(info.get("sampling_mask_max_tokens") or 4096) < self._mask_top_k:
            return f"gives sampling masks of fewer than {self._mask_top_k} tokens"
        return f"has room for {_room(server)} tokens only" if _room(server) < self.context_len else ""

    async def _update_one(self, server: Server, where: str, weight_version: str) -> None:
        try:
            await server.pause()
            await server.update_weights_from_disk(where, weight_version)
        finally:
            await server.resume()
