"""Our attempts as a Harbor job folder, so that other viewers open them. What `stages.trials.harbor` reads, this writes.

JOB/config.json, JOB/result.json
JOB/TRIAL/{config.json, result.json, agent/trajectory.json, verifier/{reward.txt, ctrf.json, test-stdout.txt}}
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from stages.domain import CheckResult, CheckRole, CheckStatus, EndReason, Trajectory, Verdict
from stages.errors import TrialError
from stages.trials.atif import as_json, atif_documents, redacted
from stages.trials.harbor import OWN

_STATUS = {CheckStatus.PASSED: "passed", CheckStatus.FAILED: "failed", CheckStatus.NOT_RUN: "skipped"}
_NO_VERDICT = {
    Verdict.VERIFIER_ERROR: ("VerifierError", "the verifier gave no verdict"),
    Verdict.INFRA_ERROR: ("SandboxError", "the sandbox, the image or the sampler failed"),
    Verdict.NONE: ("CancelledError", "the attempt was never verified"),
}
_ENDED = {
    EndReason.TIME_LIMIT: ("AgentTimeoutError", "the agent's wall clock ran out"),
    EndReason.CONTEXT_OVERFLOW: ("ContextLengthExceededError", "the next prompt did not fit the model's context"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTrial:
    """One attempt and what its trajectory does not say."""

    trajectory: Trajectory
    instruction: str
    task_digest: str
    finished: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """Attempts of one model on one suite. `name` is the folder's; `settings` are the harness's, all of them public."""

    name: str
    model: str
    suite: str
    suite_version: str
    version: str  # of this package
    settings: Mapping[str, Any] = field(default_factory=dict)
    attempts_per_task: int = 1

    @property
    def agent(self) -> str:
        return f"{OWN}-{self.settings.get('harness', 'shell')}"


def write_job(folder: Path, job: ExportJob, trials: Iterable[ExportTrial]) -> int:
    """Write a job folder whole or not at all; returns the number of trials. Raises TrialError when `folder` holds anything."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise TrialError(f"{folder} exists and is not empty: name a new folder, nothing is overwritten")
    staged = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        staged.mkdir(parents=True)
        summary = _Summary()
        for trial in trials:
            summary.add(_write_trial(staged, job, trial))
        _write(staged / "config.json", _job_config(job))
        _write(staged / "result.json", summary.document(job))
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    except OSError as error:
        raise TrialError(f"{folder} cannot be written: {error.strerror or error}") from error
    except (OverflowError, ValueError) as error:  # what was imported may say that it took ten thousand years
        raise TrialError(
            f"{folder} cannot be written: a time or number of an attempt is out of range ({error})"
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return summary.trials


def trial_name(trajectory: Trajectory) -> str:
    """TASK__ATTEMPT-ID: readable, fit for a folder, and unique by the attempt's id."""
    return f"{safe_name(trajectory.task_id)[:60]}__{trajectory.attempt}-{trajectory.id}"


def safe_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+-]+", "-", text).strip(".-") or "x"


# --------------------------------------------------------------------------- one trial


def _write_trial(staged: Path, job: ExportJob, trial: ExportTrial) -> dict[str, Any]:
    t = trial.trajectory
    folder = staged / trial_name(t)

    def clean(text: str) -> str:
        return redacted(text, trial.instruction)

    result = _result(job, trial, folder.name)
    documents = atif_documents(
        t.turns,
        session_id=t.id,
        agent=job.agent,
        version=job.version,
        model=job.model,
        instruction=trial.instruction or t.task_id,
        started=trial.finished - timedelta(seconds=t.duration_s),
        clean=clean,
    )
    for name, document in documents.items():
        _write(folder / "agent" / name, document)
    verifier = folder / "verifier"
    verifier.mkdir(parents=True)
    if t.verdict.counts:
        (verifier / "reward.txt").write_text(f"{int(t.strict)}\n", encoding="utf-8")
    if t.checks:
        _write(verifier / "ctrf.json", _ctrf(t.checks, clean))
    if t.verifier_log:
        (verifier / "test-stdout.txt").write_text(clean(t.verifier_log), encoding="utf-8", errors="replace")
    _write(folder / "config.json", result["config"])
    _write(folder / "result.json", result)
    return result


def _result(job: ExportJob, trial: ExportTrial, name: str) -> dict[str, Any]:
    t = trial.trajectory
    started, finished = (trial.finished - timedelta(seconds=t.duration_s)).isoformat(), trial.finished.isoformat()
    broken = _NO_VERDICT.get(t.verdict) or _ENDED.get(t.end_reason)
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_OID, t.id)),
        "task_name": t.task_id,
        "trial_name": name,
        "trial_uri": name,
        "task_id": {"path": t.task_id},
        "source": job.suite,
        "task_checksum": trial.task_digest,
        "config": {
            "task": {"path": t.task_id, "source": job.suite},
            "trial_name": name,
            "agent": {"name": job.agent, "model_name": job.model, "kwargs": dict(job.settings)},
        },
        "agent_info": {
            "name": job.agent,
            "version": job.version,
            "model_info": {"name": job.model, "provider": OWN},
        },
        "agent_result": {
            "n_output_tokens": sum(turn.end - turn.start for turn in t.turns),
            "metadata": {
                "producer": OWN,
                "trajectory": t.id,
                "end_reason": t.end_reason,
                "verdict": t.verdict,
                "flags": list(t.flags),
            },
        },
        "verifier_result": {"rewards": {"reward": float(t.strict)}} if t.verdict.counts else None,
        "exception_info": None
        if broken is None
        else {
            "exception_type": broken[0],
            "exception_message": broken[1],
            "exception_traceback": "",
            "occurred_at": finished,
        },
        "started_at": started,
        "finished_at": finished,
        "agent_execution": {"started_at": started, "finished_at": finished},
    }


def _ctrf(checks: Iterable[CheckResult], clean: Any) -> dict[str, Any]:
    tests = [
        {
            "name": check.id,
            "status": _STATUS[check.status],
            "duration": 0,
            **({"message": clean(check.message)} if check.message else {}),
            **({"extra": {"role": check.role}} if check.role is CheckRole.GATE else {}),
        }
        for check in checks
    ]
    counts = {status: sum(t["status"] == status for t in tests) for status in ("passed", "failed", "skipped")}
    summary = {"tests": len(tests), **counts, "pending": 0, "other": 0, "start": 0, "stop": 0}
    return {"results": {"tool": {"name": OWN}, "summary": summary, "tests": tests}}


# --------------------------------------------------------------------------- the job


def _job_config(job: ExportJob) -> dict[str, Any]:
    dataset = {"name": job.suite, **({"version": job.suite_version} if job.suite_version else {})}
    return {
        "job_name": job.name,
        "n_attempts": job.attempts_per_task,
        "agents": [{"name": job.agent, "model_name": job.model, "kwargs": dict(job.settings)}],
        "datasets": [dataset],
    }


class _Summary:
    """What a job says about its trials, as Harbor counts them."""

    def __init__(self) -> None:
        self.trials = self.errors = self.cancelled = self.tokens = self.verdicts = self.passed = 0
        self._rewards: dict[str, list[str]] = defaultdict(list)
        self._exceptions: dict[str, list[str]] = defaultdict(list)
        self._times: list[str] = []

    def add(self, result: Mapping[str, Any]) -> None:
        name = str(result["trial_name"])
        self.trials += 1
        self.tokens += result["agent_result"]["n_output_tokens"]
        self._times += [result["started_at"], result["finished_at"]]
        if result["verifier_result"] is not None:
            reward = result["verifier_result"]["rewards"]["reward"]
            self.verdicts += 1
            self.passed += reward == 1.0
            self._rewards[str(reward)].append(name)
        if result["exception_info"] is not None:
            kind = result["exception_info"]["exception_type"]
            self._exceptions[kind].append(name)
            self.errors += 1
            self.cancelled += kind == "CancelledError"

    def document(self, job: ExportJob) -> dict[str, Any]:
        if not self.trials:
            raise TrialError(f"{job.name}: no attempt to export")
        mean = [{"mean": self.passed / self.verdicts}] if self.verdicts else []
        own = {
            "n_trials": self.verdicts,
            "n_errors": self.errors,
            "metrics": mean,
            "reward_stats": {"reward": dict(self._rewards)} if self._rewards else {},
            "exception_stats": dict(self._exceptions),
        }
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{job.name}\0{job.model}\0{job.suite}")),
            "started_at": min(self._times),
            "updated_at": max(self._times),
            "finished_at": max(self._times),
            "n_total_trials": self.trials,
            "stats": {
                "n_completed_trials": self.trials,
                "n_errored_trials": self.errors,
                "n_cancelled_trials": self.cancelled,
                "n_output_tokens": self.tokens,
                "evals": {f"{job.agent}__{job.model}__{job.suite}": own},
            },
        }


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(document), encoding="utf-8")
