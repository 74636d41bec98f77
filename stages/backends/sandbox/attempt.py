"""One attempt inside the host: workspace, agent's shell, then the verifier in a second, fresh jail. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import shutil
import stat
import time
from dataclasses import dataclass
from typing import Any

from stages.backends.sandbox import kernel
from stages.backends.sandbox.capture import Capture
from stages.backends.sandbox.cgroups import Cgroups, Group
from stages.backends.sandbox.channel import LOG_BYTES, MAX_RESULT_BYTES, RESULT_FILES, Channel
from stages.backends.sandbox.conversation import NoShell, Outcome, command_line
from stages.backends.sandbox.environment import AGENT_ENV, script_env
from stages.backends.sandbox.evidence import ResultWatch, Search
from stages.backends.sandbox.fork import copy_tree, standing_still
from stages.backends.sandbox.layout import UPPER, jail_options, overlaid
from stages.backends.sandbox.shell import Shell
from stages.backends.sandbox.spawn import COMMAND_FD, REPORT_FD, Jail, Reaper
from stages.backends.sandbox.world import ROOTFS, UNREADABLE_BASH, AttemptWorld, Undertaker, tools_of, unreadable_python

_LOGS_MB = 16


@dataclass(frozen=True, slots=True)
class Bundle:
    """A task as the host keeps it: the files of its workspace in memory, tests and solution below `root`."""

    files: tuple[tuple[str, int, bytes], ...]
    root: str
    digests: dict[str, str]


class TaskStore:
    """Tasks by key; trees other than `files` lie in the host's world, where no agent's jail reaches."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._bundles: dict[str, Bundle] = {}

    def put(self, key: str, trees: dict[str, list[tuple[str, int, int]]], blob: bytes) -> None:
        """`trees`: name -> [(relative path, mode, size)], contents in the same order in `blob`. A known key stays as it is."""
        if key in self._bundles:
            return
        at = 0
        files: list[tuple[str, int, bytes]] = []
        root = f"{self._root}/{key}"
        digests = {}
        for tree, entries in trees.items():
            for path, mode, size in entries:
                content = blob[at : at + size]
                at += size
                if tree == "files":
                    files.append((path, mode, content))
                    continue
                full = f"{root}/{tree}/{path}"
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "wb") as file:
                    file.write(content)
                os.chmod(full, 0o755 if mode & 0o111 else 0o644)
            if tree != "files":
                os.makedirs(f"{root}/{tree}", exist_ok=True)
                digests[tree] = tree_digest(f"{root}/{tree}")
        self._bundles[key] = Bundle(tuple(files), root, digests)

    def get(self, key: str) -> Bundle:
        return self._bundles[key]

    def forget(self, key: str) -> None:
        """Remove a task that no open attempt uses."""
        bundle = self._bundles.pop(key, None)
        if bundle is not None:
            shutil.rmtree(bundle.root, ignore_errors=True)


def tree_digest(root: str) -> str:
    """SHA-256 over sorted relative paths, modes and contents."""
    out = hashlib.sha256()
    for folder, dirs, names in os.walk(root):
        dirs.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            with open(full, "rb") as file:
                content = file.read()
            out.update(f"{os.path.relpath(full, root)}\0{os.stat(full).st_mode:o}\0{len(content)}\0".encode())
            out.update(content)
    return out.hexdigest()


class Attempt:
    """`spec`: workdir, memory_mb, storage_mb, inodes, pids, cpus, output_bytes, env, tests_env, solution_env, rootfs."""

    def __init__(
        self,
        *,
        name: str,
        bundle: Bundle,
        spec: dict[str, Any],
        reaper: Reaper,
        home_fd: int,
        undertaker: Undertaker,
        uid: int,
        filters: dict[bool, int],
        cgroups: Cgroups,
    ) -> None:
        self._name, self._bundle, self._spec, self._reaper = name, bundle, spec, reaper
        self._uid, self._filters, self._cgroups = uid, filters, cgroups
        self._world = AttemptWorld(home_fd, undertaker, size_mb=spec["storage_mb"], inodes=spec["inodes"], uid=uid)
        self._shell: Shell | None = None
        self._script_jail: Jail | None = None
        self._group: Group | None = None
        self._lock = asyncio.Lock()
        self._agent_over = False
        self._closed = False
        self._rootfs = f"{ROOTFS}/{spec['rootfs']}" if spec["rootfs"] else ""
        self._overlaid = overlaid(self._rootfs, spec["workdir"])
        self._jail_options = jail_options(self._rootfs, spec["workdir"])

    async def open(self) -> None:
        """Workspace and shell. Raises RuntimeError when it was closed before (a cancelled `open`), OSError from bwrap."""
        if self._closed:
            raise RuntimeError("the sandbox was closed before it was open")
        self._group = self._new_group()
        with self._world:
            for path in ("/ws/work", "/ws/home", "/ws/tmp"):
                os.mkdir(path, 0o755)
            os.chmod("/ws/tmp", 0o1777)  # noqa: S103 - a /tmp is like that; only this attempt ever sees it
            for name in self._overlaid:
                for part in ("work", "up/tmp" if name == "var" else "up"):
                    os.makedirs(f"{UPPER}/{name}/{part}", 0o755)
            for path, mode, content in self._bundle.files:
                full = posixpath.join("/ws/work", path)
                os.makedirs(posixpath.dirname(full), exist_ok=True)
                fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
                try:
                    os.write(fd, content)
                finally:
                    os.close(fd)
        await self.start_shell()

    async def start_shell(self) -> None:
        """The agent's shell on the workspace as it is: at first, and again after the solution of one of several steps."""
        self._shell = Shell(self._start_agent, workdir=self._spec["workdir"], output_bytes=self._spec["output_bytes"])
        self._agent_over = False
        await self._shell.begin()

    async def adopt(self, other: Attempt) -> str:
        """Instead of `open`: the state of another attempt, whose agent stands still meanwhile. Here no agent ever acts.

        Answers why it cannot be copied, empty when it was: what an agent made so that no verifier can look at it is its fault.
        """
        self._agent_over = True
        async with other._lock:
            source, target = other._workspace(), self._workspace()
            try:
                async with standing_still(other._shell.jail if other._shell else None):
                    await copy_tree(source, target)
            except (OSError, RuntimeError) as error:
                return str(error)
            finally:
                os.close(source)
                os.close(target)
        return ""

    def _workspace(self) -> int:
        with self._world:
            return os.open("/ws", os.O_RDONLY | os.O_DIRECTORY)

    async def run(self, command: bytes, timeout_s: float) -> Outcome:
        async with self._lock:
            if self._shell is None or self._agent_over or self._closed:
                raise RuntimeError(
                    "the agent's shell of this sandbox has ended (verified or closed); open a new sandbox"
                )
            return await self._shell.run(command, timeout_s)

    async def script(self, kind: str, timeout_s: float, bundle: Bundle | None = None) -> tuple[dict[str, Any], bytes]:
        """Run `/tests/test.sh` ("tests") or `/solution/solve.sh` ("solution") in a fresh jail on the workspace.

        The agent's jail is ended first, for good. Answers exit code (None: timed out), the three result files' sizes (or
        "absent", "strange") and, as blob, log + channel + results. `bundle`: another task's, for one of several steps.
        """
        async with self._lock:
            await self._end_agent()
            bundle = bundle or self._bundle
            began = time.monotonic()
            evidence = await self._evidence()
            group = self._new_group("v")
            results_fd = self._fresh_logs()
            capture, channel, watch = (
                Capture(LOG_BYTES),
                Channel(),
                ResultWatch(f"/proc/self/fd/{results_fd}", asyncio.get_running_loop()),
            )
            try:
                code = await self._run_script(bundle, kind, timeout_s, capture, channel, group)
                results = [_read_plain(results_fd, name) for name in RESULT_FILES]
            finally:
                said = channel.finish()
                rewritten = watch.finish()
                os.close(results_fd)
                if group is not None:
                    group.close()
            intact = tree_digest(f"{bundle.root}/{kind}") == bundle.digests[kind]
            log, _ = capture.result()
            head = {
                "exit_code": code,
                "log": len(log),
                "channel": len(said),
                "nonces": channel.nonces,
                "results": {n: r if isinstance(r, str) else len(r) for n, r in zip(RESULT_FILES, results, strict=True)},
                "rewritten": rewritten,
                **evidence,
                "intact": intact,
                "duration_s": time.monotonic() - began,
            }
            return head, b"".join((log, said, *(r for r in results if isinstance(r, bytes))))

    async def close(self) -> None:
        self._closed = True
        if self._script_jail is not None:
            await self._script_jail.kill()
        await self._end_agent()
        self._world.close()
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _evidence(self) -> dict[str, list[str]]:
        """Files and links of the agent's making that only make sense against a verifier."""
        given = {f"{self._spec['workdir']}/{path}" for path, _, _ in self._bundle.files}
        roots = {"/ws/work": self._spec["workdir"], "/ws/home": "/root", "/ws/tmp": "/tmp"}
        roots |= {f"{UPPER}/{name}/up": f"/{name}" for name in self._overlaid}
        search, more = Search(roots, given), True
        while more:
            with self._world:
                more = search.go_on(2000)
            await asyncio.sleep(0)  # other attempts go on
        return {"planted": search.planted, "links": search.links}

    # ------------------------------------------------------------------ jails

    def _new_group(self, part: str = "") -> Group | None:
        """Limits of the agent; of a script its own: the agent's files count against the agent's memory, and may fill it."""
        spec = self._spec
        return self._cgroups.group(
            self._name + part, memory_mb=spec["memory_mb"], pids=spec["pids"] + 8, cpus=spec["cpus"]
        )

    async def _end_agent(self) -> None:
        self._agent_over = True
        if self._shell is not None:
            await self._shell.close()
            self._shell = None

    def _start_agent(self, output: int, command_in: int, report_out: int) -> Jail:
        if self._group and self._group.is_full():  # whoever starts something there, we too, may be ended by the kernel
            raise NoShell("the files of this sandbox fill its memory limit")
        limits = f"ulimit -n 1024; ulimit -u {self._spec['pids']}"  # processes: of the whole jail, it has its own user namespace
        if not self._group or "memory" not in self._cgroups.available:
            limits += f"; ulimit -d {self._spec['memory_mb'] * 1024}"  # per process; all that a normal user can have
        # by bwrap, for what it starts: nothing that a task says is in the environment of a program of this machine
        own = [word for pair in self._spec["env"].items() for word in ("--setenv", *pair)]
        return Jail(
            self._reaper,
            self._world,
            [*self._jail_options, "--remount-ro", "/", *own, "--chdir", self._spec["workdir"]],
            command_line(limits),
            env=AGENT_ENV,
            output_fd=output,
            seccomp_fd=self._filters[True],
            fds={COMMAND_FD: command_in, REPORT_FD: report_out},
            group=self._group,
        )

    def _fresh_logs(self) -> int:
        """A new private tmpfs for /logs that no agent has ever seen; a descriptor of its folder for results."""
        with self._world:
            for place in ("/vlogs/verifier", "/vlogs"):
                with contextlib.suppress(OSError):
                    kernel.umount(place)
            kernel.mount(
                "tmpfs", "/vlogs", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                f"size={_LOGS_MB}m,nr_inodes=4096,mode=0755,uid={self._uid},gid={self._uid}",
            )  # fmt: skip
            for name in ("verifier", "agent", "home", "tmp"):
                os.mkdir(f"/vlogs/{name}")
            kernel.mount(
                "tmpfs", "/vlogs/verifier", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                f"size={_LOGS_MB}m,nr_inodes=4096,mode=0755,uid={self._uid},gid={self._uid}",
            )  # fmt: skip
            return os.open("/vlogs/verifier", os.O_RDONLY | os.O_DIRECTORY)

    async def _run_script(
        self, bundle: Bundle, kind: str, timeout_s: float, capture: Capture, channel: Channel, group: Group | None
    ) -> int | None:
        loop = asyncio.get_running_loop()
        out_r, out_w = os.pipe()
        os.set_blocking(out_r, False)
        name = {"tests": "test.sh", "solution": "solve.sh"}[kind]
        options = [
            *self._jail_options, "--bind", "/vlogs", "/logs",
            "--bind", "/vlogs/verifier", "/logs/verifier",  # a mount of its own: nobody can move it away
            "--ro-bind", f"{bundle.root}/{kind}", f"/{kind}", "--ro-bind", tools_of(self._spec["rootfs"]), "/opt/rsi",
            *unreadable_python(self._spec["rootfs"]), "--remount-ro", "/", "--as-pid-1", "--chdir", self._spec["workdir"],
        ]  # fmt: skip
        try:
            jail = self._script_jail = Jail(
                self._reaper,
                self._world,
                options,
                [UNREADABLE_BASH, "--noprofile", "--norc", f"/{kind}/{name}"],
                env=script_env(self._spec["env"], self._spec[f"{kind}_env"]),
                output_fd=out_w,
                seccomp_fd=self._filters[kind == "solution"],
                fds=channel.fds,
                group=group,
            )
        finally:
            os.close(out_w)
            channel.started()

        def read() -> None:
            try:
                data = os.read(out_r, 1 << 18)
            except BlockingIOError:
                return
            if data:
                capture.add(data)
            else:
                loop.remove_reader(out_r)

        loop.add_reader(out_r, read)
        try:
            done, _ = await asyncio.wait({jail.exited}, timeout=timeout_s)
            code = jail.exited.result() if done else None
        finally:
            await jail.kill()
            self._script_jail = None
            loop.remove_reader(out_r)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(out_r, 1 << 18):
                    capture.add(data)
            os.close(out_r)
        return code


def _read_plain(folder_fd: int, name: str) -> bytes | str:
    """A regular file's content, at most 4 MiB, following no link and waiting for no FIFO; else "absent" or "strange".

    One that its owner cannot write is strange, too: the verifier could not have written it.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except FileNotFoundError:
        return "absent"
    except OSError:
        return "strange"
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not info.st_mode & stat.S_IWUSR or info.st_size > MAX_RESULT_BYTES:
            return "strange"
        return os.read(fd, MAX_RESULT_BYTES)
    finally:
        os.close(fd)
