"""A flow's sign of life: a thread, because one record (an update on many GPUs) may take hours."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.store import Store
from stages.errors import StoreError

EVERY_S = 10.0  # `reconcile.HEARTBEAT_S` is twelve of these

log = logging.getLogger("rsi.heartbeat")


@contextmanager
def beating(store: Store, cycle_id: int, flow_run_id: str | None = None, *, every_s: float = EVERY_S) -> Iterator[None]:
    """Beat now and every `every_s` seconds until the block ends. A database that is away for a moment is no reason to stop."""
    over = threading.Event()
    store.cycles.beat(cycle_id, flow_run_id)

    def beat() -> None:
        while not over.wait(every_s):
            try:
                store.cycles.beat(cycle_id)
            except StoreError as error:
                log.warning("cycle %d: no heartbeat written: %s", cycle_id, error)

    thread = threading.Thread(target=beat, name=f"heartbeat-{cycle_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)
