"""A client for one OpenAI-compatible `/v1/chat/completions` endpoint.

The key comes from OPENAI_API_KEY and goes nowhere but into the request's header: what an endpoint says is searched for it
before anybody else reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from stages.chat import Message
from stages.errors import ConfigError, SamplerError

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
TRIES = 4
LONGEST_WAIT_S = 60.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_PATH = "/chat/completions"


class ContextFull(SamplerError):
    """The endpoint says that the conversation no longer fits its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str
    cut: bool  # the token limit ended it: what it would have been is unknown
    tokens: int | None = None  # of prompt and reply together; None: the endpoint does not say


class ChatEndpoint:
    """Use as an asynchronous context manager. `model` None: the only one that the endpoint lists."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        temperature: float | None,
        key: str | None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises ConfigError for a URL or key that cannot be used; the message never holds the key."""
        self._url = _endpoint(url)
        self.where = address(url)  # for messages and logs
        self._key = (key or "").strip()
        if not self._key.isascii() or not (self._key.isprintable() and " " not in self._key):
            raise ConfigError(f"{KEY_VARIABLE} holds characters that no HTTP header can carry; set it again")
        self._temperature, self._sleep = temperature, sleep
        self.model = model
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(timeout=TIMEOUT, headers=headers, transport=transport)

    async def __aenter__(self) -> ChatEndpoint:
        try:
            if self.model is None:
                self.model = await self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """The next assistant message. Raises ContextFull, or SamplerError when there is no usable answer."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        answer = await self._ask("POST", self._url, body)
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise SamplerError(f"{self.where}: the answer has no choices[0].message.content") from error
        if not isinstance(text, str):
            raise SamplerError(f"{self.where}: the answer's content is no text (finish_reason {reason!r})")
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair can be neither run nor logged
        usage = answer.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
        return Reply(text=text, cut=reason == "length", tokens=tokens if isinstance(tokens, int) else None)

    async def _only_model(self) -> str:
        listing = self._url.copy_with(path=self._url.path.removesuffix(_PATH) + "/models")
        answer = await self._ask("GET", listing, None)
        found = answer.get("data")
        names = [str(m["id"]) for m in found if isinstance(m, Mapping) and "id" in m] if isinstance(found, list) else []
        if len(names) != 1:
            some = ", ".join(names[:5]) or "none"
            raise ConfigError(f"{self.where} lists {len(names)} models ({some}); name one with --model")
        return names[0]

    async def _ask(self, method: str, url: httpx.URL, body: Mapping[str, Any] | None) -> dict[str, Any]:
        problem, wait_s = "", 0.0
        for attempt in range(TRIES):
            await self._sleep(wait_s)
            wait_s = 2.0**attempt
            try:
                response = await self._client.request(method, url, json=body)
            except httpx.ConnectError as error:  # nobody is there: trying again soon does not help
                raise SamplerError(f"{self.where} cannot be reached: {self._clean(str(error))}") from error
            except httpx.HTTPError as error:
                problem = self._clean(str(error)) or type(error).__name__
                continue
            if response.status_code in _AGAIN:
                problem = f"HTTP {response.status_code}: {self._said(response)}"
                wait_s = _retry_after(response) or wait_s
                continue
            return self._body(response)
        raise SamplerError(f"{self.where}: no answer after {TRIES} tries: {problem}")

    def _body(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != httpx.codes.OK:
            said = self._said(response)
            if "context_length_exceeded" in response.text:
                raise ContextFull(f"{self.where}: {said}")
            hint = f"; check {KEY_VARIABLE}" if response.status_code in (401, 403) else ""
            raise SamplerError(f"{self.where}: HTTP {response.status_code}: {said}{hint}")
        try:
            body = response.json()
        except ValueError as error:
            raise SamplerError(f"{self.where}: the answer is not JSON: {self._clean(response.text[:200])!r}") from error
        if not isinstance(body, dict):
            raise SamplerError(f"{self.where}: the answer is no JSON object")
        cleaned: dict[str, Any] = self._clean_tree(body)
        return cleaned

    def _said(self, response: httpx.Response) -> str:
        try:
            text = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = response.text
        return self._clean(" ".join(text.split())[:300])

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _clean_tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean(value)
        if isinstance(value, list):
            return [self._clean_tree(v) for v in value]
        return {k: self._clean_tree(v) for k, v in value.items()} if isinstance(value, dict) else value


def _endpoint(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the agent's URL cannot be used: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("the agent's URL must be http(s)://host/…, e.g. http://127.0.0.1:8300/v1")
    if url.userinfo:
        raise ConfigError(f"the agent's URL holds a name or password: put the key into {KEY_VARIABLE} instead")
    path = url.path.rstrip("/")
    if path.endswith(_PATH):
        return url.copy_with(path=path)
    return url.copy_with(path=path + _PATH if path.endswith("/v1") else f"{path}/v1{_PATH}")


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def address(text: str) -> str:
    """An agent's URL without its query, fit for messages and logs. Raises ConfigError."""
    return str(_endpoint(text).copy_with(query=None))
