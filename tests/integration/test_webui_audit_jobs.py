"""Audits of large sets: rows that outlive their process and their console, one queue with an end, and what pages say of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from fastapi import FastAPI

from orchestrator import models as m
from orchestrator.audit_jobs import MOST_STARTS, MOST_WAITING, UNFINISHED, order, work
from orchestrator.audits import AuditSpec
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import Phase
from tests import factories
from tests.console_people import SignedIn, app_for, client_as

WAIT_S = 60
FORM = {"scales": "fit", "name": "large"}


@pytest.fixture(scope="module")
def attempts(module_store: Store) -> Store:
    """40 stored attempts."""
    rows = [factories.trajectory(i, passed=i % 3 == 0) for i in range(40)]
    module_store.trajectories.add(rows, phase=Phase.EXPLORE)
    return module_store


@pytest.fixture
def app(attempts: Store, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """A console to which ten attempts are many, and that has not begun to run: nothing takes up a job yet."""
    monkeypatch.setattr("webui.pages.audit_new.AT_ONCE", 10)
    made = app_for(attempts)
    monkeypatch.setattr(made.state.audit_runner, "wake", lambda: None)
    return made


@pytest.fixture(autouse=True)
def empty_queue(attempts: Store) -> None:
    for job in attempts.audit_jobs.not_done(limit=1000):
        attempts.audit_jobs.finish(job.id or 0, error="of an earlier test")


def ask(store: Store, **where: object) -> int:
    return order(store, AuditSpec(where=TrajectoryFilter(**where), name="set"), attempts=40, created_by="ada")  # type: ignore[arg-type]


def wait_until_over(store: Store, number: int) -> m.AuditJob:
    deadline = time.monotonic() + WAIT_S
    while (job := store.audit_jobs.get(number)) is None or job.state in UNFINISHED:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def test_jobs_outlive_the_console_that_was_asked(attempts: Store) -> None:
    """One waits and one was begun by a process that is gone: the next console makes both, each once."""
    begun, waiting = ask(attempts), ask(attempts, phase=Phase.EXPLORE)
    taken = attempts.audit_jobs.claim(most_starts=MOST_STARTS)
    assert taken is not None
    assert (taken.id, taken.state) == (begun, m.AuditJobState.RUNNING)
    before = len(attempts.audits.list(limit=1000).items)
    with client_as(app_for(attempts)):
        done = [wait_until_over(attempts, number) for number in (begun, waiting)]
    assert [job.state for job in done] == [m.AuditJobState.DONE] * 2
    assert [job.starts for job in done] == [2, 1]
    assert len(attempts.audits.list(limit=1000).items) == before + 2
    made = attempts.audits.get(done[1].audit_id or 0)
    assert (made.name, made.created_by, made.result["attempts"]) == ("set", "ada", 40)


def test_a_killed_process_leaves_its_job_to_the_next(attempts: Store) -> None:
    number = ask(attempts)
    where = {"database_url": attempts.engine.url.render_as_string(hide_password=False)}
    line = json.dumps(where | {"artifact_url": attempts.artifacts.url})
    with attempts.transaction() as session:  # nobody may store an audit: the process hangs before its end
        session.connection().exec_driver_sql("LOCK TABLE audit IN EXCLUSIVE MODE")
        child = subprocess.Popen([sys.executable, "-m", "orchestrator.audit_jobs"], stdin=subprocess.PIPE, text=True)
        assert child.stdin is not None
        child.stdin.write(line)
        child.stdin.close()
        watcher = Store.open(where["database_url"], attempts.artifacts.url)
        deadline = time.monotonic() + WAIT_S
        while (job := watcher.audit_jobs.get(number)) is not None and job.state is m.AuditJobState.WAITING:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=20)
    left = watcher.audit_jobs.get(number)
    watcher.close()
    assert left is not None
    assert (left.state, left.audit_id) == (m.AuditJobState.RUNNING, None)
    with client_as(app_for(attempts)):  # the database notices a moment later that its client is gone
        job = wait_until_over(attempts, number)
    assert (job.state, job.starts) == (m.AuditJobState.DONE, 2)


def test_two_processes_never_make_the_same_audit(attempts: Store) -> None:
    number = ask(attempts)
    assert attempts.audit_jobs.claim(most_starts=MOST_STARTS) is not None
    other = Store.open(attempts.engine.url.render_as_string(hide_password=False), attempts.artifacts.url)
    with attempts.transaction():
        assert attempts.audit_jobs.hold(number)
        work(other)  # finds nothing that it could take up
        assert not other.audit_jobs.hold(number)
    assert attempts.audit_jobs.count(*UNFINISHED) == 1
    work(other)
    other.close()
    assert attempts.audit_jobs.count(*UNFINISHED) == 0
    assert not attempts.audit_jobs.hold(number)


def test_a_job_that_always_fails_says_so_and_starts_again_on_demand(attempts: Store, app: FastAPI) -> None:
    number = ask(attempts)
    for _ in range(MOST_STARTS):
        assert attempts.audit_jobs.claim(most_starts=MOST_STARTS) is not None
    assert attempts.audit_jobs.claim(most_starts=MOST_STARTS) is None
    lead, reviewer = client_as(app), client_as(app, m.Role.REVIEWER)
    lead.follow_redirects = reviewer.follow_redirects = False
    page = lead.get(f"/audits/jobs/{number}")
    assert "Refresh" not in page.headers
    assert "begun 3 times" in page.text
    assert "Start again" in page.text
    assert f"/audits/jobs/{number}" in lead.get("/audits").text
    assert "Start again" not in reviewer.get(f"/audits/jobs/{number}").text
    again = f"/audits/jobs/{number}/again"
    assert reviewer.post(again, data={"csrf": reviewer.csrf}).status_code == 403
    assert lead.post(again, data={"csrf": lead.csrf}).headers["location"] == f"/audits/jobs/{number}"
    assert lead.get(f"/audits/jobs/{number}").headers["Refresh"] == "2"
    assert [row.action for row in attempts.audit_trail.list(object_id=number).items] == ["audit.again"]
    work(attempts)
    made = attempts.audit_jobs.get(number)
    assert made is not None
    assert lead.get(f"/audits/jobs/{number}").headers["location"] == f"/audits/{made.audit_id}"
    assert lead.post(again, data={"csrf": lead.csrf}).status_code == 303  # it is done: nothing happens
    assert attempts.audit_jobs.count(*UNFINISHED) == 0
    assert lead.get("/audits/jobs/99999").status_code == lead.post("/audits/jobs/99999/again").status_code + 1 == 404


def test_what_cannot_be_audited_fails_in_words(attempts: Store, app: FastAPI) -> None:
    empty, old = ask(attempts, family="nowhere"), attempts.audit_jobs.add(m.AuditJob(name="old", attempts=9, spec={}))
    work(attempts)
    client = client_as(app)
    told = client.get(f"/api/v1/audits/jobs/{empty}").json()
    assert told["state"] == "failed"
    assert "no attempt" in told["error"] or "empty" in told["error"]
    assert "another version" in client.get(f"/audits/jobs/{old}").text
    assert {j["id"] for j in client.get("/api/v1/audits/jobs").json()} >= {empty, old}


def test_a_full_queue_refuses_and_keeps_the_form(attempts: Store, app: FastAPI) -> None:
    for _ in range(MOST_WAITING):
        ask(attempts)
    client: SignedIn = client_as(app)
    answer = client.post("/audits", data={"csrf": client.csrf, **FORM})
    assert answer.status_code == 429
    assert f"{MOST_WAITING} audits of large sets wait already" in answer.text
    assert 'value="large"' in answer.text
    told = client.post("/api/v1/audits", json={"name": "large"}, headers={"X-CSRF-Token": client.csrf})
    assert (told.status_code, told.headers["Retry-After"]) == (429, "30")
    assert "wait already" in told.json()["what"]
    assert attempts.audit_jobs.count(*UNFINISHED) == MOST_WAITING
    attempts.audit_jobs.finish(attempts.audit_jobs.not_done(limit=1)[0].id or 0, error="over")
    answer = client.post("/audits", data={"csrf": client.csrf, **FORM}, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/audits/jobs/")
