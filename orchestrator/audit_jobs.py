"""Audits of large sets outside the console's process: a child re-scores, so that a million rows never grow the console.

A job is a row. `python -m orchestrator.audit_jobs` takes up one after the other until none is left; it reads where the
database is as JSON from its standard input. It holds a lock on the row of its job, so the job of a child that is gone is
taken up by the next one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from orchestrator import models as m
from orchestrator.audits import AuditSpec, run_audit
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import FamilyScale, Phase
from stages.errors import ConfigError, RsiError, StoreError
from stages.rewards import Progress, RewardKind

AT_ONCE = 20_000  # attempts that a request re-scores itself; measured: 0.2 s of CPU, 0.7 s on a very busy machine
MOST_WAITING = 20  # jobs that wait or run; a million attempts take about 10 s each
MOST_STARTS = 3  # a job whose process is gone that often is failed
STOP_S = 5.0
LOOK_S = 2.0  # between two looks at jobs that another process holds
UNFINISHED = (m.AuditJobState.WAITING, m.AuditJobState.RUNNING)


class QueueFull(ConfigError):
    """So many audits wait that another one is refused."""


def order(store: Store, spec: AuditSpec, *, attempts: int, created_by: str) -> int:
    """Write a job down; its number. Raises QueueFull."""
    if (waiting := store.audit_jobs.count(*UNFINISHED)) >= MOST_WAITING:
        raise QueueFull(
            f"{waiting} audits of large sets wait already. Try again when some of them are done: see /audits."
        )
    job = m.AuditJob(name=spec.name, attempts=attempts, spec=to_json(spec), created_by=created_by)
    return store.audit_jobs.add(job)


class AuditRunner:
    """Keeps one child at work in one console while jobs wait. Jobs that it leaves unfinished are taken up at the next start."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self.problem = ""  # why the last child could do nothing

    def wake(self) -> None:
        """Look for jobs, soon and elsewhere: returns at once."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="audit-jobs", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the child. Its job is taken up again by the next console."""
        with self._lock:
            self._closed.set()
            child, thread = self._child, self._thread
        if child is not None:
            child.terminate()
        if thread is not None:
            thread.join(STOP_S)

    def _serve(self) -> None:
        """Until nothing is left to do, or a child could not do it: then the next `wake` tries again."""
        self.problem = ""
        while True:
            with self._lock:  # a job that is written after this look finds no thread, and starts one
                free = self._look()
                if free is None or self.problem or self._closed.is_set():
                    self._thread = None
                    return
            if free:
                self.problem = self._run()
            else:  # another process is at work; should it be gone, its lock goes a moment later
                self._closed.wait(LOOK_S)

    def _look(self) -> bool | None:
        try:
            return self._store.audit_jobs.any_free()
        except StoreError as error:
            self.problem = str(error)
            return None

    def _run(self) -> str:
        """One child to its end; what was wrong with it."""
        command = [sys.executable, "-m", "orchestrator.audit_jobs"]
        with self._lock:
            if self._closed.is_set():
                return ""
            try:
                child = self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            except OSError as error:  # no process, no memory
                return f"the re-scoring process could not be run: {error}"
        url = self._store.engine.url.render_as_string(hide_password=False)
        child.communicate(json.dumps({"database_url": url, "artifact_url": self._store.artifacts.url}))
        with self._lock:
            self._child = None
        return f"the re-scoring process ended with code {child.returncode}" if child.returncode else ""


def to_json(spec: AuditSpec) -> dict[str, Any]:
    return asdict(spec)


def from_json(value: dict[str, Any]) -> AuditSpec:
    """Raises KeyError, TypeError or ValueError for what another version has written."""
    where = value["where"]
    return AuditSpec(
        where=TrajectoryFilter(**(where | {"phase": Phase(where["phase"]) if where["phase"] else None})),
        formulas=tuple(RewardKind(k) for k in value["formulas"]),
        scales=value["scales"],
        given=tuple(FamilyScale(**s) for s in value["given"]),
        recalibrated=value["recalibrated"],
        progress=Progress(value["progress"]),
        name=value["name"],
    )


def work(store: Store) -> None:
    """Take up jobs until none is left. Raises StoreError when the database is away: the job stays."""
    while (job := store.audit_jobs.claim(most_starts=MOST_STARTS)) is not None:
        number = job.id or 0
        try:
            spec = from_json(job.spec)
        except (KeyError, TypeError, ValueError) as error:
            store.audit_jobs.finish(number, error=f"written by another version, {error!r}: fill in the form anew")
            continue
        try:
            with store.transaction():
                if store.audit_jobs.hold(number):
                    made = run_audit(store, spec, created_by=job.created_by)
                    store.audit_jobs.finish(number, audit_id=made.id)
        except RsiError as error:
            store.audit_jobs.finish(number, error=" ".join(str(error).split()))


def main() -> int:
    where = json.load(sys.stdin)
    store = Store.open(where["database_url"], where["artifact_url"], pool_size=1)
    try:
        work(store)
    except StoreError as error:
        print(f"audit jobs: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
