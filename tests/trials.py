"""Writes small Harbor job folders, as Harbor 2.0 does, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEPS: list[dict[str, Any]] = [
    {"step_id": 1, "source": "user", "message": "Write x"},
    {
        "step_id": 2,
        "source": "agent",
        "timestamp": "2026-01-31T12:00:00Z",
        "message": "Look first.",
        "tool_calls": [{"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls"}}],
        "observation": {"results": [{"source_call_id": "a", "content": "x.txt"}]},
        "metrics": {"completion_tokens": 7},
    },
    {
        "step_id": 3,
        "source": "agent",
        "timestamp": "2026-01-31T12:00:05Z",
        "message": [{"type": "text", "text": "Done"}, {"type": "image", "source": {"media_type": "image/png"}}],
        "metrics": {"completion_tokens": 4},
    },
]


def atif(version: str = "1.6", steps: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    agent = {"name": "terminus-2", "version": "2.0", "model_name": "m"}
    return {"schema_version": f"ATIF-v{version}", "session_id": "s", "agent": agent, "steps": steps or STEPS, **more}


def ctrf(*statuses: str) -> dict[str, Any]:
    tests = [{"name": f"test.py::test_{n}", "status": s, "message": "no"} for n, s in enumerate(statuses)]
    summary = {"tests": len(tests), "passed": statuses.count("passed")}
    return {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": tests}}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def trial(
    job: Path,
    task: str,
    number: int,
    *,
    reward: float | None = 1.0,
    checks: tuple[str, ...] | None = ("passed", "passed"),
    transcript: Any = None,
    exception: str | None = None,
    model: str = "m-1",
    agent: str = "terminus-2",
    checksum: str | None = None,
    kwargs: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """One trial folder; `reward` None is a missing verdict."""
    folder = job / f"{task}__{number:03d}"
    result = {
        "id": f"{job.name}-{task}-{number}",
        "task_name": task,
        "trial_name": folder.name,
        "source": "small-bench",
        "task_checksum": checksum or f"sum-{task}",
        "config": {"timeout_multiplier": 1.0, "agent": {"kwargs": kwargs or {"temperature": 0.6, "api_key": "hidden"}}},
        "agent_info": {"name": agent, "version": "2.0", "model_info": {"name": model, "provider": "p"}},
        "agent_result": {"n_output_tokens": 100 + number},
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
        "exception_info": None if exception is None else {"exception_type": exception},
        "started_at": f"2026-01-31T12:00:{number:02d}Z",
        "finished_at": f"2026-01-31T12:01:{number:02d}Z",
        **more,
    }
    write(folder / "result.json", result)
    if reward is not None:
        write(folder / "verifier" / "reward.txt", f"{reward:g}\n")
        if checks is not None:
            write(folder / "verifier" / "ctrf.json", ctrf(*checks))
    if transcript is not None:
        write(folder / "agent" / "trajectory.json", transcript)
    return folder


def job(root: Path, name: str, solved: dict[str, list[float | None]], **more: Any) -> Path:
    """A job with one trial per entry of `solved`: task -> rewards of its attempts."""
    folder = root / name
    write(folder / "config.json", {"job_name": name, "datasets": [{"name": "small-bench", "version": "1.0"}]})
    write(folder / "result.json", {"n_total_trials": sum(map(len, solved.values())), "stats": {}})
    for task, rewards in solved.items():
        for n, reward in enumerate(rewards):
            checks = ("passed", "passed") if reward == 1.0 else ("passed", "failed")
            trial(folder, task, n, reward=reward, checks=checks, **more)
    return folder
