"""The sandbox protocol: one persistent bash, limits, a verifier in a fresh jail, nothing left behind. Every backend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from stages.backends.protocols import Sandbox
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.backends.sandbox.docker_engine import LABEL
from stages.domain import CheckStatus, Verdict
from stages.errors import SandboxError, SandboxUnavailable, TaskError
from tests.integration.sandbox_kit import (
    CHECKS,
    KINDS,
    SOLVE_SH,
    TEST_SH,
    Machine,
    make_task,
    open_machine,
    processes_below,
    skip_slow_half,
)

ON_DOCKER = frozenset(
    {
        "test_files_cwd_environment_and_exit_codes_survive_turns",
        "test_output_is_exact_bytes",
        "test_timeout_ends_what_the_command_started_and_nothing_else",
        "test_huge_output_is_capped_with_head_and_tail",
        "test_verdicts",
        "test_agent_is_dead_before_the_tests_run",
        "test_breaking_the_verifier_does_not_pay",
        "test_nothing_is_left_after_close",
    }
)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    out = open_machine(request)
    yield out
    out.close()


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ON_DOCKER)
    return started


# --------------------------------------------------------------------------- the shell


def test_files_cwd_environment_and_exit_codes_survive_turns(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.say("pwd; cat input/data.txt") == "/app\ndata"
        assert box.run("export A='x  y'; B=2; cd input; f() { echo f$1; }; false").exit_code == 1
        assert box.say('echo "$A" $B $PWD; f 3') == "x  y 2 /app/input\nf3"
        assert box.run("(exit 37)").exit_code == 37
        assert box.run("sleep 9 & kill -TERM $!; wait $!").exit_code == 143


def test_output_is_exact_bytes(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        wanted = bytes(range(256)) * 8
        octal = "".join(f"\\{b:03o}" for b in wanted)
        assert box.run(f"printf '{octal}'").output == wanted
        assert box.run("printf 'a\\nb'; printf 'c' >&2").output == b"a\nbc"
        assert box.run("").output == b""


@pytest.mark.parametrize(
    "command",
    [
        "echo 'open",
        'echo "open',
        "cat <<X\nopen",
        "if true; then",
        "$((",
        "exec >/dev/null; exec 2>&1",
        "{",
        "trap '' TERM",
    ],
)
def test_broken_commands_leave_the_shell_usable(machine: Machine, tmp_path: Path, command: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run(command, timeout_s=5)
        assert box.say("echo fine") == "fine"


def test_long_commands_pass(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        text = "é" * 75_000
        assert box.say(f"x='{text}'; echo ${{#x}}") in ("75000", "150000")


def test_nul_in_a_command_is_refused_without_running_it(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        result = box.run("touch made\0; echo no")
        assert result.exit_code == 2
        assert "NUL" in result.output.decode()
        assert box.say("ls made 2>/dev/null") == ""


def test_timeout_ends_what_the_command_started_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("sleep 300 & echo $! > keep; X=1")
        result = box.run("echo before; sleep 200 & sleep 100", timeout_s=0.4)
        assert result.timed_out
        assert result.exit_code is None
        assert result.output.startswith(b"before")
        assert result.duration_s < 3
        assert (
            box.say("kill -0 $(cat keep) && echo kept; ps -eo args | grep -cE '^sleep [12]00'; echo $X") == "kept\n0\n1"
        )


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "trap '' TERM INT HUP; sleep 50", "read -r x < /dev/zero; cat"]
)
def test_stuck_shells_come_back(machine: Machine, tmp_path: Path, command: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("export KEPT=yes; cd input")
        result = box.run(command, timeout_s=0.4)
        assert result.timed_out
        assert box.say("echo $KEPT $PWD") == "yes /app/input"


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "exec true", "kill -9 -1", "set -e; false", "exec sleep 0.01"])
def test_restart_keeps_cwd_and_environment_and_says_so(machine: Machine, tmp_path: Path, end: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("export KEPT=$'two\\nlines'; cd input; echo x > file")
        result = box.run(end)
        if end == "kill -9 -1":  # bash itself may live a little longer than the rest and answer once more
            for _ in range(200):
                if result.restarted:
                    break
                result = box.run("sleep 0.01")
        assert result.restarted
        assert result.exit_code is None or end == "kill -9 -1"
        again = box.run('echo "$KEPT" $PWD; cat file')
        assert not again.restarted
        assert again.output == b"two\nlines /app/input\nx\n"


def test_environment_changed_in_the_command_that_exits_survives(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.run("export LATE=1; cd /tmp; exit 0").restarted
        assert box.say("echo $LATE $PWD") == "1 /tmp"


def test_huge_output_is_capped_with_head_and_tail(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        result = box.run("echo HEAD; head -c 100000000 /dev/zero; echo TAIL")
        assert result.exit_code == 0
        assert len(result.output) < 70_000
        assert result.output.startswith(b"HEAD\n")
        assert result.output.endswith(b"TAIL\n")
        assert result.truncated_bytes + len(result.output) >= 100_000_010


def test_background_spam_does_not_hold_a_turn(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("yes spam & ")
        began = time.monotonic()
        assert box.run("true").exit_code == 0
        assert time.monotonic() - began < 3


def test_forged_reports_fool_only_their_author(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run(
            "printf 'R0 /etc\\0junk\\0!7\\0R9 x\\0\\0' >&199; head -c 6000000 /dev/zero | tr '\\0' A >&199 &",
            timeout_s=30,
        )
        box.run("true", timeout_s=30)
        assert box.say("echo alive", timeout_s=30) == "alive"


# --------------------------------------------------------------------------- the verifier


def test_verdicts(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    wanted = {
        "true": (Verdict.FAILED, ["failed", "failed", "passed"]),
        "echo 42 > answer.txt": (Verdict.FAILED, ["passed", "failed", "passed"]),
        SOLVE_SH: (Verdict.PASSED, ["passed", "passed", "passed"]),
        SOLVE_SH + "echo other > input/data.txt": (Verdict.FAILED, ["passed", "passed", "failed"]),
    }
    for command, (verdict, statuses) in wanted.items():
        with machine.box(task) as box:
            box.run(command)
            report = box.verify()
            assert report.verdict is verdict
            assert [c.status for c in report.checks] == statuses
            assert [(c.id, c.role) for c in report.checks] == [(c.id, c.role) for c in CHECKS]
            assert box.verify() == report


def test_tests_and_solution_exist_only_after_the_agent(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.say("ls -d /tests /solution /logs /store /ws /vlogs /opt/rsi 2>/dev/null") == ""
        assert box.say("find / -xdev \\( -name test.sh -o -name solve.sh \\) 2>/dev/null") == ""


_WATCH = """
set -- /proc/[0-9]*; echo "processes: $#"
first=$(ls); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.03; [ "$(ls)" = "$first" ] || echo "changed: $(ls)"; done
"""


def test_agent_is_dead_before_the_tests_run(machine: Machine, tmp_path: Path) -> None:
    """A process of the agent that keeps changing the workspace changes nothing while the tests run."""
    with machine.box(make_task(tmp_path, test_sh=_WATCH + TEST_SH)) as box:
        box.run("(while :; do : > a; sleep 0.01; rm a; sleep 0.01; done) >/dev/null 2>&1 & disown")
        assert box.say("for i in {1..200}; do [ -e a ] && echo made && break; sleep 0.01; done") == "made"
        report = box.verify()
        assert "changed" not in report.log
        seen = int(report.log.partition("processes: ")[2].split()[0])
        assert seen == 1 if machine.kind != "docker" else seen <= 6  # there: init, main process, wrapper, test.sh
        with pytest.raises(SandboxError, match="open a new sandbox"):
            box.run("echo hello")


def test_a_missing_or_skipped_check_has_not_passed(machine: Machine, tmp_path: Path) -> None:
    for rows in ('{"name":"answer","status":"passed"}', '{"name":"answer","status":"passed"},{"name":"listing","status":"skipped"},{"name":"untouched","status":"passed"}'):  # fmt: skip
        sh = f"""echo '{{"results":{{"tests":[{rows}]}}}}' > /logs/verifier/ctrf.json"""
        with machine.box(make_task(tmp_path, test_sh=sh)) as box:
            report = box.verify()
            assert report.verdict is Verdict.FAILED
            assert report.checks[1].status is CheckStatus.NOT_RUN


@pytest.mark.parametrize(
    ("test_sh", "verdict"),
    [
        ("exit 0", Verdict.PASSED),
        ("exit 1", Verdict.FAILED),
        ("echo 1 > /logs/verifier/reward.txt", Verdict.PASSED),
        ("echo 0 > /logs/verifier/reward.txt", Verdict.FAILED),
        ("echo 1 > /logs/verifier/reward.txt; exit 1", Verdict.FAILED),
        ("echo '{\"reward\": 1.0}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt", Verdict.PASSED),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', Verdict.FAILED),
        ("echo nan > /logs/verifier/reward.txt", Verdict.VERIFIER_ERROR),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", Verdict.VERIFIER_ERROR),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", Verdict.VERIFIER_ERROR),
        ("echo '{]' > /logs/verifier/ctrf.json", Verdict.VERIFIER_ERROR),
        ("printf '\\377\\376' > /logs/verifier/reward.txt", Verdict.VERIFIER_ERROR),
        ("kill -9 $$; exit 127", Verdict.VERIFIER_ERROR),
        ("sleep 50", Verdict.VERIFIER_ERROR),
    ],
)
def test_result_files_without_a_manifest(machine: Machine, tmp_path: Path, test_sh: str, verdict: Verdict) -> None:
    limit = 0.7 if "sleep" in test_sh else 30.0
    with machine.box(make_task(tmp_path, test_sh=test_sh, checks=(), verifier_timeout_s=limit)) as box:
        assert box.verify().verdict is verdict


def test_breaking_the_verifier_does_not_pay(machine: Machine, tmp_path: Path) -> None:
    """The same silence is the agent's fault where a solved pristine image gives a verdict, and ours where it does not."""
    sh = "[ -e trap ] && sleep 60\n" + TEST_SH
    with machine.box(make_task(tmp_path, test_sh=sh, verifier_timeout_s=3.0)) as box:
        box.run(SOLVE_SH + "touch trap")
        report = box.verify()
        assert report.verdict is Verdict.FAILED
        assert report.flags == ("broke_verifier",)
        assert {c.status for c in report.checks} == {CheckStatus.NOT_RUN}


def test_reference_solution_runs_as_an_agent(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert machine.wait(box.sandbox.run_solution()).exit_code == 0  # type: ignore[attr-defined]
        assert box.verify().verdict is Verdict.PASSED


# --------------------------------------------------------------------------- backend


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


def test_nothing_is_left_after_close(machine: Machine, tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    task = make_task(tmp_path)
    for _ in range(5 if machine.kind != "docker" else 2):
        with machine.box(task) as box:
            box.run("sleep 500 & setsid sleep 500 & (trap '' TERM; sleep 500) & disown -a")
            box.verify()
    machine.wait_for_nothing()
    if machine.kind != "docker":  # an engine of this machine mounts where it likes
        assert Path("/proc/self/mountinfo").read_text() == mounts


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
    for files, workdir in (({"../x": b""}, "/app"), ({"/x": b""}, "/app"), ({}, "/usr"), ({}, "app")):
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


def test_without_user_namespaces_the_docker_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BubblewrapBackend()

    async def refused(*_: object) -> None:
        raise SandboxError("unshare(0x30020000): Operation not permitted")

    monkeypatch.setattr("stages.backends.sandbox.link.HostLink.start", refused)
    with pytest.raises(SandboxUnavailable, match="Docker"):
        asyncio.run(backend.start())


_VICTIM = """
import asyncio, pathlib, sys
sys.path.insert(0, {repository!r})
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from tests.integration.sandbox_kit import make_task
async def main():
    backend = BubblewrapBackend()
    await backend.start()
    for _ in range(3):
        sandbox = await backend.open(make_task(pathlib.Path({folder!r})))
        await sandbox.run("sleep 555 & setsid sleep 555 &")
    print(backend.host_pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["parent", "host"])
def test_kill_minus_nine_takes_everything_along(tmp_path: Path, victim: str) -> None:
    repository = str(Path(__file__).resolve().parents[2])
    code = _VICTIM.format(repository=repository, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        guard = int(process.stdout.readline())
        try:
            below = processes_below(guard)
            assert len(below) > 9
            os.kill(process.pid if victim == "parent" else guard, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
        finally:
            process.kill()


_DOCKER_VICTIM = """
import asyncio, pathlib, sys
sys.path.insert(0, {repository!r})
from stages.backends.sandbox.docker import DockerBackend
from tests.integration.sandbox_kit import make_task
async def main():
    backend = DockerBackend(image="prepared", base_url={url!r})
    await backend.start()
    sandbox = await backend.open(make_task(pathlib.Path({folder!r})))
    await sandbox.run("sleep 555 &")
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.docker
def test_kill_minus_nine_ends_containers_and_the_next_start_sweeps(tmp_path: Path, docker_url: str) -> None:
    client = docker.DockerClient(base_url=docker_url)
    repository = str(Path(__file__).resolve().parents[2])
    code = _DOCKER_VICTIM.format(repository=repository, folder=str(tmp_path), url=docker_url)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            dead = {
                c.id
                for c in client.containers.list(filters={"label": LABEL}, ignore_removed=True)
                if f":{process.pid}:" in c.labels[LABEL]
            }
            assert len(dead) == 1
        finally:
            process.kill()
    deadline = time.monotonic() + 20
    while dead & {c.id for c in client.containers.list(all=True, ignore_removed=True)} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not dead & {c.id for c in client.containers.list(all=True, ignore_removed=True)}
    backend = DockerBackend(image="prepared", base_url=docker_url)
    asyncio.run(backend.start())
    asyncio.run(backend.aclose())
    owners = [v.attrs["Labels"][LABEL] for v in client.volumes.list(filters={"label": LABEL})]
    assert not any(f":{process.pid}:" in owner for owner in owners)
    client.close()


def test_without_an_engine_the_other_backend_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        asyncio.run(DockerBackend(base_url="unix:///nonexistent/docker.sock").start())
