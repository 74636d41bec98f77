"""Event ids become visible in order, arrive with their rows, and wake listeners."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from orchestrator import models as m
from orchestrator.store import Store
from orchestrator.store.events import CHANNEL
from tests import factories


def test_a_reader_that_follows_ids_misses_nothing(store: Store) -> None:
    """Writers with transactions of different length; a reader that only asks for ids above its last one."""
    writers, each = 4, 15
    done = threading.Event()
    seen: list[int] = []

    def write(number: int) -> None:
        for n in range(each):
            with store.transaction():
                store.events.append(m.EventKind.ALARM, payload={"n": n})
                store.audit_trail.add("x", "y")
                time.sleep(0.001 * ((number * 7 + n) % 5))  # the event was announced long before the end

    def read() -> None:
        last = 0
        while True:
            ended = done.is_set()
            for event in store.events.after(last):
                last = event.id or 0
                seen.append(last)
            if ended:
                return

    reader = threading.Thread(target=read)
    reader.start()
    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert len(seen) == writers * each
    assert seen == sorted(seen)


def test_no_event_without_its_rows(store: Store) -> None:
    def broken() -> None:
        with store.transaction():
            factories.cycle(store)
            store.events.append(m.EventKind.ALARM)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert store.events.last_id() == 0
    assert store.cycles.list().items == []
    factories.cycle(store)
    assert [e.kind for e in store.events.after(0)] == [m.EventKind.CYCLE_CREATED]


def test_one_cycle_and_all(store: Store) -> None:
    a, b = factories.cycle(store).id, factories.cycle(store).id
    for cycle_id in (a, b, a):
        store.events.append(m.EventKind.ALARM, cycle_id=cycle_id)
    assert [e.cycle_id for e in store.events.after(2)] == [a, b, a]
    assert len(store.events.after(0, cycle_id=a)) == 3
    assert [e.id for e in store.events.latest(cycle_id=b, limit=1)] == [4]
    assert [e.id for e in store.events.after(3, limit=1)] == [4]


def test_a_listener_is_woken(store: Store, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute(f"LISTEN {CHANNEL}")
        with store.transaction():
            store.events.append(m.EventKind.ALARM)
            store.events.append(m.EventKind.ALARM)
        (note,) = listener.notifies(timeout=10, stop_after=1)
        assert note.payload == str(store.events.last_id()) == "2"
