"""Talking to a Docker engine from asyncio: streams of `exec`, small archives, images by content, and the sweeper.

The SDK blocks, so its calls run in threads; the streams themselves are read by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import os
import socket
import struct
import tarfile
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, BuildError, DockerException, ImageNotFound, NotFound

from stages.backends.sandbox.bundle import Entry
from stages.backends.sandbox.cgroups import birth
from stages.backends.sandbox.rootfs import Rootfs, Source, choose, write_rootfs
from stages.domain import Task
from stages.errors import SandboxError, TaskError

LABEL, ATTEMPT = "terminal-rsi.owner", "terminal-rsi.attempt"
_HEADER = struct.Struct(">BxxxI")
_backends = itertools.count(1)
T = TypeVar("T")


async def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """An SDK call in a thread. Raises SandboxError with the engine's words."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})  # the thread cannot be stopped: what it makes must be there for whoever cleans up
        work.exception()
        raise
    except (DockerException, requests.RequestException, OSError) as error:
        raise SandboxError(f"docker engine: {error}") from error


class ExecStream:
    """One `exec` with stdin, stdout and stderr attached. Iterate `frames()` for (stream, bytes): 1 stdout, 2 stderr."""

    def __init__(self, api: docker.APIClient, exec_id: str, sock: socket.socket) -> None:
        self._api, self.id, self._socket = api, exec_id, sock
        self._buffer = bytearray()
        sock.setblocking(False)

    @classmethod
    async def open(
        cls, api: docker.APIClient, container: str, command: list[str], *, user: str, workdir: str, env: dict[str, str]
    ) -> ExecStream:
        """The program must read a line before it writes: what it wrote earlier could be lost with the response's head."""
        created = await call(
            api.exec_create, container, command, stdin=True, user=user, workdir=workdir, environment=env
        )
        raw = await call(api.exec_start, created["Id"], socket=True)
        return cls(api, created["Id"], getattr(raw, "_sock", raw))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read(self) -> list[tuple[int, bytes]] | None:
        """The frames that come next; None at the end of the stream."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 18)
        if not data:
            return None
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            stream, length = _HEADER.unpack_from(self._buffer)
            if len(self._buffer) < _HEADER.size + length:
                break
            frames.append((stream, bytes(self._buffer[_HEADER.size : _HEADER.size + length])))
            del self._buffer[: _HEADER.size + length]
        return frames

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        while True:
            try:
                got = await self.read()
            except ConnectionError:
                return
            if got is None:
                return
            for frame in got:
                yield frame

    async def exit_code(self) -> int:
        """After the end of the stream. Raises SandboxError when the engine has lost the program's end."""
        code = await _ended(self._api, self.id, 30.0)
        if code is None:
            raise SandboxError("docker engine: an exec is over and the engine does not say how it ended")
        return code

    def close(self) -> None:
        self._socket.close()


async def run_detached(
    api: docker.APIClient, container: str, command: list[str], *, user: str, seconds: float = 5.0
) -> int | None:
    """Exit code of a short program in a container; None when the engine has lost it.

    Engines do so now and then, under load, when the program kills its neighbours: the exec is "running" for ever and its
    stream never ends. So it is started detached, and asked after for a limited time.
    """
    made = await call(api.exec_create, container, command, stdout=False, stderr=False, user=user, workdir="/")
    await call(api.exec_start, made["Id"], detach=True)
    return await _ended(api, made["Id"], seconds)


async def _ended(api: docker.APIClient, exec_id: str, seconds: float) -> int | None:
    """Exit code of an exec; None when the engine does not know it in time."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while time.monotonic() < deadline:
        state = await call(api.exec_inspect, exec_id)
        if not state["Running"]:
            return int(state["ExitCode"] or 0)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)
    return None


def make_tar(entries: Iterable[Entry], *, uid: int, folders: Iterable[tuple[str, int, int]] = ()) -> bytes:
    """A tar of files owned by `uid`. `folders`: (name, mode, owner)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        made: set[str] = set()

        def folder(name: str, mode: int, owner: int) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, owner, owner
            tar.addfile(info)
            made.add(name)

        for name, mode, owner in folders:
            folder(name, mode, owner)
        for path, mode, content in entries:
            parts = path.split("/")[:-1]
            for i in range(1, len(parts) + 1):
                if "/".join(parts[:i]) not in made:
                    folder("/".join(parts[:i]), 0o755, uid)
            info = tarfile.TarInfo(path)
            info.size, info.mode, info.uid, info.gid = len(content), mode, uid, uid
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def read_archive(api: docker.APIClient, container: str, path: str, limit: int) -> tarfile.TarFile:
    """`docker cp` out of a container. Raises SandboxError beyond `limit` bytes."""
    stream, _ = api.get_archive(container, path)
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the TarFile
    total = 0
    for chunk in stream:
        total += len(chunk)
        if total > limit:
            raise SandboxError(f"{path} in the container holds more than {limit} bytes")
        spool.write(chunk)
    spool.seek(0)
    return tarfile.open(fileobj=spool)


def shadow(root: Path, inside: str, member: tarfile.TarInfo) -> None:
    """The name of an archive's member below `root`, without its content; never through a link."""
    path = root / inside
    if not path.parent.resolve().is_relative_to(root.resolve()):
        return  # below a link: no real file system hands that out
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        path.mkdir(exist_ok=True)
    elif member.issym():
        path.symlink_to(member.linkname)
    elif not path.exists():
        path.touch()


class DockerImages:
    """The image of a task: the operator's own, its prepared root filesystem, `docker_image` of task.toml, or
    `environment/Dockerfile` built once per content."""

    def __init__(
        self,
        client: docker.DockerClient,
        image: str | None,
        rootfs: Mapping[str, Rootfs] | None = None,
        default_rootfs: str = "",
    ) -> None:
        self._client, self._image = client, image
        self._rootfs, self._default_rootfs = dict(rootfs or {}), default_rootfs
        self._known: dict[str, str] = {}

    async def of(self, task: Task) -> str:
        """An image id. Raises TaskError (nothing to make one from) or SandboxError (the engine could not)."""
        if self._image is not None:
            return self._image
        if prepared := choose(task, self._rootfs, self._default_rootfs):
            return await call(imported_image, self._client, prepared.tar, prepared.digest)
        key = f"{task.root}:{task.digest}"
        if key not in self._known:
            self._known[key] = await asyncio.to_thread(self._find, task)
        return self._known[key]

    def _find(self, task: Task) -> str:
        try:
            settings = tomllib.loads((task.root / "task.toml").read_text()).get("environment", {})
        except (OSError, ValueError) as error:
            raise TaskError(f"{task.root / 'task.toml'} cannot be read: {error}") from error
        environment = task.root / "environment"
        try:
            if name := settings.get("docker_image"):
                with contextlib.suppress(ImageNotFound):
                    return self._client.images.get(name).id
                return self._client.images.pull(name).id
            if not (environment / "Dockerfile").is_file():
                raise TaskError(f"task {task.id}: neither docker_image in task.toml nor {environment / 'Dockerfile'}")
            tag = f"terminal-rsi/task:{_folder_hash(environment)}"
            with contextlib.suppress(ImageNotFound):
                return self._client.images.get(tag).id
            patience = int(settings.get("build_timeout_sec", 600))  # between two of the builder's words
            built, _ = self._client.images.build(
                path=str(environment), tag=tag, rm=True, forcerm=True, timeout=patience
            )
            return built.id
        except (APIError, BuildError, DockerException, requests.RequestException) as error:
            raise SandboxError(f"task {task.id}: no image: {error}") from error


def prepared_image(client: docker.DockerClient) -> str:
    """An image made from this machine's Debian packages, without a registry; made once per engine and content."""
    with tempfile.TemporaryDirectory(prefix="rsi-rootfs-") as folder:
        tar = Path(folder) / "rootfs.tar"
        write_rootfs(tar, source=Source.PACKAGES)
        digest = hashlib.sha256()
        with tarfile.open(tar) as opened:
            for member in opened:
                digest.update(f"{member.name}\0{member.size}\0{member.mtime}\0".encode())
        return imported_image(client, tar, digest.hexdigest())


def imported_image(client: docker.DockerClient, tar: Path, digest: str) -> str:
    """The image of a root filesystem's tar, imported once per engine and digest."""
    name, tag = "terminal-rsi/rootfs", digest[:16]
    with contextlib.suppress(ImageNotFound):
        return client.images.get(f"{name}:{tag}").id
    client.api.import_image_from_file(str(tar), repository=name, tag=tag)
    return client.images.get(f"{name}:{tag}").id


def owner_label() -> str:
    """Machine boot, process and its birth: enough to tell whether the owner still lives; and which of its backends it is."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.getpid()}:{birth(os.getpid())}:{next(_backends)}"


def sweep(client: docker.DockerClient) -> None:
    """Remove the containers and volumes of owners on this machine that are gone (killed with -9)."""
    for container in client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True):
        if _orphaned(container.labels.get(LABEL, "")):
            with contextlib.suppress(DockerException, requests.RequestException):  # perhaps the next start can
                remove(container)
    for volume in client.volumes.list(filters={"label": LABEL}):
        if _orphaned((volume.attrs.get("Labels") or {}).get(LABEL, "")):
            with contextlib.suppress(NotFound, APIError):
                volume.remove(force=True)


def remove(container: Any) -> None:
    """Kill it and wait until it is gone. Raises DockerException when it is not: its processes may be alive."""
    for tries_left in range(20, -1, -1):
        try:
            container.remove(force=True, v=True)
            return
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409 or not tries_left:
                raise
            time.sleep(0.1)  # somebody else removes it


def remove_labelled(client: docker.DockerClient, label: str, value: str) -> None:
    """Containers, then volumes, with this label; waits while the engine lets go of a volume. Raises SandboxError after 30 s,
    DockerException when a container stays."""
    filters = {"label": f"{label}={value}"}
    for container in client.containers.list(all=True, filters=filters, ignore_removed=True):
        remove(container)
    deadline = time.monotonic() + 30
    while volumes := client.volumes.list(filters=filters):
        for volume in volumes:
            with contextlib.suppress(NotFound, APIError):
                volume.remove(force=True)
        if time.monotonic() > deadline:
            raise SandboxError(
                f"docker engine: volumes {', '.join(v.name for v in volumes)} stay in use; remove them by hand"
            )
        time.sleep(0.02)


def _orphaned(label: str) -> bool:
    boot, _, rest = label.partition(":")
    pid, _, rest = rest.partition(":")
    born, _, _ = rest.partition(":")
    if not pid.isdigit():
        return False
    if boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return False  # another machine's, or from before a restart of this one: not ours to judge
    return birth(int(pid)) != born


def _folder_hash(folder: Path) -> str:
    out = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            out.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o777:o}\0".encode())
            out.update(path.read_bytes())
    return out.hexdigest()[:32]
