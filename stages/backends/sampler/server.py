"""One SGLang server: its address, its load, and the calls that we make to it.

What may be repeated is repeated here (reads, pause, continue, flush); what may not is left to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import httpx

from stages.backends.sampler.wire import error_text
from stages.errors import SamplerError

log = logging.getLogger(__name__)

REPEATS = 3  # of an idempotent call
PAUSE_S = 0.2  # before the first repeat; doubles
# a machine that vanishes without a word is noticed after a minute, not when an answer is overdue
KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


class ServerGone(SamplerError):
    """No answer: the connection broke, timed out, or the server says that it cannot serve (5xx)."""


class ServerRefused(SamplerError):
    """A 4xx: the request itself is wrong; sending it again changes nothing."""


def open_client(*, verify: bool) -> httpx.AsyncClient:
    """Connections straight to servers: proxies of the environment are passed over. `verify`: whether any speaks https."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)  # theirs: 5 s
    transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=KEEPALIVE)
    return httpx.AsyncClient(transport=transport)


class Server:
    """`in_flight` counts our own requests; `removed` says why it is not used any more (None: it is)."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, timeout_s: float, update_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.in_flight = 0
        self.removed: str | None = None
        self.info: Mapping[str, Any] = {}
        self._client = client
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s

    def __repr__(self) -> str:
        return f"Server({self.url}, in_flight={self.in_flight}, removed={self.removed!r})"

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """One `POST /generate`, sent once. Raises ServerGone or ServerRefused."""
        self.in_flight += 1
        try:
            return await self._json("POST", "/generate", body, timeout_s=self._timeout_s)
        finally:
            self.in_flight -= 1

    async def abort(self, wire_rid: str) -> None:
        """Best effort. The server matches by prefix, so ids must be of one length; an unknown one is ignored."""
        try:
            await self._call("POST", "/abort_request", {"rid": wire_rid}, timeout_s=5.0)
        except SamplerError as e:
            log.warning("%s: abort of %s was not delivered: %s", self.url, wire_rid, e)

    async def model_info(self) -> Mapping[str, Any]:
        return await self._repeated("GET", "/model_info")

    async def server_info(self) -> Mapping[str, Any]:
        return await self._repeated("GET", "/server_info")

    async def refuses_id(self, token: int) -> str:
        """Why the served model has no such token id; empty: it has. The server checks the key of a bias before anything
        reaches the model; the id itself as input would end a server that lacks it."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 0, "logit_bias": {str(token): 0.0}}}
        try:
            await self._repeated("POST", "/generate", body)
        except ServerRefused as refusal:
            return str(refusal)
        return ""

    async def go_on(self) -> None:
        """A client that was killed in mid-update leaves its servers paused, where every request waits without a word."""
        try:
            await self._call("GET", "/ready", timeout_s=15.0)
        except ServerRefused:
            pass  # a server that does not know the question
        except ServerGone:
            await self.resume()

    async def healthy(self) -> bool:
        """`/health` generates one token, which takes about a second."""
        try:
            await self._call("GET", "/health", timeout_s=15.0)
        except SamplerError:
            return False
        return True

    async def running(self) -> int:
        """Requests of anyone that run or wait on this server."""
        loads = (await self._repeated("GET", "/v1/loads?include=core")).get("loads", [])
        return sum(int(x["num_running_reqs"]) + int(x["num_waiting_reqs"]) for x in loads)

    async def pause(self) -> None:
        """Abort what runs and hold what comes; answers when the server is idle."""
        await self._repeated("POST", "/pause_generation", {"mode": "abort"}, timeout_s=self._update_timeout_s)

    async def resume(self) -> None:
        await self._repeated("POST", "/continue_generation", {})

    async def update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        """Sent once, with an explicit version and a flush (else old keys answer for new weights), then checked.

        Raises ServerGone, ServerRefused, or SamplerError when the server reports another version afterwards.
        """
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": True}
        done = await self._json("POST", "/update_weights_from_disk", body, timeout_s=self._update_timeout_s)
        if not done.get("success"):
            raise ServerRefused(f"{self.url}: {done.get('message', done)}")
        seen = (await self.model_info()).get("weight_version")
        if seen != weight_version:
            raise SamplerError(f"{self.url} reports weight version {seen!r} after an update to {weight_version!r}")

    # ------------------------------------------------------------------ transport

    async def _repeated(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """The first answer of up to REPEATS calls, none of which begins after `timeout_s`."""
        end = time.monotonic() + timeout_s
        for attempt in range(REPEATS):
            try:
                return await self._json(method, path, body, timeout_s=timeout_s)
            except ServerGone:
                if attempt + 1 == REPEATS or time.monotonic() >= end:
                    raise
                await asyncio.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        response = await self._call(method, path, body, timeout_s=timeout_s)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SamplerError(f"{self.url}{path} answered no JSON object: {error_text(response.content)}")
        return found

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(5.0, timeout_s), pool=None)
        try:
            response = await self._client.request(method, self.url + path, json=body, timeout=timeout)
        except httpx.TimeoutException as e:
            raise ServerGone(f"{self.url}{path}: no answer within {timeout_s:g} s") from e
        except httpx.HTTPError as e:
            raise ServerGone(f"{self.url}{path}: {type(e).__name__}: {e}") from e
        if response.status_code >= 500:
            raise ServerGone(f"{self.url}{path}: HTTP {response.status_code}: {error_text(response.content)}")
        if response.status_code >= 400:
            raise ServerRefused(f"{self.url}{path}: HTTP {response.status_code}: {error_text(response.content)}")
        return response
