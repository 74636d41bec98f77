"""What sandboxes cost on this machine. Run: `python benchmarks/sandbox.py [--attempts 2000] [--alive 256] [--json]`.

Prints, for bubblewrap as this user (and as a normal user when run as root) and for Docker where an engine runs: start to first
command, commands in the persistent shell, verifying, starts a second, many alive at once, and what is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import docker

from stages.backends.protocols import SandboxBackend
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.domain import CheckSpec, Limits, Stratum, Task
from stages.errors import SandboxUnavailable

_TEST_SH = """#!/bin/bash
s=failed rc=1
[ "$(< done.txt)" = yes ] && s=passed rc=0
printf '{"results":{"tests":[{"name":"done","status":"%s"}]}}' $s > /logs/verifier/ctrf.json
exit $rc
"""


_MOUNTS_BEFORE = len(Path("/proc/self/mountinfo").read_text().splitlines())


def small_task(folder: Path) -> Task:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text(_TEST_SH)
    return Task(
        id="bench",
        suite="bench",
        family="bench",
        stratum=Stratum.EASY,
        instruction="",
        root=folder,
        digest="bench",
        files={f"data/{i}.txt": b"x" * 200 for i in range(5)},
        checks=(CheckSpec(id="done"),),
        limits=Limits(command_timeout_s=60.0),
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of the processes below `pid`, dead ones included."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def left_behind(guard: int | None) -> dict[str, int]:
    """Processes below the host (itself aside), our cgroups, mounts that were not there before."""
    below = 0
    if guard is not None:
        host = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        below = sum(len(Path(f"/proc/{p}/task/{p}/children").read_text().split()) for p in host)
    own = f"/rsi-{guard}-"
    groups = sum(own in f and d.startswith("rsi-a") for f, dirs, _ in os.walk("/sys/fs/cgroup") for d in dirs)
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines()) - _MOUNTS_BEFORE
    return {"processes": below, "cgroups": groups, "mounts": mounts}


async def measure(
    backend: SandboxBackend, task: Task, *, attempts: int, alive: int, at_once: int = 8, rounds: int = 25
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    began = time.perf_counter()
    await backend.start()
    out["backend start, ms"] = 1e3 * (time.perf_counter() - began)
    guard = getattr(backend, "host_pid", None)
    starts, commands, verifies = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        sandbox = await backend.open(task)
        await sandbox.run("true")
        starts.append(time.perf_counter() - began)
        for _ in range(40):
            began = time.perf_counter()
            await sandbox.run(":")
            commands.append(time.perf_counter() - began)
        await sandbox.run("echo yes > done.txt")
        began = time.perf_counter()
        report = await sandbox.verify()
        verifies.append(time.perf_counter() - began)
        assert report.verdict == "passed", report
        await sandbox.close()
    out["start to first command, median ms"] = 1e3 * statistics.median(starts)
    out["command in the shell, median ms"] = 1e3 * statistics.median(commands)
    out["verify, median ms"] = 1e3 * statistics.median(verifies)

    began, cpu = time.perf_counter(), cpu_seconds(guard) if guard else 0.0
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            sandbox = await backend.open(task)
            await sandbox.run("echo yes > done.txt")
            await sandbox.close()

    number = min(attempts, 300 if guard else 8)
    await asyncio.gather(*(one() for _ in range(number)))
    out["starts a second"] = number / (time.perf_counter() - began)
    if guard:
        out["processor time a start, ms"] = 1e3 * (cpu_seconds(guard) - cpu) / number

    available = _available_mb()
    boxes = await asyncio.gather(*(backend.open(task) for _ in range(alive)))
    answers = await asyncio.gather(*(b.run("echo alive") for b in boxes))
    out["alive at once"] = sum(a.output == b"alive\n" for a in answers)
    out["memory of one alive, MB"] = (available - _available_mb()) / max(alive, 1)
    await asyncio.gather(*(b.close() for b in boxes))

    began = time.perf_counter()

    async def whole() -> None:
        async with gate:
            sandbox = await backend.open(task)
            await sandbox.run("echo yes > done.txt; sleep 900 & ")
            await sandbox.verify()
            await sandbox.close()

    await asyncio.gather(*(whole() for _ in range(attempts)))
    out[f"{attempts} whole attempts, s"] = time.perf_counter() - began
    await asyncio.sleep(0.3)
    out["left behind"] = left_behind(guard)
    await backend.aclose()
    return out


def docker_run_ms(client: docker.DockerClient, image: str) -> float:
    """`docker run --rm` of a shell that does nothing, median of 5."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        client.containers.run(image, ["/bin/bash", "-c", ":"], remove=True, network_mode="none")
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


async def measure_docker(task: Task, attempts: int, alive: int) -> dict[str, Any] | None:
    """The Docker backend on the engine of DOCKER_HOST or the default socket; None without one."""
    backend = DockerBackend(image="prepared")
    try:
        await backend.start()
    except SandboxUnavailable:
        return None
    image = await backend.images.of(task)
    run_ms = await asyncio.to_thread(docker_run_ms, backend.client, image)
    out = await measure(backend, task, attempts=attempts, alive=alive, at_once=4, rounds=8)
    return {"docker run, median ms": run_ms, **out}


def _available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=2000)
    parser.add_argument("--alive", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, Any] = {"load average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="rsi-bench-") as folder:
        task = small_task(Path(folder) / "task")
        names = {"bubblewrap": None} | ({"bubblewrap, normal user": 60_001} if os.getuid() == 0 else {})
        for name, uid in names.items():
            rows[name] = asyncio.run(
                measure(BubblewrapBackend(host_uid=uid), task, attempts=options.attempts, alive=options.alive)
            )
        docker_rows = asyncio.run(
            measure_docker(task, attempts=options.attempts // 100 + 1, alive=min(options.alive, 16))
        )
        rows["docker"] = docker_rows
        if docker_rows:
            rows["docker run / bubblewrap start"] = (
                docker_rows["docker run, median ms"] / rows["bubblewrap"]["start to first command, median ms"]
            )
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for name, value in rows.items():
        print(name if isinstance(value, dict) else f"{name}: {value if value is not None else 'no engine here'}")
        for key, number in value.items() if isinstance(value, dict) else ():
            print(f"  {key:36} {number:.2f}" if isinstance(number, float) else f"  {key:36} {number}")


if __name__ == "__main__":
    main()
