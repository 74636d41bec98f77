"""The writable folders of one attempt's container: carried into another attempt's between two steps, searched for cheats."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import docker
import requests
from docker.errors import DockerException, NotFound

from stages.backends.sandbox.channel import MAX_RESULT_BYTES, RESULT_FILES
from stages.backends.sandbox.docker_engine import read_archive, shadow
from stages.backends.sandbox.evidence import Search
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
        except (DockerException, tarfile.TarError, requests.RequestException, OSError) as error:
            raise SandboxError(f"{point} cannot be read out of the container: {error}") from error
        spool.seek(0)
        out.append((point, spool))
    return out


def place_of(client: docker.DockerClient, volume: str) -> str:
    """Where an engine of this machine has mounted a tmpfs volume; "" where we cannot see that."""
    place = client.volumes.get(volume).attrs.get("Mountpoint", "")
    return place if os.path.ismount(place) and os.access(place, os.R_OK | os.X_OK) else ""


def evidence(
    client: docker.DockerClient, container: str, volumes: Mapping[str, str], given: Collection[str], limit: int
) -> tuple[list[str], list[str]]:
    """Planted files and forbidden links (`evidence.Search`) in volumes by their mount points: where they lie, or, on an engine
    that is elsewhere, in their names, rebuilt without content in a folder of ours.

    What cannot be searched (more than `limit` bytes, holes included, or names too deep) may hold anything and is told as a link.
    """
    places = {place_of(client, volume): point for point, volume in volumes.items()}
    with contextlib.ExitStack() as stack:
        if "" in places:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rsi-evidence-"))
            places = {f"{folder}/{number}": point for number, point in enumerate(volumes)}
            try:
                for place, point in places.items():
                    _shadow(client.api, container, point, Path(place), limit)
            except (SandboxError, tarfile.TarError, OSError) as error:
                return [], [f"(cannot be searched: {error})"]
        search = Search(places, given)
        search.go_on()
    return search.planted, search.links


def _shadow(api: docker.APIClient, container: str, point: str, place: Path, limit: int) -> None:
    with read_archive(api, container, point, limit) as tar:
        for member in tar:
            _, _, inside = member.name.partition("/")
            if inside and ".." not in inside.split("/"):
                shadow(place, inside, member)


def result_files(api: docker.APIClient, container: str) -> tuple[dict[str, bytes], list[str]]:
    """What a verifier left in /logs/verifier by name, and the names that are no plain files of sane size."""
    results: dict[str, bytes] = {}
    strange: list[str] = []
    try:
        with read_archive(api, container, "/logs/verifier", 64 << 20) as tar:
            for member in tar:
                name = member.name.removeprefix("verifier/")
                plain = member.isreg() and member.mode & 0o200 and member.size <= MAX_RESULT_BYTES
                if name in RESULT_FILES:
                    file = tar.extractfile(member) if plain else None
                    if file is None:
                        strange.append(name)
                    else:
                        results[name] = file.read()
    except (NotFound, tarfile.TarError, SandboxError):  # moved away, broken, or without end
        return {}, [RESULT_FILES[0]]
    return results, strange
