"""What sandboxes cost on this machine, each figure beside its target. Run it on a quiet machine; it takes under two minutes.

    python benchmarks/sandbox.py [--only start,rate] [--backends bubblewrap,user,docker] [--attempts 2000] [--alive 256] [--json]

`start`: from nothing to the first command's answer. `shell`: one command in the persistent bash. `verify`: agent dead, tests run in
a fresh jail. `rate`: starts a second, eight at a time. `alive`: how many answer at once. `leftovers`: whole attempts in a row, then
what is still there. Docker (where an engine answers) is measured with fewer attempts, next to a plain `docker run` of a shell.
Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import docker

from stages.backends.protocols import SandboxBackend
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.domain import CheckSpec, Limits, Stratum, Task
from stages.errors import SandboxUnavailable

PARTS = ("start", "shell", "verify", "rate", "alive", "leftovers")
BACKENDS = ("bubblewrap", "user", "docker")
_TEST_SH = """#!/bin/bash
s=failed rc=1
[ "$(< done.txt)" = yes ] && s=passed rc=0
printf '{"results":{"tests":[{"name":"done","status":"%s"}]}}' $s > /logs/verifier/ctrf.json
exit $rc
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. `target` is empty where there is none."""

    backend: str
    name: str
    value: float
    unit: str = ""
    target: str = ""
    met: bool = True


def at_most(limit: float, unit: str, **named: object) -> Figure:
    value = float(named.pop("value"))  # type: ignore[arg-type]
    return Figure(value=value, unit=unit, target=f"≤ {limit:g}", met=value <= limit, **named)  # type: ignore[arg-type]


def at_least(limit: float, unit: str, **named: object) -> Figure:
    value = float(named.pop("value"))  # type: ignore[arg-type]
    return Figure(value=value, unit=unit, target=f"≥ {limit:g}", met=value >= limit, **named)  # type: ignore[arg-type]


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


def traces(backend: SandboxBackend) -> dict[str, int]:
    """What attempts can leave, counted: processes, cgroups, mounts and tmpfs, descriptors, containers, volumes, temporary files."""
    out = {
        "mounts of this machine": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }
    if isinstance(backend, BubblewrapBackend):
        guard = backend.host_pid
        (host,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        own = f"/rsi-{guard}-"
        out |= {
            "processes": len(Path(f"/proc/{host}/task/{host}/children").read_text().split()),
            "cgroups": sum(
                own in f and d.startswith("rsi-a") for f, dirs, _ in os.walk("/sys/fs/cgroup") for d in dirs
            ),
            "mounts and tmpfs of the host": len(Path(f"/proc/{host}/mountinfo").read_text().splitlines()),
            "descriptors of the host": len(os.listdir(f"/proc/{host}/fd")),
        }
    elif isinstance(backend, DockerBackend):
        mine = {"label": [f"{k}={v}" for k, v in backend.labels().items()]}
        out |= {
            "containers": len(backend.client.containers.list(all=True, filters=mine, ignore_removed=True)),
            "volumes": len(backend.client.volumes.list(filters=mine)),
        }
        del out["mounts of this machine"]  # an engine of this machine mounts where it likes
    return out


class Measure:
    """One backend's figures, part by part."""

    def __init__(self, name: str, backend: SandboxBackend, task: Task) -> None:
        self._name, self._backend, self._task = name, backend, task
        self._light = not isinstance(backend, DockerBackend)  # a container takes a second

    async def run(self, only: set[str], attempts: int, alive: int) -> list[Figure]:
        found: list[Figure] = []
        if only & {"start", "shell", "verify"}:
            found += [f for part, f in await self._singly() if part in only]
        if "rate" in only:
            found += await self._rate()
        if "alive" in only:
            found += await self._alive(alive if self._light else min(alive, 16))
        if "leftovers" in only:
            found += await self._leftovers(attempts)
        return found

    async def _singly(self) -> list[tuple[str, Figure]]:
        starts, commands, verifies = [], [], []
        for _ in range(40 if self._light else 6):
            with timed(starts):
                sandbox = await self._backend.open(self._task)
                await sandbox.run("true")
            for _ in range(40):
                with timed(commands):
                    await sandbox.run(":")
            await sandbox.run("echo yes > done.txt")
            with timed(verifies):
                report = await sandbox.verify()
            assert report.verdict == "passed", report
            await sandbox.close()
        start, command, verify = (1e3 * statistics.median(x) for x in (starts, commands, verifies))
        named = {"backend": self._name, "name": "start to first command, median", "value": start}
        return [
            ("start", at_most(25, "ms", **named) if self._light else Figure(**named, unit="ms")),  # type: ignore[arg-type]
            ("shell", at_most(1, "ms", backend=self._name, name="command in the shell, median", value=command)),
            ("verify", Figure(backend=self._name, name="verify, median", value=verify, unit="ms")),
        ]

    async def _rate(self) -> list[Figure]:
        guard = getattr(self._backend, "host_pid", None)
        gate, number = asyncio.Semaphore(8 if self._light else 4), 300 if self._light else 8

        async def one() -> None:
            async with gate:
                sandbox = await self._backend.open(self._task)
                await sandbox.run("echo yes > done.txt")
                await sandbox.close()

        took: list[float] = []
        cpu = cpu_seconds(guard) if guard else 0.0
        with timed(took):
            await asyncio.gather(*(one() for _ in range(number)))
        named = {"backend": self._name, "name": "starts a second", "value": number / took[0]}
        if not guard:
            return [Figure(**named)]  # type: ignore[arg-type]
        spent = 1e3 * (cpu_seconds(guard) - cpu) / number
        processor = Figure(backend=self._name, name="processor time a start", value=spent, unit="ms")
        return [at_least(150, "", **named), processor]

    async def _alive(self, number: int) -> list[Figure]:
        before = available_mb()
        boxes = await asyncio.gather(*(self._backend.open(self._task) for _ in range(number)))
        answers = await asyncio.gather(*(b.run("echo alive") for b in boxes))
        each = (before - available_mb()) / max(number, 1)
        await asyncio.gather(*(b.close() for b in boxes))
        answered = sum(a.output == b"alive\n" for a in answers)
        return [
            at_least(number, "", backend=self._name, name="alive at once", value=answered),
            Figure(backend=self._name, name="memory of one alive", value=each, unit="MB"),
        ]

    async def _leftovers(self, attempts: int) -> list[Figure]:
        gate = asyncio.Semaphore(8 if self._light else 4)

        async def whole() -> None:
            async with gate:
                sandbox = await self._backend.open(self._task)
                await sandbox.run("echo yes > done.txt; sleep 900 & setsid sleep 900 & disown -a")
                assert (await sandbox.verify()).verdict == "passed"
                await sandbox.close()

        await whole()  # shared volumes, threads
        before, took = traces(self._backend), []
        with timed(took):
            await asyncio.gather(*(whole() for _ in range(attempts)))
        await asyncio.sleep(1.0)
        after = traces(self._backend)
        name = f"{attempts} whole attempts in a row"
        return [Figure(backend=self._name, name=name, value=took[0], unit="s")] + [
            at_most(0, "", backend=self._name, name=f"  left behind: {kind}", value=max(0, after[kind] - before[kind]))
            for kind in before
        ]


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def docker_run_ms(client: docker.DockerClient, image: str) -> float:
    """`docker run --rm` of a shell that does nothing, median of 5."""
    times: list[float] = []
    for _ in range(5):
        with timed(times):
            client.containers.run(image, ["/bin/bash", "-c", ":"], remove=True, network_mode="none")
    return 1e3 * statistics.median(times)


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    return 0.0


async def measure(name: str, task: Task, only: set[str], attempts: int, alive: int) -> list[Figure]:
    """All figures of one backend; none where it cannot run here."""
    backend: SandboxBackend
    if name == "docker":
        backend, attempts = DockerBackend(image="prepared"), attempts // 100 + 1
    else:
        backend = BubblewrapBackend(host_uid=60_001 if name == "user" else None)
        attempts = attempts if name == "bubblewrap" else attempts // 4
    try:
        await backend.start()
    except SandboxUnavailable as error:
        print(f"{name}: {error}", file=sys.stderr)
        return []
    try:
        found = await Measure(name, backend, task).run(only, attempts, alive)
        if isinstance(backend, DockerBackend) and "start" in only:
            value = await asyncio.to_thread(docker_run_ms, backend.client, await backend.images.of(task))
            found.insert(0, Figure(backend=name, name="docker run, median", value=value, unit="ms"))
        return found
    finally:
        await backend.aclose()


def ratio(figures: list[Figure]) -> list[Figure]:
    """`docker run` over bubblewrap's start, where both were measured."""
    run = [f.value for f in figures if f.name.startswith("docker run")]
    start = [f.value for f in figures if f.backend == "bubblewrap" and f.name.startswith("start to first")]
    if not run or not start:
        return []
    return [at_least(15, "×", backend="both", name="docker run / bubblewrap start", value=run[0] / start[0])]


def chosen(text: str, known: tuple[str, ...]) -> set[str]:
    words = {w.strip() for w in text.split(",") if w.strip()}
    if words - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(words - set(known)))}: use {', '.join(known)}")
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda t: chosen(t, PARTS), default=set(PARTS), metavar=",".join(PARTS))
    parser.add_argument(
        "--backends", type=lambda t: chosen(t, BACKENDS), default=set(BACKENDS), metavar=",".join(BACKENDS)
    )
    parser.add_argument(
        "--attempts", type=int, default=2000, help="for bubblewrap; a quarter as a normal user, 1 %% on Docker"
    )
    parser.add_argument("--alive", type=int, default=256, help="Docker: at most 16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="rsi-bench-") as folder:
        tempfile.tempdir = folder  # so that every file there is ours
        task = small_task(Path(folder) / "task")
        for name in (n for n in BACKENDS if n in options.backends and (n != "user" or os.getuid() == 0)):
            figures += asyncio.run(measure(name, task, options.only, options.attempts, options.alive))
    figures += ratio(figures)
    if options.json:
        print(json.dumps({"load": load, "figures": [asdict(f) for f in figures]}, indent=1))
    else:
        print(
            f"load average {load:.1f} on {os.cpu_count()} cores{': not quiet, the times mean little' if load > 1 else ''}"
        )
        for f in figures:
            verdict = ("met" if f.met else "MISSED") if f.target else ""
            print(f"{f.backend:11} {f.name:46} {f.value:9.2f} {f.unit:3} {f.target:7} {verdict}")
    return 0 if all(f.met for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
