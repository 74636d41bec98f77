"""The CPU images, built without a registry: a Debian root and the wheels of our dependencies become the base image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import docker

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,ca-certificates"


def why_none() -> str | None:
    """Why no base image can be made here; None when one can."""
    if os.getuid() != 0:
        return "not root: debootstrap needs it"
    if shutil.which("debootstrap", path=os.environ["PATH"] + ":/usr/sbin") is None:
        return "no debootstrap: apt-get install debootstrap"
    if sys.version_info[:2] != (3, 11):
        return "the wheels are of this Python, and Debian 12 has 3.11"
    return None


def debian(folder: Path) -> None:
    """A minimal Debian 12 with Python in `folder` (two minutes, 280 MB)."""
    program = shutil.which("debootstrap", path=os.environ["PATH"] + ":/usr/sbin")
    assert program is not None
    subprocess.run(
        [program, "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.rmtree(folder / "var/cache/apt", ignore_errors=True)


def wheels(folder: Path) -> None:
    """Everything that pip needs to install us, at the versions of constraints.txt (a minute, 350 MB)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-c", ROOT / "constraints.txt", "-d", folder,
         *wanted, *extras["kubernetes"], *extras["oidc"], "async-timeout"],  # the last one: for Debian's 3.11.2
        check=True,
    )  # fmt: skip


def base_image(client: docker.DockerClient, folder: Path) -> None:
    """The root with the wheels in it, and a pip that takes them and nothing else, as `rsi-base:test`."""
    debian(folder)
    wheels(folder / "wheels")
    (folder / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    with subprocess.Popen(["tar", "--numeric-owner", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as archive:
        client.api.import_image_from_stream(archive.stdout, repository="rsi-base", tag="test")
    assert archive.returncode == 0


def build(client: docker.DockerClient, target: str) -> None:
    """One target of cpu.Dockerfile as `rsi-TARGET`, without network."""
    client.images.build(
        path=str(ROOT), dockerfile="infra/images/cpu.Dockerfile", target=target, tag=f"rsi-{target}", rm=True,
        forcerm=True, network_mode="none", buildargs={"BASE_IMAGE": "rsi-base:test"},
    )  # fmt: skip
