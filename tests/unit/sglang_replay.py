"""A loopback HTTP server that answers with recordings of a real SGLang server, or misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.23"

Recording = dict[str, Any]
Answer = Recording | Callable[[Any], Recording | None]  # None: close the connection without an answer


def recording(name: str) -> Recording:
    """One recording by name, such as `dense/gen_logprob`."""
    return json.loads((FIXTURES / (name.replace("/", "-") + ".json")).read_text())


class Replay:
    """`answers[path]` are given one after the other; the last one repeats. `requests` is what came in.

    The client's question whether a token id exists is answered from `vocabulary` and is not among the requests.
    """

    def __init__(self) -> None:
        self.vocabulary = 320
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, list[Answer]] = defaultdict(list)
        self.dead = False
        self._lock = threading.Lock()
        replay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet: two would wait for each other's acknowledgement, 40 ms

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                answer = None if replay.dead else replay._answer(self.path.partition("?")[0], body)
                if answer is None or replay.dead:
                    self.close_connection = True
                    return
                found = answer.get("body")
                text = found["__text__"] if isinstance(found, dict) and "__text__" in found else json.dumps(found)
                self.send_response(answer["status"])
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:  # a client that hangs up is part of the tests
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def on(self, path: str, *answers: Answer) -> Replay:
        self.answers[path] = list(answers)
        return self

    def sent(self, path: str) -> list[Any]:
        return [body for p, body in self.requests if p == path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str, body: Any) -> Recording | None:
        if path == "/generate" and (bias := body["sampling_params"].get("logit_bias")):
            inside = all(int(token) < self.vocabulary for token in bias)
            return recording("dense/bias_last_id" if inside else "dense/bias_outside_vocabulary")
        with self._lock:
            self.requests.append((path, body))
            queue = self.answers.get(path)
            if not queue:
                return {"status": 404, "body": {"detail": "Not Found"}}
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
        return answer(body) if callable(answer) else answer


@contextmanager
def server(kind: str = "dense", version: str = "default", **info: Any) -> Iterator[Replay]:
    """A replay server whose start-up answers and pause protocol are already set."""
    replay = Replay()
    model, details = recording(f"{kind}/model_info"), recording("dense/server_info")
    model["body"]["weight_version"] = details["body"]["weight_version"] = version
    details["body"] |= info
    replay.on("/model_info", model).on("/server_info", details).on("/health", recording("dense/health"))
    replay.on("/abort_request", recording("dense2/abort_request"))
    replay.on("/pause_generation", recording("dense2/pause_abort"))
    replay.on("/continue_generation", recording("dense2/continue_abort"))
    replay.on("/v1/loads", {"status": 200, "body": recording("v1_loads_core")})
    try:
        yield replay
    finally:
        replay.close()


def echo(name: str, *, version: str | None = None, delay_s: float = 0.0) -> Callable[[Any], Recording]:
    """A recorded answer under the id that was sent, as a real server gives it back."""

    def answer(body: Any) -> Recording:
        time.sleep(delay_s)
        found = recording(name)
        meta = found["body"]["meta_info"]
        meta["id"] = body["rid"]
        if version is not None:
            meta["weight_version"] = version
            for span in meta.get("weight_versions", []):
                span["version"] = version
        return found

    return answer


def held(name: str, release: threading.Event, *, version: str | None = None) -> Callable[[Any], Recording]:
    """A recorded answer that comes only when `release` is set."""

    def answer(body: Any) -> Recording:
        release.wait(30)
        return echo(name, version=version)(body)

    return answer


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition instead of for a time that a busy machine may exceed."""
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def altered(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Recording]:
    """A recorded answer that a test breaks in one place; `change` gets the answer's body."""

    def answer(body: Any) -> Recording:
        found = echo(name)(body)
        change(found["body"])
        return found

    return answer
