"""A checkpoint behind HTTP, so that any harness can use it: SGLang's `/generate` and OpenAI's `/v1/chat/completions`.

Requests that arrive while a wave is decoded form the next wave. A conversation finds its own cache again: the idle cache
with the longest common prefix is reused.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.backends.sampler import serve as wire
from stages.backends.sampler.wire import to_sglang
from stages.chat import Chat
from stages.errors import RsiError, SamplerError

if TYPE_CHECKING:
    from stages.backends.sampler.embedded import EmbeddedSampler

MOST_ROWS = 64  # of a wave
IDLE_CACHES = 64
LEAST_PREFIX = 8  # tokens for which an idle cache is worth taking over


@dataclass(eq=False)
class _Waiting:
    request: GenerateRequest
    answer: asyncio.Future[GenerateAnswer]
    since: float = field(default_factory=time.monotonic)


class Waves:
    """Collects concurrent requests into waves of one sampler."""

    def __init__(self, sampler: EmbeddedSampler) -> None:
        self._sampler = sampler
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._idle: dict[str, np.ndarray] = {}  # rid -> ids that its cache was made from, oldest first
        self._job: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._job = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait().answer.set_exception(SamplerError("the server stops"))
        await self._sampler.aclose()

    async def ask(self, request: GenerateRequest) -> tuple[GenerateAnswer, float]:
        """One answer under the request's own rid, and the seconds it took. Raises SamplerError."""
        self._sampler.check([request])  # here, so that one bad request does not fail a whole wave
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        await self._queue.put(waiting)
        answer = await waiting.answer
        return replace(answer, rid=request.rid), time.monotonic() - waiting.since

    async def _run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(0)  # let the others of one burst in
            while len(batch) < MOST_ROWS and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [w for w in batch if not w.answer.done()]  # some clients hung up
            if batch:
                await self._wave(batch)

    async def _wave(self, batch: Sequence[_Waiting]) -> None:
        taken: dict[str, _Waiting] = {}
        for waiting in batch:
            taken[self._take_cache(waiting.request.input_ids)] = waiting
        requests = [replace(w.request, rid=rid) for rid, w in taken.items()]
        try:
            answers = await self._sampler.generate(requests)
        except Exception as error:  # whatever it is, every client of this wave must hear of it
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for (rid, waiting), answer in zip(taken.items(), answers, strict=True):
            self._idle[rid] = np.array([*waiting.request.input_ids, *answer.output_ids])
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
        surplus = list(self._idle)[: max(0, len(self._idle) - IDLE_CACHES)]
        for rid in surplus:
            del self._idle[rid]
        await self._sampler.release(surplus)

    def _take_cache(self, ids: Sequence[int]) -> str:
        prompt = np.asarray(ids)
        best, length = None, LEAST_PREFIX - 1
        for rid, cached in self._idle.items():
            n = min(len(cached), len(prompt))
            different = np.flatnonzero(cached[:n] != prompt[:n])
            common = int(different[0]) if len(different) else n
            if common > length and 2 * common >= len(cached):  # do not cut another conversation's cache short
                best, length = rid, common
        if best is None:
            return secrets.token_hex(16)
        del self._idle[best]
        return best


def create_app(sampler: EmbeddedSampler, chat: Chat, *, name: str) -> FastAPI:
    """The application; it owns `sampler` and closes it at the end."""
    waves = Waves(sampler)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        waves.start()
        yield
        await waves.stop()

    app = FastAPI(title="Terminal-RSI model server", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(SamplerError)
    async def refused(request: Request, error: SamplerError) -> JSONResponse:
        message: dict[str, Any] = {"message": str(error)}
        if request.url.path.startswith("/v1/"):
            message |= {"type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": message}, status_code=400)

    @app.exception_handler(json.JSONDecodeError)
    @app.exception_handler(UnicodeDecodeError)
    async def not_json(request: Request, error: ValueError) -> JSONResponse:
        return await refused(request, SamplerError(f"the body is not JSON: {error}"))

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        """Generates one token, so that 200 means that the model answers."""
        probe = SamplingParams(max_new_tokens=1)
        await waves.ask(GenerateRequest(rid=secrets.token_hex(16), input_ids=[0], sampling_params=probe))
        return Response()

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": name,
            "is_generation": True,
            "weight_version": sampler.weight_version,
            "model_type": sampler.model_type,
            "architectures": sampler.architectures,
        }

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "status": "ready",
            "context_length": sampler.context_len,
            "weight_version": sampler.weight_version,
            "enable_deterministic_inference": True,
            "enable_return_routed_experts": sampler.is_moe,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "terminal-rsi"}]}

    @app.post("/generate")
    @app.put("/generate")
    async def generate(request: Request) -> Response:
        call = wire.parse_generate(
            await request.json(),
            encode=chat.encode,
            stop_token_ids=chat.stop_token_ids,
            vocab_size=sampler.vocab_size,
        )
        found = await _all(waves.ask(r) for r in call.requests)
        bodies = [_generate_body(chat, call, answer, took) for answer, took in found]
        if call.stream:
            return _events([{**b, "index": i} for i, b in enumerate(bodies)] if call.batched else bodies)
        return JSONResponse(bodies if call.batched else bodies[0])

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        call = wire.parse_chat(await request.json())
        choices = await _choices(waves, sampler, chat, call)
        head = (f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), name)
        if call.stream:
            return _events(wire.chat_chunks(*head, choices, call))
        return JSONResponse(wire.chat_body(*head, choices))

    return app


async def _choices(waves: Waves, sampler: EmbeddedSampler, chat: Chat, call: wire.ChatCall) -> list[wire.Choice]:
    messages = [m if m["role"] == "assistant" else {**m, "content": chat.clean(m["content"])} for m in call.messages]
    try:
        ids = chat.encode(chat.render(messages))
    except Exception as error:  # a template may raise anything for roles that it does not know
        raise SamplerError(f"the chat template of this model refuses these messages: {error}") from error
    room = sampler.context_len - len(ids)
    if room < 1:
        raise SamplerError(f"the messages have {len(ids)} tokens, the context {sampler.context_len}; send fewer")
    requests = [
        GenerateRequest(
            rid=secrets.token_hex(16), input_ids=ids, sampling_params=call.params(seed, chat.stop_token_ids, room)
        )
        for seed in call.seeds
    ]
    found = await _all(waves.ask(r) for r in requests)
    return [wire.choice(answer, chat.decode, call, chat.stop_token_ids) for answer, _ in found]


async def _all(calls: Iterable[Any]) -> list[tuple[GenerateAnswer, float]]:
    return list(await asyncio.gather(*calls))


def _generate_body(chat: Chat, call: wire.GenerateCall, answer: GenerateAnswer, took_s: float) -> dict[str, Any]:
    ids = answer.output_ids
    text = chat.decode(chat.strip_stop(ids) if call.trim_stop and answer.finish_reason == "stop" else ids)
    return to_sglang(answer, text=text, e2e_latency_s=took_s, return_logprob=call.return_logprob)


def _events(bodies: Sequence[dict[str, Any]]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        for body in bodies:
            yield f"data: {json.dumps(body)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def serve(folder: Path, *, host: str, port: int, name: str | None = None, num_threads: int | None = None) -> None:
    """Serve a Hugging Face folder, or the `actor/` of a checkpoint folder, until a signal stops it.

    Raises ModelError for a folder that cannot be served.
    """
    import uvicorn

    from stages.backends.sampler.embedded import EmbeddedSampler

    model = folder / "actor" if (folder / "actor").is_dir() else folder
    chat = Chat(model)
    sampler = EmbeddedSampler(model, weight_version=name or folder.name, num_threads=num_threads)
    if chat.vocab_size > sampler.vocab_size:
        raise RsiError(
            f"{model}: the tokenizer has {chat.vocab_size} ids, the model {sampler.vocab_size}; they do not match"
        )
    uvicorn.run(create_app(sampler, chat, name=name or folder.name), host=host, port=port, log_level="info")
