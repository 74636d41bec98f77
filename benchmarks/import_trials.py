"""Import of 10,000 Harbor trials (issue: at most 2 minutes): wall time and peak memory, into a Postgres of its own.

    python benchmarks/import_trials.py [--trials 10000] [--turns 12]

Half of the trials carry an ATIF transcript. Writing the folders is not counted. Exits with 1 when the
claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.embedded import postgres
from orchestrator.import_trials import import_harbor
from orchestrator.store import Store, schema

TASKS = 100
TARGET_S = 120.0  # for 10,000 trials


def write_job(job: Path, trials: int, turns: int) -> None:
    rng = random.Random(0)
    for n in range(trials):
        task, passed = f"task-{n % TASKS:03d}", rng.random() < 0.3
        folder = job / f"{task}__{n:06d}"
        tests = [
            {"name": f"test_outputs.py::test_{i}", "status": "passed" if passed or rng.random() < 0.5 else "failed"}
            for i in range(6)
        ]
        result = {
            "id": f"{n:032x}",
            "task_name": task,
            "trial_name": folder.name,
            "source": "bench",
            "task_checksum": f"{n % TASKS:064x}",
            "config": {"timeout_multiplier": 1.0, "agent": {"kwargs": {"temperature": 0.6}}},
            "agent_info": {"name": "terminus-2", "version": "2.0", "model_info": {"name": "m", "provider": "p"}},
            "agent_result": {"n_output_tokens": rng.randrange(50_000)},
            "verifier_result": {"rewards": {"reward": float(passed)}},
            "exception_info": None,
            "started_at": "2026-01-31T12:00:00Z",
            "finished_at": "2026-01-31T12:10:00Z",
        }
        files = {
            "result.json": result,
            "verifier/reward.txt": int(passed),
            "verifier/ctrf.json": {"results": {"tool": {"name": "pytest"}, "tests": tests}},
        }
        if n % 2:
            steps = [
                {
                    "step_id": i + 1,
                    "source": "agent",
                    "message": "I look at the files. " * 10,
                    "tool_calls": [{"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls -la"}}],
                    "observation": {"results": [{"source_call_id": "a", "content": "drwxr-xr-x 2 root root\n" * 40}]},
                }
                for i in range(turns)
            ]
            files["agent/trajectory.json"] = {"schema_version": "ATIF-v1.6", "steps": steps}
        for name, value in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rsi-bench-"))
    home.chmod(0o755)
    try:
        write_job(home / "job", given.trials, given.turns)
        url = postgres.ensure_database(postgres.ensure(home, durable=False), "bench")
        schema.upgrade(url)
        store = Store.open(url, home / "artifacts")
        allowed_s = TARGET_S * given.trials / 10_000
        held = True
        for label in ("first import", "again"):
            before, cpu = time.perf_counter(), time.process_time()
            report = import_harbor(store, [home / "job"])
            wall, used = time.perf_counter() - before, time.process_time() - cpu
            assert report.trials == given.trials, report.skipped[:3]
            held = held and wall <= allowed_s
            print(
                f"{label}: {report.trials} trials in {wall:.1f} s (<= {allowed_s:g}; {used:.1f} s of this process's CPU)   "
                f"{'ok' if wall <= allowed_s else 'FAILED'}"
            )
        store.close()
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
        return 0 if held else 1
    finally:
        postgres.stop(home, mode="immediate")
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
