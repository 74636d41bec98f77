"""What the sandbox tests share: tiny tasks, and a synchronous face of a backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stages.backends.protocols import CommandResult, Sandbox, SandboxBackend, VerifierReport
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.domain import CheckRole, CheckSpec, Limits, Stratum, Task

# Two scenario checks and a gate, in pure bash; reports CTRF and fails when a check fails.
TEST_SH = """#!/bin/bash
rows= rc=0
check() { local s=passed; "${@:2}" || { s=failed; rc=1; }; rows+="${rows:+,}{\\"name\\":\\"$1\\",\\"status\\":\\"$s\\"}"; }
check answer [ "$(cat answer.txt 2>/dev/null)" = 42 ]
check listing [ -f out/list.txt ]
check untouched [ "$(cat input/data.txt 2>/dev/null)" = data ]
printf '{"results":{"tests":[%s]}}' "$rows" > /logs/verifier/ctrf.json
exit $rc
"""
SOLVE_SH = "#!/bin/bash\necho 42 > answer.txt\nmkdir -p out\nls input > out/list.txt\n"
CHECKS = (CheckSpec(id="answer"), CheckSpec(id="listing"), CheckSpec(id="untouched", role=CheckRole.GATE))


def make_task(
    root: Path,
    *,
    test_sh: str = TEST_SH,
    solve_sh: str | None = SOLVE_SH,
    tests: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    checks: tuple[CheckSpec, ...] = CHECKS,
    limits: Limits | None = None,
    verifier_timeout_s: float = 20.0,
    workdir: str = "/app",
) -> Task:
    """A Harbor-layout task below `root`."""
    folder = root / f"task-{secrets.token_hex(4)}"
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Write 42 to answer.txt and list input/ in out/list.txt.\n")
    for name, text in {"test.sh": test_sh, **(tests or {})}.items():
        (folder / "tests" / name).write_text(text)
    if solve_sh is not None:
        (folder / "solution").mkdir()
        (folder / "solution" / "solve.sh").write_text(solve_sh)
    return Task(
        id=folder.name,
        suite="tests",
        family="tests",
        stratum=Stratum.EASY,
        instruction="",
        root=folder,
        digest=folder.name,
        files={"input/data.txt": b"data\n"} if files is None else files,
        workdir=workdir,
        checks=checks,
        limits=limits or Limits(memory_mb=96, storage_mb=8, inodes=512, pids=40, command_timeout_s=10.0),
        verifier_timeout_s=verifier_timeout_s,
    )


class Box:
    """One sandbox, driven without async."""

    def __init__(self, machine: Machine, sandbox: Sandbox) -> None:
        self._machine, self.sandbox = machine, sandbox

    def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        return self._machine.wait(self.sandbox.run(command, timeout_s=timeout_s))

    def say(self, command: str, timeout_s: float | None = None) -> str:
        return self.run(command, timeout_s).output.decode(errors="replace").strip()

    def verify(self) -> VerifierReport:
        return self._machine.wait(self.sandbox.verify())

    def close(self) -> None:
        self._machine.wait(self.sandbox.close())


KINDS = ["bubblewrap", "bubblewrap-user", pytest.param("docker", marks=pytest.mark.docker)]


def open_machine(request: pytest.FixtureRequest) -> Machine:
    """The backend that `request.param` names, started; skips where this machine or user has none."""
    if request.param == "docker":
        return Machine("docker", DockerBackend(image="prepared", base_url=request.getfixturevalue("docker_url")))
    if request.param == "bubblewrap-user" and os.getuid() != 0:
        pytest.skip("already a normal user: the plain bubblewrap row is this one")
    return Machine(request.param, BubblewrapBackend(host_uid=60_001 if request.param == "bubblewrap-user" else None))


@contextlib.contextmanager
def started_machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """`open_machine` for a module; the Docker one is shared by the whole session (its image and tools are made once)."""
    if request.param == "docker":
        yield request.getfixturevalue("docker_machine")
        return
    machine = open_machine(request)
    try:
        yield machine
    finally:
        machine.close()


def skip_slow_half(
    request: pytest.FixtureRequest,
    machine: Machine,
    always: frozenset[str],
    thin: tuple[str, ...] = ("docker",),
) -> None:
    """Without CI_FULL=1 the `thin` kinds run the `always` tests only: a container takes a second where a jail takes
    milliseconds, and for a normal user only the limits differ."""
    if machine.kind in thin and not os.environ.get("CI_FULL") and request.function.__name__ not in always:
        pytest.skip(f"on {machine.kind} only with CI_FULL=1")


class Machine:
    """A started backend and the event loop that it lives on."""

    def __init__(self, kind: str, backend: SandboxBackend) -> None:
        self._loop = asyncio.new_event_loop()
        self.kind, self.backend = kind, backend
        self.wait(backend.start())

    def leftovers(self) -> list[str]:
        """Processes, cgroups, containers and volumes of attempts that are closed."""
        if isinstance(self.backend, DockerBackend):
            client, mine = self.backend.client, {"label": [f"{k}={v}" for k, v in self.backend.labels().items()]}
            shared = {v.result() for v in self.backend._volumes.values()}
            out = [c.name for c in client.containers.list(all=True, filters=mine, ignore_removed=True)]
            return out + [v.name for v in client.volumes.list(filters=mine) if v.name not in shared]
        assert isinstance(self.backend, BubblewrapBackend)
        guard = self.backend.host_pid
        assert guard is not None
        own = f"/rsi-{guard}-"
        groups = [
            f"{f}/{d}" for f, dirs, _ in os.walk("/sys/fs/cgroup") for d in dirs if own in f and d.startswith("rsi-a")
        ]
        return [str(p) for p in processes_below(guard)[1:]] + groups

    def wait_for_nothing(self) -> None:
        """Fails when something of the closed attempts stays."""
        deadline = time.monotonic() + 30
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.leftovers() == []

    def wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(what, 100))

    @contextlib.contextmanager
    def box(self, task: Task) -> Iterator[Box]:
        box = Box(self, self.wait(self.backend.open(task)))
        try:
            yield box
        finally:
            box.close()

    def close(self) -> None:
        self.wait(self.backend.aclose())
        self._loop.close()


def processes_below(pid: int) -> list[int]:
    """Every descendant of `pid`, found through /proc."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(name))
    out, todo = [], [pid]
    while todo:
        found = parents.get(todo.pop(), [])
        out += found
        todo += found
    return out
