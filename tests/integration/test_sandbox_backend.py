"""A backend as a whole: many attempts at once, unusable tasks, several event loops, a host that dies. Every backend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.backends.protocols import Sandbox
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.domain import CheckStatus, Verdict
from stages.errors import SandboxError, SandboxUnavailable, TaskError
from tests.integration.sandbox_kit import KINDS, SOLVE_SH, Machine, make_task, skip_slow_half, started_machine

ALWAYS: frozenset[str] = frozenset()


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ALWAYS, ("docker", "bubblewrap-user"))
    return started


def test_two_attempts_share_nothing(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    with machine.box(task) as one, machine.box(task) as two:
        one.run("echo secret > /tmp/x; echo secret > ~/x; echo secret > x; echo secret > /dev/shm/x; sleep 77 &")
        assert two.say("cat /tmp/x ~/x x /dev/shm/x 2>/dev/null; ps -eo args | grep -c '^sleep 7'") == "0"


def test_many_at_once(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    number = 24 if machine.kind != "docker" else 6

    async def attempt(number: int) -> Verdict:
        sandbox = await machine.backend.open(task)
        try:
            await sandbox.run(f"echo {number} > mine; {SOLVE_SH}")
            assert (await sandbox.run("cat mine")).output == f"{number}\n".encode()
            return (await sandbox.verify()).verdict
        finally:
            await sandbox.close()

    async def all_of_them() -> list[Verdict]:
        return await asyncio.gather(*(attempt(i) for i in range(number)))

    assert machine.wait(all_of_them()) == [Verdict.PASSED] * number


def test_unusable_tasks_are_named(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    task = make_task(tmp_path)
    (task.root / "tests" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(TaskError, match="link"):
        machine.wait(machine.backend.open(task))
    task = make_task(tmp_path)
    (task.root / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"test\.sh is missing"):
        machine.wait(machine.backend.open(task))
    places = ("/usr", "app", "/app/../tests", "/logs/verifier", "/opt/rsi/bin", "/var/tmp", "/" + "n" * 300)
    for files, workdir in (({"../x": b""}, "/app"), ({"/x": b""}, "/app"), *(({}, place) for place in places)):
        with pytest.raises(TaskError):
            machine.wait(machine.backend.open(make_task(tmp_path, files=files, workdir=workdir)))


def test_closed_backend_says_so(tmp_path: Path) -> None:
    backend = BubblewrapBackend()
    with pytest.raises(SandboxError, match="not started"):
        asyncio.run(backend.open(make_task(tmp_path)))


def test_a_backend_serves_several_event_loops_and_waits_for_places(tmp_path: Path) -> None:
    backend = BubblewrapBackend(concurrency=2)
    task = make_task(tmp_path)
    asyncio.run(backend.start())

    async def use() -> bytes:
        sandboxes = [await backend.open(task), await backend.open(task)]
        third = asyncio.ensure_future(backend.open(task))
        await asyncio.sleep(0.1)
        assert not third.done()
        await sandboxes[0].close()
        out = (await (await third).run("echo hi")).output
        await sandboxes[1].close()
        await third.result().close()
        return out

    assert asyncio.run(use()) == b"hi\n"
    assert asyncio.run(use()) == b"hi\n"
    asyncio.run(backend.aclose())
    asyncio.run(backend.aclose())


async def until_it_fails(sandbox: Sandbox) -> None:
    for _ in range(100):
        await sandbox.run("sleep 0.05")


def test_a_killed_host_is_an_error_once_and_the_next_open_works(tmp_path: Path) -> None:
    async def use() -> None:
        backend = BubblewrapBackend()
        await backend.start()
        task = make_task(tmp_path)
        sandbox = await backend.open(task)
        assert backend.host_pid is not None
        os.kill(backend.host_pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="host"):
            await until_it_fails(sandbox)
        await sandbox.close()
        again = await backend.open(task)
        assert (await again.run("echo back")).output == b"back\n"
        await again.close()
        await backend.aclose()

    asyncio.run(use())


def test_tasks_that_are_not_used_leave_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.backends.sandbox.bubblewrap._MAX_STORED_BYTES", 3000)

    async def use() -> None:
        backend = BubblewrapBackend()
        await backend.start()
        tasks = [make_task(tmp_path, files={"f": b"x" * 1000}) for _ in range(6)]
        for task in [*tasks, *tasks]:
            sandbox = await backend.open(task)
            await sandbox.run("echo 42 > answer.txt")
            assert (await sandbox.verify()).checks[0].status is CheckStatus.PASSED
            await sandbox.close()
        assert sum(backend._sent.values()) < 6000
        await backend.aclose()

    asyncio.run(use())


_WITHOUT_NAMESPACES = """
import asyncio, os, sys
repository, uid, limit = sys.argv[1:]
sys.path.insert(0, repository)
from stages.backends.sandbox import kernel
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
made, unmade = os.pipe()
mapped, unmapped = os.pipe()
child = os.fork()
if child:
    os.read(made, 1)
    for name in ("uid_map", "gid_map"):
        open(f"/proc/{child}/{name}", "w").write("0 0 65536")
    os.write(unmapped, b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kernel.unshare(kernel.CLONE_NEWUSER)
os.write(unmade, b"x")
os.read(mapped, 1)
if limit:
    open("/proc/sys/user/max_user_namespaces", "w").write(limit)  # of this namespace and what is below it
async def main():
    backend = BubblewrapBackend(host_uid=int(uid) or None)
    await backend.start()
    await backend.aclose()
    print("started")
try:
    asyncio.run(main())
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("uid", [0, 60_001])
def test_without_user_namespaces_the_docker_backend_is_named(uid: int) -> None:
    """In a namespace whose kernel allows no further ones; the same namespace with them shows that nothing else is missing."""
    if os.getuid() != 0:
        pytest.skip("needs root to make a user namespace with more than one user")
    repository = str(Path(__file__).resolve().parents[2])

    def said(limit: str) -> str:
        command = [sys.executable, "-c", _WITHOUT_NAMESPACES, repository, str(uid), limit]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert said("") == "started\n"
    refused = said("0")
    assert refused.startswith("SandboxUnavailable this machine cannot run bubblewrap sandboxes: ")
    for words in ("user.max_user_namespaces", "Docker backend (sandbox = docker)", "never run without a sandbox"):
        assert words in refused


def test_without_an_engine_the_other_backend_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        asyncio.run(DockerBackend(base_url="unix:///nonexistent/docker.sock").start())
