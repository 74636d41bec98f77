"""Audits of large sets outside the console's process: a child re-scores, so that a million rows never grow the console.

`python -m orchestrator.audit_jobs` reads one job as JSON from its standard input and answers with lines: a word for each
part of the work, then `audit N`, or `error …`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.audits import AuditSpec, run_audit
from orchestrator.store import Store, TrajectoryFilter
from stages.domain import FamilyScale, Phase
from stages.errors import RsiError
from stages.rewards import Progress, RewardKind

AT_ONCE = 20_000  # attempts that a request re-scores itself; measured: 0.2 s of CPU, 0.7 s on a very busy machine
KEPT = 50  # finished jobs that are remembered


@dataclass(slots=True, kw_only=True)
class Job:
    """One audit in the making. Read by pages while a thread writes it: each field is set once or grows."""

    name: str
    attempts: int
    started: float = field(default_factory=time.monotonic)
    state: str = "waiting for the audit before it"
    audit_id: int | None = None
    error: str = ""
    seconds: float | None = None  # once it has ended

    @property
    def over(self) -> bool:
        return self.audit_id is not None or bool(self.error)


class AuditJobs:
    """The jobs of one console, one child at a time. They are forgotten when the console stops; a child then still ends."""

    def __init__(self, database_url: str, artifact_url: str) -> None:
        self._where = {"database_url": database_url, "artifact_url": artifact_url}
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()

    def start(self, spec: AuditSpec, *, attempts: int, created_by: str) -> int:
        """Returns the job's number at once."""
        number = next(self._numbers)
        job = self._jobs[number] = Job(name=spec.name, attempts=attempts)
        for old in [n for n, j in self._jobs.items() if j.over][:-KEPT]:
            del self._jobs[old]
        order = json.dumps(self._where | {"spec": to_json(spec), "created_by": created_by})
        threading.Thread(target=self._run, args=(job, order), name=f"audit-{number}", daemon=True).start()
        return number

    def get(self, number: int) -> Job | None:
        return self._jobs.get(number)

    def _run(self, job: Job, order: str) -> None:
        try:
            self._rescore(job, order)
        except OSError as error:  # no process, no memory: a page that waits for this job must end
            job.error = f"the re-scoring process could not be run: {error}"

    def _rescore(self, job: Job, order: str) -> None:
        with self._turn:
            command = [sys.executable, "-m", "orchestrator.audit_jobs"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(order)
                child.stdin.close()
                for line in child.stdout:
                    word, _, rest = line.rstrip("\n").partition(" ")
                    if word == "audit":
                        job.seconds, job.audit_id = time.monotonic() - job.started, int(rest)
                    elif word == "error":
                        job.error = rest
                    else:
                        job.state = line.strip()
            if not job.over:
                job.error = f"the re-scoring process ended with code {child.returncode}; is there enough memory?"


def to_json(spec: AuditSpec) -> dict[str, Any]:
    return asdict(spec)


def from_json(value: dict[str, Any]) -> AuditSpec:
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


def main() -> None:
    order = json.load(sys.stdin)
    store = Store.open(order["database_url"], order["artifact_url"], pool_size=1)
    print("reads and re-scores the attempts", flush=True)
    try:
        made = run_audit(store, from_json(order["spec"]), created_by=order["created_by"])
        print(f"audit {made.id}", flush=True)
    except RsiError as error:
        print(f"error {' '.join(str(error).split())}", flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    main()
