"""Nothing of an attempt stays: after success, failure, a cancelled open, Ctrl-C and kill -9. Every backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.backends.sandbox.docker_engine import LABEL
from stages.domain import Verdict
from tests.integration.sandbox_kit import (
    KINDS,
    SOLVE_SH,
    TEST_SH,
    Machine,
    make_task,
    processes_below,
    skip_slow_half,
    started_machine,
)

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, frozenset())
    return started


def host_descriptors(machine: Machine) -> int:
    """Open descriptors of the sandbox host; 0 for an engine's containers, which have none."""
    if not isinstance(machine.backend, BubblewrapBackend):
        return 0
    (host,) = Path(f"/proc/{machine.backend.host_pid}/task/{machine.backend.host_pid}/children").read_text().split()
    return len(os.listdir(f"/proc/{host}/fd"))


def mounts() -> list[str]:
    """Of this machine, but for those of engines, which mount where they like."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "docker" not in line]


def test_attempts_in_a_row_leave_nothing_however_they_end(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path, test_sh="[ -e trap ] && kill -9 $$\n" + TEST_SH)
    plants = "sleep 500 & setsid sleep 500 & (trap '' TERM; sleep 500) & disown -a\n"
    endings = {  # what the agent does last -> its verdict; None: nobody asks for one
        SOLVE_SH: Verdict.PASSED,
        "true": Verdict.FAILED,
        "touch trap": Verdict.FAILED,  # breaks the verifier
        "exit 1": Verdict.FAILED,
        "head -c 1G /dev/zero > fill": None,
    }
    with machine.box(task) as box:  # shared volumes, the pristine answer
        box.run("touch trap")
        box.verify()
    machine.wait_for_nothing()
    before, descriptors = mounts(), host_descriptors(machine)
    ways = [*endings.items()]
    rounds = {"docker": ways[::2], "bubblewrap": ways * 6, "bubblewrap-user": ways * 2}[machine.kind]
    for number, (command, verdict) in enumerate(rounds):
        with machine.box(task) as box:
            box.run(plants + command, timeout_s=10)
            if number % 7 == 6:
                box.run("sleep 60", timeout_s=0.05)
            if verdict is not None:
                assert box.verify().verdict is verdict
    machine.wait_for_nothing()
    assert mounts() == before
    if machine.kind != "docker":
        until(lambda: host_descriptors(machine) == descriptors)


def test_a_cancelled_open_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    async def cancelled() -> None:
        for delay in (0, 0.002, 0.006, 0.02):
            opening = asyncio.ensure_future(machine.backend.open(make_task(tmp_path)))
            await asyncio.sleep(delay)
            opening.cancel()
            done = (await asyncio.gather(opening, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await done.close()

    machine.wait(cancelled())
    machine.wait_for_nothing()


def test_a_cancelled_run_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    async def cancelled() -> None:
        sandbox = await machine.backend.open(make_task(tmp_path))
        running = asyncio.ensure_future(sandbox.run("sleep 444 & sleep 444"))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sandbox.close()

    machine.wait(cancelled())
    machine.wait_for_nothing()


# --------------------------------------------------------------------------- the whole process ends

_VICTIM = """
import asyncio, pathlib, sys
repository, kind, url, folder = sys.argv[1:]
sys.path.insert(0, repository)
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from tests.integration.sandbox_kit import make_task
backend = DockerBackend(image="prepared", base_url=url) if kind == "docker" else BubblewrapBackend()
async def main():
    await backend.start()
    try:
        for _ in range(1 if kind == "docker" else 3):
            sandbox = await backend.open(make_task(pathlib.Path(folder)))
            await sandbox.run("sleep 555 & setsid sleep 555 &")
        print(getattr(backend, "host_pid", 0), flush=True)
        await asyncio.sleep(100)
    finally:
        await backend.aclose()
asyncio.run(main())
"""


@contextlib.contextmanager
def victim(kind: str, tmp_path: Path, url: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with running sandboxes in a group of its own, and its guard's process id (bubblewrap)."""
    (tmp_path / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(REPOSITORY), kind, url, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


def groups_of(guard: int) -> list[str]:
    return [f"{f}/{d}" for f, dirs, _ in os.walk("/sys/fs/cgroup") for d in dirs if d.startswith(f"rsi-{guard}-")]


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9 of the process", "kill -9 of the host"])
def test_bubblewrap_goes_with_its_process(tmp_path: Path, how: str) -> None:
    with victim("bubblewrap", tmp_path) as (process, guard):
        below = processes_below(guard)
        assert len(below) > 9
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(guard if how.endswith("host") else process.pid, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
        if how == "Ctrl-C":
            process.wait(20)
            assert groups_of(guard) == []
    assert list((tmp_path / "temporary").iterdir()) == []
    if groups_of(guard):  # empty ones of a host that could not clean up: the next start sweeps them
        backend = BubblewrapBackend()
        asyncio.run(backend.start())
        asyncio.run(backend.aclose())
    assert groups_of(guard) == []


@pytest.mark.docker
@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("kill -9", marks=pytest.mark.full)])
def test_docker_goes_with_its_process(tmp_path: Path, docker_url: str, how: str) -> None:
    client = docker.DockerClient(base_url=docker_url)

    def of(pid: int) -> tuple[list[str], list[str]]:
        containers = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
        volumes = client.volumes.list(filters={"label": LABEL})
        return (
            [c.id for c in containers if f":{pid}:" in c.labels[LABEL]],
            [v.name for v in volumes if f":{pid}:" in v.attrs["Labels"][LABEL]],
        )

    with victim("docker", tmp_path, docker_url) as (process, _):
        assert len(of(process.pid)[0]) == 1
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
            process.wait(40)
            assert of(process.pid) == ([], [])
        else:
            process.kill()
    if how != "Ctrl-C":
        # its main process read the end of its input
        until(
            lambda: (
                not any(
                    c.status == "running"
                    for c in client.containers.list(filters={"label": LABEL})
                    if f":{process.pid}:" in c.labels[LABEL]
                )
            )
        )
        backend = DockerBackend(image="prepared", base_url=docker_url)
        asyncio.run(backend.start())  # sweeps
        asyncio.run(backend.aclose())
        assert of(process.pid) == ([], [])
    assert [p.name for p in (tmp_path / "temporary").iterdir()] == []
    client.close()


@pytest.mark.docker
def test_a_backend_that_closes_leaves_another_one_of_its_process_alone(
    tmp_path: Path, docker_url: str, docker_machine: Machine
) -> None:
    task = make_task(tmp_path)
    for _ in range(2):  # the second time on volumes that the first one filled
        with docker_machine.box(task) as box:
            backend = DockerBackend(image="prepared", base_url=docker_url)
            asyncio.run(backend.start())
            asyncio.run(backend.aclose())
            box.run(SOLVE_SH)
            assert box.verify().verdict is Verdict.PASSED
