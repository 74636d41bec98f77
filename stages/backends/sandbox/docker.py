"""The sandbox backend on a Docker engine: the same limits and the same verifier as bubblewrap, from the image that a task names.

    agent's container      main process: root without capabilities, waits for its stdin to close (then all of it ends, also when
                           this process is killed with -9); agent: an `exec` as a user id of its own
    verifier's container   started while the agent's is frozen, on the same sized tmpfs volumes, with /tests and /opt/rsi
                           read-only; the agent's is removed, then test.sh runs under a bash that no process can trace

Containers and volumes carry our label; `start` sweeps those whose owner is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import docker
from docker.errors import DockerException
from docker.types import Mount, Ulimit

from stages.backends.protocols import Capability
from stages.backends.sandbox import seccomp
from stages.backends.sandbox.bundle import TaskBundle, read_bundle
from stages.backends.sandbox.docker_engine import (
    ATTEMPT,
    LABEL,
    DockerImages,
    call,
    make_tar,
    owner_label,
    prepared_image,
    remove_labelled,
    sweep,
)
from stages.backends.sandbox.docker_sandbox import DockerSandbox
from stages.backends.sandbox.rootfs import Rootfs
from stages.backends.sandbox.tools import portable_tools
from stages.backends.sandbox.verdict import Judgement
from stages.backends.sandbox.verification import PristineImages
from stages.domain import Task
from stages.errors import SandboxError, SandboxUnavailable

PREPARED = "prepared"
_FIRST_UID = 200_000


class DockerBackend:
    """`concurrency`: attempts alive at once. `image`: use it for every task; "prepared" makes one of this machine's packages.

    `rootfs`: prepared root filesystems by name, for tasks that name one; `default_rootfs`: for the others, in place of their image.
    """

    name = "docker"

    def __init__(
        self,
        *,
        concurrency: int = 64,
        image: str | None = None,
        base_url: str | None = None,
        rootfs: Mapping[str, Rootfs] | None = None,
        default_rootfs: str = "",
    ) -> None:
        self._rootfs, self._default_rootfs = rootfs, default_rootfs
        self._concurrency, self._image, self._base_url = concurrency, image, base_url
        self._client: docker.DockerClient | None = None
        self._owner = owner_label()
        self._numbers = itertools.count(1)
        self._bundles: dict[tuple[str, str, str], TaskBundle] = {}
        self._volumes: dict[str, asyncio.Task[str]] = {}
        self._alive: set[DockerSandbox] = set()
        self._places: asyncio.Semaphore | None = None
        self._places_loop: asyncio.AbstractEventLoop | None = None
        self._pristine = PristineImages()
        self._uid = _FIRST_UID + secrets.randbelow(1 << 30)

    async def start(self) -> None:
        """Reach the engine, sweep what killed owners left. Raises SandboxUnavailable naming the bubblewrap backend."""
        if self._client is not None:
            return
        try:
            client = await asyncio.to_thread(self._connect)
        except (DockerException, OSError) as error:
            raise SandboxUnavailable(
                f"no Docker engine answers at {self._base_url or 'DOCKER_HOST or the default socket'}: {error}. Start one, set "
                "DOCKER_HOST, or use the bubblewrap backend (sandbox = bubblewrap), which needs no daemon"
            ) from error
        self._client = client
        image = self._image
        if image == PREPARED:
            image = await asyncio.to_thread(prepared_image, client)
        self.images = DockerImages(client, image, self._rootfs, self._default_rootfs)

    @property
    def client(self) -> docker.DockerClient:
        if self._client is None:
            raise SandboxError("the Docker backend is not started; call start() first")
        return self._client

    async def open(self, task: Task) -> DockerSandbox:
        """A fresh container. Raises TaskError for a folder that cannot be used, SandboxError when the engine fails."""
        return await self._open_with(task, self._semaphore())

    async def capabilities(self) -> Sequence[Capability]:
        """What this engine enforces, each row tried in a real container now."""
        from stages.backends.sandbox.capabilities import probe

        return await probe(self)

    async def aclose(self) -> None:
        if self._client is None:
            return
        client, self._client = self._client, None
        for sandbox in list(self._alive):
            sandbox.forget()
        for volume in self._volumes.values():
            with contextlib.suppress(SandboxError, asyncio.CancelledError):
                await volume
        self._volumes.clear()
        await asyncio.to_thread(remove_labelled, client, LABEL, self._owner)
        await asyncio.to_thread(client.close)

    # ------------------------------------------------------------------ for the sandboxes

    def closed(self, sandbox: DockerSandbox) -> None:
        self._alive.discard(sandbox)

    def labels(self, uid: int = 0) -> dict[str, str]:
        """Of this backend, and of the attempt whose agent has this user id."""
        return {LABEL: self._owner} | ({ATTEMPT: self.attempt(uid)} if uid else {})

    def attempt(self, uid: int) -> str:
        return f"{self._owner}:{uid}"

    async def container(self, task: Task, image: str, mounts: list[Mount], *, uid: int, trace: bool) -> Any:
        """A created container with every limit; its main process ends when its stdin does."""
        limits = task.limits
        memory = f"{limits.memory_mb}m"
        return await call(
            self.client.containers.create,
            image,
            ["/bin/bash", "--noprofile", "--norc", "-c", "read -r _"],
            entrypoint=[],
            user="0:0",
            stdin_open=True,
            init=True,
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges", f"seccomp={json.dumps(seccomp.docker_profile(trace=trace))}"],
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(limits.cpus * 1e9),
            pids_limit=limits.pids + 16,  # room for our own helpers; the agent's user id has the task's limit
            shm_size="8m",
            ulimits=[Ulimit(name="core", soft=1, hard=1)],  # 1 byte: a core_pattern that is a pipe ignores 0
            hostname="sandbox",
            mounts=mounts,
            working_dir="/",
            labels=self.labels(uid),
        )

    async def tmpfs(self, *, size_mb: int, inodes: int, uid: int, attempt: int) -> str:
        """A sized tmpfs as a volume, so that it outlives the agent's container until the verifier's has it."""
        options = f"size={size_mb}m,nr_inodes={inodes},uid={uid},gid={uid},mode=0755,nosuid,nodev"
        volume = await call(
            self.client.volumes.create,
            f"rsi-{secrets.token_hex(8)}",
            driver="local",
            driver_opts={"type": "tmpfs", "device": "tmpfs", "o": options},
            labels=self.labels(attempt),
        )
        return volume.name

    async def filled_volume(self, key: str, image: str, entries: Sequence[tuple[str, int, bytes]]) -> str:
        """A volume with these files, for read-only use; made once per key and removed with the backend."""
        if key not in self._volumes or self._volumes[key].cancelled():
            self._volumes[key] = asyncio.create_task(self._fill(image, entries))
        return await asyncio.shield(self._volumes[key])

    async def tools(self, image: str) -> str:
        return await self.filled_volume("tools", image, portable_tools())

    async def on_pristine_image(self, task: Task, bundle: TaskBundle, *, solved: bool) -> Judgement:
        extra = asyncio.Semaphore(1)  # the asker keeps its own place: waiting for another one could wait for itself

        async def opened(task: Task) -> DockerSandbox:
            return await self._open_with(task, extra)

        return await self._pristine.judgement(task, bundle, opened, solved=solved)

    # ------------------------------------------------------------------ own

    def _connect(self) -> docker.DockerClient:
        client = docker.DockerClient(base_url=self._base_url) if self._base_url else docker.from_env()
        client.ping()
        sweep(client)
        return client

    def bundle(self, task: Task) -> TaskBundle:
        key = (str(task.root), task.digest, task.id)
        if key not in self._bundles:
            self._bundles[key] = read_bundle(task)
        return self._bundles[key]

    async def copy_of(self, sandbox: DockerSandbox, step: Task) -> DockerSandbox:
        """A container of `step` without an agent, in the present state of another attempt."""
        return await self._open_with(step, asyncio.Semaphore(1), sandbox)

    async def _open_with(
        self, task: Task, places: asyncio.Semaphore, state_of: DockerSandbox | None = None
    ) -> DockerSandbox:
        bundle = self.bundle(task)
        image = await self.images.of(task) if self._client else self.client
        await places.acquire()
        sandbox = DockerSandbox(self, task, bundle, image, self._uid + next(self._numbers), places)
        self._alive.add(sandbox)
        try:
            await (sandbox.begin() if state_of is None else sandbox.adopt(state_of))
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def _fill(self, image: str, entries: Sequence[tuple[str, int, bytes]]) -> str:
        name = (await call(self.client.volumes.create, f"rsi-{secrets.token_hex(8)}", labels=self.labels())).name
        helper = await call(
            self.client.containers.create, image, ["/bin/true"], mounts=[Mount("/fill", name)], labels=self.labels()
        )
        try:
            await call(helper.put_archive, "/fill", make_tar(entries, uid=0))
        finally:
            await call(helper.remove, force=True)
        return name

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or loop is not self._places_loop:
            self._places, self._places_loop = asyncio.Semaphore(self._concurrency), loop
            self._volumes = {k: v for k, v in self._volumes.items() if v.done() and not v.cancelled()}
        return self._places
