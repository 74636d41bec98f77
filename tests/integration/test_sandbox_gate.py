"""The task gate and the doctor's rows, on real sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.task_gate import gate_task
from stages.domain import Verdict
from tests.integration.sandbox_kit import KINDS, TEST_SH, Machine, make_task, started_machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    out = Machine("bubblewrap", BubblewrapBackend())
    yield out
    out.close()


def test_a_good_task_passes_the_gate(machine: Machine, tmp_path: Path) -> None:
    gate = machine.wait(gate_task(machine.backend, make_task(tmp_path)))
    assert gate.problems == ()
    assert gate.nop_progress == 0
    assert [r.verdict for r in gate.reference] == [Verdict.PASSED, Verdict.PASSED]


def test_checks_that_pass_for_nothing_are_counted(machine: Machine, tmp_path: Path) -> None:
    easy = TEST_SH.replace("check listing [ -f out/list.txt ]", "check listing true")
    gate = machine.wait(gate_task(machine.backend, make_task(tmp_path, test_sh=easy)))
    assert gate.nop_progress == 1
    assert gate.problems == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test_sh": "exit 0", "checks": ()}, "doing nothing gives passed"),
        ({"solve_sh": "echo 41 > answer.txt"}, "answer failed"),
        ({"solve_sh": None}, "solve.sh is missing"),
        ({"test_sh": "curl -sfm 2 http://example.com/x || exit 127"}, "verifier_error"),
        (
            {
                "test_sh": "cd /logs/verifier; echo 0 > reward.txt; [ -f /app/answer.txt ] && echo 1 > reward.txt; true",
                "checks": (),
            },
            "must write each result file once",
        ),
    ],
)
def test_bad_tasks_are_told_why(machine: Machine, tmp_path: Path, changes: dict, said: str) -> None:
    gate = machine.wait(gate_task(machine.backend, make_task(tmp_path, **changes)))
    assert said in "\n".join(gate.problems)


@pytest.fixture(scope="module", params=KINDS)
def every(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.mark.full
def test_what_the_doctor_says_is_tested(every: Machine) -> None:
    rows = {c.name: c for c in every.wait(every.backend.capabilities())}
    assert len(rows) >= 18
    may_lack = {"memory, whole sandbox", "CPU, whole sandbox"}  # a normal user has no cgroups
    if every.kind == "bubblewrap-user":
        assert not rows["memory, whole sandbox"].enforced
    elif every.kind == "docker" or set(every.backend.cgroups) >= {"memory", "cpu"}:  # type: ignore[attr-defined]
        may_lack = set()
    assert [c for c in rows.values() if not c.enforced and c.name not in may_lack] == []


# what is taken out of a copy of the sandbox's code -> the doctor's row that must notice
WEAKENED = {
    "no network": ("layout.py", '"--unshare-net", ', ""),
    "environment and arguments clean": ("environment.py", '"PAGER": "cat",', '"PAGER": "cat", "PYTHONPATH": "x",'),
    "system files read-only": ("layout.py", '"--ro-bind", "/etc", "/etc"', '"--bind", "/etc", "/etc"'),
    "no capabilities": ("layout.py", '"--cap-drop", "ALL"', '"--cap-add", "ALL"'),
    "system call filter": ("spawn.py", '"--seccomp", str(SECCOMP_FD), ', ""),
    "processes, whole sandbox": ("attempt.py", "ulimit -u {self._spec['pids']}", "true"),
    "disk space": ("world.py", "size={size_mb}m", "size=99m"),
    "shared memory": ("layout.py", "SHM_MB = 8", "SHM_MB = 99"),
    "files (inodes)": ("world.py", "nr_inodes={inodes}", "nr_inodes=9999"),
    "output cap": ("capture.py", "limit // 2, 1", "limit * 99, 1"),
    "verifier hidden from the agent": (
        "attempt.py",
        '"--remount-ro", "/", *own',
        '"--ro-bind", "/opt/rsi", "/opt/rsi", *own',
    ),
}
_CGROUPS = ("cgroups.py", "group.limit(memory_mb=memory_mb, pids=pids, cpus=cpus)", "pass")  # three rows at once
_PROBE = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
async def main():
    backend = BubblewrapBackend()
    await backend.start()
    try:
        print(json.dumps([c.name for c in await backend.capabilities() if not c.enforced]))
    finally:
        await backend.aclose()
asyncio.run(main())
"""


def test_what_the_doctor_says_is_false_when_it_is(tmp_path: Path) -> None:
    """Protections are taken out of a copy of the sandbox, and the rows notice."""
    stages = Path(__file__).resolve().parents[2] / "stages"
    leave = shutil.ignore_patterns("assets", "learner", "sampler", "__pycache__")
    shutil.copytree(stages, tmp_path / "stages", ignore=leave)
    for file, old, new in [*WEAKENED.values(), _CGROUPS]:
        path = tmp_path / "stages/backends/sandbox" / file
        text = path.read_text()
        assert old in text, (file, old)
        path.write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    missing = set(json.loads(done.stdout))
    assert set(WEAKENED) - missing == set()
    assert "memory, whole sandbox" in missing
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # where others leave it little, nobody can tell a limit from them
        assert "CPU, whole sandbox" in missing
