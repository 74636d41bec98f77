"""People are told with the event itself, and a webhook gets every notice: on a real Postgres and a real HTTP server."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import models as m
from orchestrator import transitions
from orchestrator.cli import app
from orchestrator.models.columns import now
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.webhooks import PAUSES_S, deliver
from stages.domain import Runbook, RunbookLine
from stages.errors import ConfigError, ServiceError
from tests import factories


@pytest.fixture
def people(store: Store) -> dict[str, int]:
    """Two leads, two reviewers, an analyst, and a reviewer who has left."""
    roles = {"ada": m.Role.LEAD, "bob": m.Role.LEAD, "rev": m.Role.REVIEWER, "roy": m.Role.REVIEWER}
    roles |= {"ann": m.Role.ANALYST, "left": m.Role.REVIEWER}
    found = {login: store.users.add(login, [role]).id or 0 for login, role in roles.items()}
    store.users.set_disabled(found["left"], True)
    return found


def cycle_of(store: Store, login: str) -> int:
    row = m.Cycle(
        name="demo", recipe="smoke", config={}, config_digest="0", seed=0, base_checkpoint="", created_by=login
    )
    cycle_id = store.cycles.create(row).id
    assert cycle_id is not None
    store.cycles.set_state(cycle_id, m.CycleState.RUNNING)
    return cycle_id


def told(store: Store, people: dict[str, int]) -> dict[str, list[str]]:
    return {login: [e.notice.kind for e in store.notices.inbox(i).items] for login, i in people.items()}


def test_an_open_gate_is_told_to_reviewers(store: Store, people: dict[str, int]) -> None:
    cycle_id = cycle_of(store, "ada")
    (stage, *_) = factories.stages(store, cycle_id)
    lines = (RunbookLine(text="ls", cites=(0,)),)
    for name in ("aa", "bb"):
        book = Runbook(id=name, task_id="t", source_trajectory_id="0" * 24, planner="Base", lines=lines, raw_text="ls")
        with store.transaction():
            store.runbooks.write(book, cycle_id=cycle_id, stage_id=stage.id)
            store.runbooks.set_state(name, 1, m.RunbookState.WAITING)
    transitions.enter(store, cycle_id, m.CycleState.SUSPENDED)
    assert told(store, people) == {
        "ada": [], "bob": [], "rev": ["gate.opened"], "roy": ["gate.opened"], "ann": [], "left": []
    }  # fmt: skip
    (entry,) = store.notices.inbox(people["rev"]).items
    assert entry.notice.text == f"2 runbooks wait for a verdict; demo (cycle {cycle_id}) goes on when the quota is met"
    assert entry.notice.cycle_id == cycle_id


def test_ends_and_alarms_are_told_to_the_lead_who_launched(store: Store, people: dict[str, int]) -> None:
    done, broken = cycle_of(store, "ada"), cycle_of(store, "ada")
    (stage, *_) = factories.stages(store, broken)
    for step in (3, 4):  # the first alarm of a stage is told, its page lists all
        payload = {"stage": "RPR-1", "phase": "joint", "step": step, "text": "train/ratio_p99 is 4, over 3"}
        store.events.append(m.EventKind.ALARM, cycle_id=broken, stage_id=stage.id, payload=payload)
    transitions.enter(store, done, m.CycleState.DONE)
    transitions.enter(store, broken, m.CycleState.FAILED, error="the disk is full")
    assert told(store, people) == {
        "ada": ["cycle.failed", "cycle.done", "alarm"], "bob": [], "rev": [], "roy": [], "ann": [], "left": []
    }  # fmt: skip
    texts = [e.notice.text for e in store.notices.inbox(people["ada"]).items]
    assert texts[0] == f"demo (cycle {broken}) was stopped: the disk is full"
    assert texts[2].endswith("RPR-1 joint step 3: train/ratio_p99 is 4, over 3")
    # Nobody launched this one, or somebody who left: every lead must know.
    for login in ("cli", "left"):
        transitions.enter(store, cycle_of(store, login), m.CycleState.DONE)
    assert [len(v) for v in told(store, people).values()] == [5, 2, 0, 0, 0, 0]


def test_a_notice_lives_and_dies_with_its_event(store: Store, people: dict[str, int]) -> None:
    cycle_id = cycle_of(store, "ada")

    def interrupted() -> None:
        with store.transaction():
            transitions.enter(store, cycle_id, m.CycleState.DONE)
            raise RuntimeError("the process was killed before the commit")

    with pytest.raises(RuntimeError):
        interrupted()
    assert store.notices.unread(people["ada"]) == 0
    transitions.enter(store, cycle_id, m.CycleState.DONE)
    event = store.events.latest(cycle_id=cycle_id, limit=1)[0]
    (entry,) = store.notices.inbox(people["ada"]).items
    assert (event.kind, entry.notice.event_id) == ("cycle.state", event.id)


def test_reading_marks_ones_own_inbox_only(store: Store, people: dict[str, int]) -> None:
    for _ in range(3):
        transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    first = store.notices.inbox(people["ada"], limit=2)
    assert (len(first.items), first.next) == (2, first.items[-1].id)
    assert len(store.notices.inbox(people["ada"], before=first.next).items) == 1
    assert store.notices.mark_read(people["ada"], [first.items[0].id]) == 1
    assert (store.notices.unread(people["ada"]), store.notices.unread(people["bob"])) == (2, 3)
    assert len(store.notices.inbox(people["ada"], unread=True).items) == 2
    assert store.notices.mark_read(people["ada"]) == 2
    assert store.notices.mark_read(people["ada"]) == 0


def test_the_inbox_by_command(
    store: Store, people: dict[str, int], database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSI_HOME", str(tmp_path))
    monkeypatch.setenv("RSI_DATABASE_URL", database_url)
    cycle_id = cycle_of(store, "ada")
    transitions.enter(store, cycle_id, m.CycleState.FAILED, error="the disk\x1b[31m is full")

    def rsi(*words: str) -> str:
        return str(CliRunner().invoke(app, ["inbox", *words]).output)

    assert f"demo (cycle {cycle_id}) was stopped: the disk\\x1b[31m is full" in rsi("--as", "ada", "--read")
    assert "Nothing new" in rsi("--as", "ada")
    assert "read" in rsi("--as", "ada", "--all")
    assert store.notices.unread(people["ada"]) == 0
    monkeypatch.setenv("USER", "somebody")  # without an account, as on a laptop: the account `local` is theirs
    assert "somebody is no person here" in str(CliRunner().invoke(app, ["inbox"]).exception)
    store.users.add("local", list(m.Role))
    assert "Nothing new" in rsi()


# ------------------------------------------------------------------------------------------------------------ webhook


@dataclass
class Receiver:
    """Answers with `statuses` in turn, the last one for ever, and keeps what came."""

    url: str = ""
    statuses: list[int] = field(default_factory=lambda: [200])
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    elsewhere: int = 0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/hook":
                state.elsewhere += 1
            state.got.append((dict(self.headers), body))
            status = state.statuses.pop(0) if len(state.statuses) > 1 else state.statuses[0]
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    yield state
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


@pytest.fixture
def settings(tmp_path: Path, receiver: Receiver) -> Settings:
    return Settings(home=tmp_path / "home", webhook_url=receiver.url)


def due_now(store: Store) -> None:
    """Time passes: what waits for a next attempt may be tried."""
    for entry in store.notices.deliveries():
        if entry.delivery.state is m.DeliveryState.WAITING:
            with store.transaction() as session:
                row = session.get(m.WebhookDelivery, entry.id)
                assert row is not None
                row.next_at = now() - timedelta(seconds=1)
                session.add(row)


def test_a_webhook_gets_each_notice_once_and_signed(store: Store, settings: Settings, receiver: Receiver) -> None:
    transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    assert deliver(store, settings) == 0  # what happened before the address was known is not sent
    failed = cycle_of(store, "cli")
    transitions.enter(store, failed, m.CycleState.FAILED, error="großes Unglück")
    assert deliver(store, settings) == 1
    assert deliver(store, settings) == 0
    ((headers, body),) = receiver.got
    sent = json.loads(body)
    assert (sent["kind"], sent["cycle"]) == ("cycle.failed", failed)
    assert sent["text"] == f"demo (cycle {failed}) was stopped: großes Unglück"
    key = (settings.home / "secrets" / "webhook").read_text().strip().encode()
    mac = hmac.new(key, headers["X-RSI-Timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["X-RSI-Signature"] == f"sha256={mac}"
    assert (settings.home / "secrets" / "webhook").stat().st_mode & 0o077 == 0
    (entry,) = store.notices.deliveries()
    assert (entry.delivery.state, entry.delivery.status, entry.delivery.attempts) == ("delivered", 200, 1)


def test_a_failing_receiver_is_tried_again_with_growing_pauses(
    store: Store, settings: Settings, receiver: Receiver
) -> None:
    deliver(store, settings)
    transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    receiver.statuses = [503, 500, 204]
    pauses = []
    for _ in range(2):
        assert deliver(store, settings) == 1
        (entry,) = store.notices.deliveries()
        assert entry.delivery.state is m.DeliveryState.WAITING
        pauses.append((entry.delivery.next_at - now()).total_seconds())
        assert deliver(store, settings) == 0  # not before its time
        due_now(store)
    assert [round(p / 10) * 10 for p in pauses] == list(PAUSES_S[:2])
    assert deliver(store, settings) == 1
    (entry,) = store.notices.deliveries()
    assert (entry.delivery.state, entry.delivery.status, entry.delivery.attempts) == ("delivered", 204, 3)


def test_redirects_are_refused_and_nothing_is_tried_for_ever(
    store: Store, settings: Settings, receiver: Receiver
) -> None:
    deliver(store, settings)
    transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    receiver.statuses = [302]
    for _ in range(len(PAUSES_S) + 3):
        deliver(store, settings)
        due_now(store)
    (entry,) = store.notices.deliveries()
    assert entry.delivery.state is m.DeliveryState.GIVEN_UP
    assert entry.delivery.attempts == len(PAUSES_S) + 1 == len(receiver.got)
    assert "redirects are not followed" in entry.delivery.error
    assert receiver.elsewhere == 0


def test_a_receiver_that_is_away_and_a_deliverer_that_dies(
    store: Store, settings: Settings, receiver: Receiver
) -> None:
    nowhere = settings.model_copy(update={"webhook_url": "http://127.0.0.1:9/hook"})
    deliver(store, nowhere)
    transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    assert deliver(store, nowhere) == 1
    (entry,) = store.notices.deliveries()
    assert entry.delivery.error.startswith("ConnectError")
    # A process that claimed a delivery and died: it comes up again when its lease is over.
    deliver(store, settings)
    transitions.enter(store, cycle_of(store, "cli"), m.CycleState.DONE)
    store.notices.enqueue(receiver.url)
    assert len(store.notices.claim_due(receiver.url, now())) == 1
    assert deliver(store, settings) == 0
    due_now(store)
    assert deliver(store, settings) == 1
    assert len(receiver.got) == 1


def test_a_webhook_that_cannot_be_used_says_so(store: Store, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="no http"):
        deliver(store, settings.model_copy(update={"webhook_url": "ftp://example.org"}))
    empty = settings.home / "secrets" / "webhook"
    empty.parent.mkdir(parents=True)
    empty.write_text("\n")
    with pytest.raises(ServiceError, match="is empty"):
        deliver(store, settings)
    assert deliver(store, settings.model_copy(update={"webhook_url": ""})) == 0
