"""The writable folders of one attempt's container, carried into another attempt's between two steps of a task."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from typing import IO

import docker
from docker.errors import DockerException

from stages.backends.sandbox.docker_engine import read_archive
from stages.errors import SandboxError


def carried(
    api: docker.APIClient, container: str, points: Sequence[str], *, uid: int, limit: int
) -> list[tuple[str, IO[bytes]]]:
    """(mount point, tar of what lies there, owned by `uid` and relative to it). Nothing is written to this machine's folders.

    Raises SandboxError beyond `limit` bytes in one folder, and when the engine fails.
    """
    out: list[tuple[str, IO[bytes]]] = []
    for point in points:
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - handed on
        try:
            with read_archive(api, container, point, limit) as source, tarfile.open(fileobj=spool, mode="w") as target:
                for member in source:
                    member.name = member.name.partition("/")[2] or "."
                    if member.islnk():
                        member.linkname = member.linkname.partition("/")[2]
                    member.uid = member.gid = uid
                    member.uname = member.gname = ""
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
        except (DockerException, tarfile.TarError) as error:
            raise SandboxError(f"{point} cannot be read out of the container: {error}") from error
        spool.seek(0)
        out.append((point, spool))
    return out
