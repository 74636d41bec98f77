"""The live stream over a real connection: signals, ids, replay, pushed log lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from orchestrator import models as m
from orchestrator.persist import persist
from orchestrator.store import Store
from orchestrator.store.logs import NewLine
from stages.domain import Phase
from stages.records import Progress, StepDone
from tests.console_cycle import Seeded, seed_cycle
from tests.console_people import cookie_for
from tests.console_server import serving
from webui.sse import message, signals


@dataclass
class Reader:
    """Collects (id, event, data) of a stream in a thread, until enough have come or 10 s have passed."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[str, str, str]] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)

    def until(self, enough: Callable[[list[tuple[str, str, str]]], bool], act: Callable[[], None]) -> None:
        def read() -> None:
            current: dict[str, str] = {}
            with httpx.stream("GET", self.url, headers=self.headers, timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                for line in answer.iter_lines():
                    if line.startswith(":"):
                        self.open.set()
                    elif not line:
                        if current:
                            self.got.append((current["id"], current.get("event", ""), current.get("data", "")))
                            current = {}
                        if enough(self.got):
                            return
                    else:
                        key, _, value = line.partition(": ")
                        current[key] = current[key] + "\n" + value if key in current else value

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert self.open.wait(10)
        act()
        thread.join(timeout=12)
        assert not thread.is_alive(), f"only {self.got}"


@pytest.fixture(scope="module")
def store(module_store: Store) -> Store:
    return module_store


@pytest.fixture(scope="module")
def running(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    return seed_cycle(store, tmp_path_factory.mktemp("cycle"), until=2, running=True)


@pytest.fixture(scope="module")
def base(store: Store) -> Iterator[str]:
    with serving(store, anonymous_roles="analyst") as address:  # the stream is what is tested, not who reads it
        yield address


def progress(store: Store, seeded: Seeded, done: int) -> None:
    persist(store, seeded.stages[2], Progress(phase=Phase.JOINT, done=done, total=12, text=f"at {done}"))


def test_a_record_becomes_a_signal_with_its_event_id(store: Store, running: Seeded, base: str) -> None:
    after = store.events.last_id()
    reader = Reader(f"{base}/events?cycle={running.cycle.id}&after={after}")
    started = time.monotonic()
    reader.until(lambda got: bool(got), lambda: progress(store, running, 7))
    assert reader.got[0][:2] == (str(store.events.last_id()), "rsi-progress")
    assert time.monotonic() - started < 6


def test_other_cycles_do_not_wake_this_page(store: Store, running: Seeded, base: str, tmp_path: Path) -> None:
    other = seed_cycle(store, tmp_path, name="other", until=2, running=True, offset=3_000_000)
    reader = Reader(f"{base}/events?cycle={running.cycle.id}&after={store.events.last_id()}")

    def act() -> None:
        progress(store, other, 5)
        time.sleep(1.2)
        persist(
            store, running.stages[2], StepDone(phase=Phase.JOINT, step=99, metrics={"critic/vf_explained_var": 0.1})
        )

    reader.until(lambda got: bool(got), act)
    assert [name for _, name, _ in reader.got] == ["rsi-step"]


def test_what_was_missed_is_replayed(store: Store, running: Seeded, base: str) -> None:
    before = store.events.last_id()
    progress(store, running, 8)
    persist(store, running.stages[2], StepDone(phase=Phase.JOINT, step=98, metrics={"critic/vf_explained_var": 0.1}))
    newest = store.events.last_id()
    reader = Reader(f"{base}/events?cycle={running.cycle.id}&after=0", headers={"Last-Event-ID": str(before)})
    reader.until(lambda got: len(got) >= 2, lambda: None)
    assert [(name, int(i) > before) for i, name, _ in reader.got] == [("rsi-progress", True), ("rsi-step", True)]
    assert reader.got[-1][0] == str(newest)


def test_log_lines_are_pushed_as_escaped_content(store: Store, running: Seeded, base: str) -> None:
    shown = store.logs.read(running.cycle.id or 0, limit=1)[-1].id
    url = f"{base}/events?cycle={running.cycle.id}&after={store.events.last_id()}&log_after={shown}"
    reader = Reader(url)
    lines = [NewLine(level=40, text="<i>disk</i> full\x1b[0m"), NewLine(level=20, text="second")]
    reader.until(lambda got: len(got) >= 2, lambda: store.logs.append(running.cycle.id or 0, lines))
    (_, named, _), (_, unnamed, html) = reader.got
    assert (named, unnamed) == ("rsi-log", "")
    assert html.count("<li") == 2
    assert "&lt;i&gt;disk&lt;/i&gt; full^[[0m" in html
    assert "step 59 done" not in html  # what the page shows already is not pushed again

    # Lines between the page and its connection, or between two connections, are neither lost nor repeated.
    store.logs.append(running.cycle.id or 0, [NewLine(level=20, text="while away")])
    again = Reader(url, headers={"Last-Event-ID": reader.got[-1][0]})
    again.until(lambda got: len(got) >= 2, lambda: None)
    assert again.got[-1][2].count("<li") == 1
    assert "while away" in again.got[-1][2]
    fresh = Reader(url)
    fresh.until(lambda got: len(got) >= 2, lambda: None)
    assert fresh.got[-1][2].count("<li") == 3


def test_a_stream_ends_with_the_right_to_read_it(
    store: Store, running: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else somebody who was shut out would go on reading the log until they close the page."""
    monkeypatch.setattr("webui.sse.ASK_AGAIN_S", 0.1)
    cookie = cookie_for(store, "ada")
    with (
        serving(store) as address,
        httpx.stream("GET", f"{address}/events", cookies={cookie["name"]: cookie["value"]}, timeout=10) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == ": open"
        user = store.users.named("ada")
        assert user is not None
        store.sign_ins.end_all(user.id or 0)
        progress(store, running, 9)
        list(lines)  # it ends; else this waits until it times out


def test_a_strange_last_id_is_no_error(base: str) -> None:
    for given in ("\u00b2", "1.\u00b9", "x", "9" * 40):
        headers = {"Last-Event-ID": given.encode("latin-1")}
        with httpx.stream("GET", f"{base}/events?log_after=1&cycle=1", headers=headers, timeout=10) as answer:
            assert answer.status_code == 200


def test_a_burst_becomes_one_signal_each() -> None:
    kinds = [m.EventKind.PROGRESS, m.EventKind.PROGRESS, m.EventKind.STEP_DONE, m.EventKind.PROGRESS]
    rows = [m.Event(id=i, kind=kind.value) for i, kind in enumerate(kinds, start=5)]
    assert signals([*rows, m.Event(id=11, kind="from.the.future")]) == [(7, "rsi-step"), (8, "rsi-progress")]


def test_message_format() -> None:
    assert message(3, "rsi-step", "{}") == "id: 3\nevent: rsi-step\ndata: {}\n\n"
    assert message(4, "", "a\nb") == "id: 4\ndata: a\ndata: b\n\n"
    assert message(4, "", "a", log_id=7) == "id: 4.7\ndata: a\n\n"
