"""The CPU images, built without a registry: a Debian root and the wheels of our dependencies become the base image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import docker
from docker.utils import tar

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,ca-certificates"
TAG = "test"  # never the version, which somebody may have built on this engine
TARGETS = ("worker-cpu", "console")


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


@contextmanager
def images(client: docker.DockerClient) -> Iterator[None]:
    """`rsi-worker-cpu:test` and `rsi-console:test`, built without network on a base of our own; gone after the block."""
    try:
        _base_image(client)
        # One context for both targets: a file that is edited meanwhile would have everything built and copied twice.
        lines = (ROOT / ".dockerignore").read_text().splitlines()
        with tar(str(ROOT), exclude=[line for line in lines if line and line[0] != "#"]) as context:
            for target in TARGETS:
                context.seek(0)
                client.images.build(
                    fileobj=context, custom_context=True, dockerfile="infra/images/cpu.Dockerfile",
                    target=target, tag=f"rsi-{target}:{TAG}", rm=True, forcerm=True, network_mode="none",
                    buildargs={"BASE_IMAGE": f"rsi-base:{TAG}"},
                )  # fmt: skip
        yield
    finally:
        for name in (*TARGETS, "base"):
            if client.images.list(f"rsi-{name}:{TAG}"):
                client.images.remove(f"rsi-{name}:{TAG}", force=True)


def _base_image(client: docker.DockerClient) -> None:
    """The root with the wheels in it, and a pip that takes them and nothing else, as `rsi-base:test`."""
    with TemporaryDirectory(prefix="rsi-base-") as folder:
        root = Path(folder) / "root"
        with ThreadPoolExecutor() as both:  # one waits for mirrors and dpkg, the other for an index
            made = [both.submit(debian, root), both.submit(wheels, Path(folder) / "wheels")]
        for part in made:
            part.result()
        (Path(folder) / "wheels").rename(root / "wheels")
        (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        with subprocess.Popen(["tar", "--numeric-owner", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
            client.api.import_image_from_stream(archive.stdout, repository="rsi-base", tag=TAG)
        assert archive.returncode == 0
