"""A private Docker engine for tests: own folders, own socket, no registry, no bridge; or the one that DOCKER_HOST names."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import requests


def why_none() -> str | None:
    """Why no engine can be had here; None when one can."""
    if os.environ.get("DOCKER_HOST"):
        return None
    if os.getuid() != 0:
        return "not root: dockerd needs it (set DOCKER_HOST to use an engine that runs)"
    for program in ("dockerd", "iptables"):
        if shutil.which(program) is None and not os.path.exists(f"/usr/sbin/{program}"):
            return f"no {program}: apt-get install -y --no-install-recommends docker.io iptables pigz tini"
    return None


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The engine's URL. A private one ends with its folders when the block does."""
    if os.environ.get("DOCKER_HOST"):
        yield os.environ["DOCKER_HOST"]
        return
    folder = Path(tempfile.mkdtemp(prefix="rsi-dockerd-"))
    url = f"unix://{folder}/d.sock"
    log = open(folder / "log", "wb")  # noqa: SIM115 - closed below, after the engine has ended
    process = subprocess.Popen(
        [
            shutil.which("dockerd") or "/usr/sbin/dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec",
            "--pidfile", f"{folder}/pid", "-H", url, "--storage-driver", "overlay2", "--iptables=false", "--ip6tables=false",
            "--ip-forward=false", "--ip-masq=false", "--bridge=none",
        ],
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        _wait(url, process, folder)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()
        _unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
            client = docker.DockerClient(base_url=url, timeout=5)
            client.ping()
            client.close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"dockerd did not start:\n{(folder / 'log').read_text(errors='replace')[-3000:]}")


def _unmount_below(folder: Path) -> None:
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if line.split()[4].startswith(str(folder)):
            subprocess.run(["umount", "-l", line.split()[4]], check=False)
