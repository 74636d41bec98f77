"""`rsi doctor`: what this machine can do, each row tried and not assumed, and what to do about each failure."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

import psutil

from orchestrator.embedded import control, ports, postgres, prefect_server, processes, services, state
from orchestrator.embedded.layout import MIN_FREE_MB, Layout
from orchestrator.settings import Settings
from stages.errors import RsiError

COMFORTABLE_DISK_MB = 5_000  # torch and its friends are 2 GB; a demo's checkpoints and rows are below 1 GB
NEEDED_MEMORY_MB = 4_000  # all processes of the demo together
SANDBOX_TIMEOUT_S = 90.0


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, with less
    FAIL = "fail"  # `rsi demo` would fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One finding."""

    name: str
    level: Level
    found: str
    advice: str = ""  # what to do; empty when ok


def examine(settings: Settings, *, sandbox: bool = True) -> Iterator[Row]:
    """All rows, as they are found. `sandbox=False` leaves out the slow part (some seconds)."""
    checks: list[Callable[[Settings], Iterator[Row]]] = [
        _python,
        _machine,
        _home,
        _postgres,
        _ports,
        _services,
        _model,
    ]
    if sandbox:
        checks += [_sandbox, _docker]
    checks.append(_rootfs)
    for check in checks:
        try:
            yield from check(settings)
        except RsiError as error:
            yield Row(name=check.__name__.strip("_"), level=Level.FAIL, found=str(error), advice="see the message")


def _python(_: Settings) -> Iterator[Row]:
    # pip refuses an older Python, so there is nothing to judge.
    yield Row(name="Python", level=Level.OK, found=f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
    for package in ("torch", "transformers", "prefect", "psycopg"):
        if util.find_spec(package) is None:
            yield Row(
                name=package, level=Level.FAIL, found="not installed", advice="Run `make demo`, or `pip install -e .`."
            )
            continue
        found = metadata.version(package)
        if package == "torch":
            yield _torch(found)
        else:
            yield Row(name=package, level=Level.OK, found=found)


def _torch(version: str) -> Row:
    """Imported in a process of its own: a broken build may crash instead of raising."""
    import subprocess

    code = "import torch; print(torch.cuda.is_available(), torch.get_num_threads())"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(
            name="torch",
            level=Level.FAIL,
            found=f"{version} does not load: {last}",
            advice="Install torch again: `make clean`, `make demo`.",
        )
    cuda, threads = tried.stdout.split()
    return Row(
        name="torch", level=Level.OK, found=f"{version}, {'CUDA' if cuda == 'True' else 'no GPU'}, {threads} threads"
    )


def _machine(_: Settings) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Row(
        name="cores",
        level=Level.OK if cores >= 2 else Level.WARN,
        found=str(cores),
        advice="" if cores >= 2 else "The demo takes about twice as long on one core.",
    )
    memory = psutil.virtual_memory()
    free = memory.available / 1e6
    yield Row(
        name="memory",
        level=Level.OK if free >= NEEDED_MEMORY_MB else Level.WARN,
        found=f"{free / 1000:.1f} of {memory.total / 1e9:.1f} GB available",
        advice=""
        if free >= NEEDED_MEMORY_MB
        else f"The demo uses up to {NEEDED_MEMORY_MB / 1000:.0f} GB; close something.",
    )


def _home(settings: Settings) -> Iterator[Row]:
    Layout(settings.home).prepare()  # raises with its own advice
    free = shutil.disk_usage(settings.home).free / 1e6
    level = Level.OK if free >= COMFORTABLE_DISK_MB else Level.WARN if free >= MIN_FREE_MB else Level.FAIL
    yield Row(
        name="home",
        level=level,
        found=f"{settings.home}, writable, {free / 1000:.1f} GB free",
        advice="" if level is Level.OK else "Make room, or choose another folder with RSI_HOME.",
    )


def _postgres(settings: Settings) -> Iterator[Row]:
    if settings.database_url:
        yield _external_database(settings.database_url)
        return
    if postgres.is_running(settings.home):
        yield Row(name="Postgres", level=Level.OK, found=f"running in {settings.home / 'postgres'}")
        return
    # The real thing in a folder of its own: binaries, account, sockets and shared memory are all tried.
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rsi-doctor-") as folder:
        info = postgres.ensure(Path(folder), durable=False)
        postgres.stop(Path(folder))
    yield Row(
        name="Postgres",
        level=Level.OK,
        found=f"embedded {info.version}, started and stopped in {time.monotonic() - begun:.1f} s",
    )


def _external_database(url: str) -> Row:
    import psycopg
    from sqlalchemy import make_url

    plain = make_url(url).set(drivername="postgresql")
    shown = plain.render_as_string(hide_password=True)
    try:
        with psycopg.connect(plain.render_as_string(hide_password=False), connect_timeout=10) as connection:
            version = connection.info.server_version // 10000
    except psycopg.Error as error:
        return Row(
            name="Postgres",
            level=Level.FAIL,
            found=f"{shown}: {error}",
            advice="Correct DATABASE_URL, or unset it for the embedded one.",
        )
    if version < 15:
        return Row(
            name="Postgres",
            level=Level.FAIL,
            found=f"{shown} is version {version}",
            advice="Version 15 or newer is needed.",
        )
    return Row(name="Postgres", level=Level.OK, found=f"{shown}, version {version}")


def _ports(settings: Settings) -> Iterator[Row]:
    up = control.look(settings)
    wanted = [("console port", settings.console_port, settings.console_host, services.CONSOLE_OPTION, "console")]
    if not prefect_server.external():
        wanted.append(("Prefect port", settings.prefect_port, "127.0.0.1", services.PREFECT_OPTION, "prefect"))
    for name, port, host, option, service in wanted:
        if up and (own := up.service(service)) and own.port == port:
            yield Row(name=name, level=Level.OK, found=f"{port}, ours")
        elif ports.is_free(port, host):
            yield Row(name=name, level=Level.OK, found=f"{port}, free")
        else:
            who = ports.holder(port) or "a process that this user cannot see"
            yield Row(name=name, level=Level.FAIL, found=f"{port}, held by {who}", advice=f"Stop it, or {option}.")


def _services(settings: Settings) -> Iterator[Row]:
    layout = Layout(settings.home)
    published = control.look(settings)
    if published is None:
        last = state.read(layout)
        left = processes.marked(settings.home)
        if left:
            pids = ", ".join(str(p.pid) for p in left)
            yield Row(
                name="services",
                level=Level.WARN,
                found=f"no supervisor, but processes of it live: {pids}",
                advice="`rsi down` ends them; `rsi up` does, too.",
            )
        elif last and last.phase is state.Phase.READY:
            yield Row(
                name="services",
                level=Level.WARN,
                found="the supervisor was killed",
                advice="Nothing to do: `rsi up` cleans up and continues.",
            )
        elif last and last.error:
            yield Row(
                name="services",
                level=Level.WARN,
                found=f"the last start failed: {last.error.splitlines()[0]}",
                advice="Mend that, then `rsi up`.",
            )
        else:
            yield Row(name="services", level=Level.OK, found="not running")
        return
    for service in published.services:
        ready = service.state is state.ServiceState.READY
        yield Row(
            name=service.name,
            level=Level.OK if ready else Level.FAIL,
            found=f"{service.state}, {service.restarts} restart(s)"
            + (f": {service.message}" if service.message else ""),
            advice="" if ready else f"Read {service.log}.",
        )


def _model(_: Settings) -> Iterator[Row]:
    from orchestrator.inputs import shipped_model
    from stages.backends.learner.checkpoint import digest_weights

    folder = shipped_model()
    found = digest_weights(folder)
    recipe = folder / "rsi_recipe.json"
    recorded = json.loads(recipe.read_text())["weights_sha256"] if recipe.exists() else None
    if recorded == found:
        yield Row(name="model", level=Level.OK, found=f"shipped Base, digest {found[:12]} as recorded")
    else:
        yield Row(
            name="model",
            level=Level.FAIL,
            found=f"{folder} has digest {found[:12]}, recorded {(recorded or 'none')[:12]}",
            advice="Install the package again, or `rsi model build` and `rsi cycle launch --model`.",
        )


def _sandbox(_: Settings) -> Iterator[Row]:
    from stages.backends.sandbox.bubblewrap import BubblewrapBackend

    async def probe() -> list[Row]:
        backend = BubblewrapBackend(concurrency=4)
        try:
            await backend.start()
            found = await asyncio.wait_for(backend.capabilities(), SANDBOX_TIMEOUT_S)
        finally:
            await backend.aclose()
        return [
            Row(
                name=f"sandbox: {c.name}",
                level=Level.OK if c.enforced else Level.WARN,
                found=c.detail,
                advice="" if c.enforced else "Run as root, or use the Docker backend, where this matters.",
            )
            for c in found
        ]

    try:
        yield from asyncio.run(probe())
    except TimeoutError:
        yield Row(
            name="sandbox",
            level=Level.FAIL,
            found=f"no answer within {SANDBOX_TIMEOUT_S:.0f} s",
            advice="Use the Docker backend.",
        )


def _docker(_: Settings) -> Iterator[Row]:
    """Only reached, not tried: its rows take a container each. `rsi tasks run --backend docker` is the trial."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=5)
        version = client.version()["Version"]
        client.close()
    except (DockerException, OSError):
        yield Row(
            name="Docker engine",
            level=Level.OK,
            found="none answers at DOCKER_HOST or the default socket; only tasks with images of their own need one",
        )
        return
    yield Row(name="Docker engine", level=Level.OK, found=f"version {version} answers")


def _rootfs(settings: Settings) -> Iterator[Row]:
    from orchestrator.rootfs import for_sandboxes

    known, default = for_sandboxes(settings)  # raises for a default that was never built
    found = ", ".join(f"{name} ({r.source})" for name, r in known.items()) or "none prepared"
    used = f"sandboxes use {default}" if default else "sandboxes use this machine's /usr"
    yield Row(name="root filesystems", level=Level.OK, found=f"{found}; {used}")
