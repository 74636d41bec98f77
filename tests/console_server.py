"""The console on a free port, in a thread of the test process, for tests that need real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from orchestrator.store import Store
from tests.console_people import app_for


@contextmanager
def serving(store: Store, **settings: object) -> Iterator[str]:
    """Yields the base address; stops the server afterwards. `settings`: what differs from the defaults."""
    config = uvicorn.Config(
        app_for(store, **settings), host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        if time.monotonic() > deadline or not thread.is_alive():
            raise RuntimeError("the console did not start within 20 s")
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
