"""One attempt on a Docker engine (see `docker.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from docker.errors import APIError, DockerException, NotFound
from docker.types import Mount

from stages.backends.protocols import CommandResult, VerifierReport
from stages.backends.sandbox.bundle import TaskBundle
from stages.backends.sandbox.capture import Capture
from stages.backends.sandbox.channel import LOG_BYTES, RESULT_FILES
from stages.backends.sandbox.conversation import command_line
from stages.backends.sandbox.docker_channel import DockerChannel
from stages.backends.sandbox.docker_engine import (
    ATTEMPT,
    ExecStream,
    call,
    make_tar,
    read_archive,
    remove,
    remove_labelled,
    run_detached,
)
from stages.backends.sandbox.docker_shell import KILLER, PRELUDE, DockerShell
from stages.backends.sandbox.docker_state import carried, evidence, place_of, result_files
from stages.backends.sandbox.environment import AGENT_ENV, script_env
from stages.backends.sandbox.evidence import ResultWatch
from stages.backends.sandbox.tools import MAKE_SHUT_PYTHON
from stages.backends.sandbox.verdict import Judgement, VerifierOutput, judge
from stages.backends.sandbox.verification import evidence_log, report, unverifiable
from stages.domain import Task
from stages.errors import SandboxError, TaskError

if TYPE_CHECKING:
    from stages.backends.sandbox.docker import DockerBackend

# Waits for a line, then becomes a bash that its user cannot read (so nobody can trace it), runs the script and, the moment
# that it ends, kills every other process of the user: nothing of the agent's can touch the results afterwards.
# Where that fails it says the word that it was sent, which nothing of the agent's can know.
_WRAPPER = r"""
IFS= read -r word || exit 125
cp -- "$BASH" /logs/tmp/.bash && chmod 0111 /logs/tmp/.bash || { printf %s "$word"; exit 125; }
exec 194>&2 195<&0 2>&1 0</dev/null
exec /logs/tmp/.bash --noprofile --norc -c '/logs/tmp/.bash --noprofile --norc "$1"; c=$?; kill -9 -1; exit $c' bash "$1"
"""
_RESULTS = "/logs/verifier"
_SETTLE_S = 2.0


class DockerSandbox:
    """Agent's container, then the verifier's. Commands are run one after another."""

    def __init__(
        self, backend: DockerBackend, task: Task, bundle: TaskBundle, image: str, uid: int, places: asyncio.Semaphore
    ) -> None:
        self._backend, self._task, self._bundle, self._image, self._uid = backend, task, bundle, image, uid
        self._places: asyncio.Semaphore | None = places
        self._points = (task.workdir, "/tmp", "/root")  # where the agent can write
        self._lock = asyncio.Lock()
        self._container: Any = None
        self._stdin: Any = None
        self._volumes: dict[str, str] = {}  # mount point -> tmpfs volume
        self._shell: DockerShell | None = None
        self._report: VerifierReport | None = None

    async def begin(self) -> None:
        await self._first_container()
        own = await asyncio.to_thread(self._image_files)
        files = [(p, m, c) for p, m, c in own if p not in self._task.files] + list(self._bundle.trees["files"])
        if files:
            await call(self._container.put_archive, self._task.workdir, make_tar(files, uid=self._uid))
        await self._start_shell()

    async def adopt(self, other: DockerSandbox) -> None:
        """Instead of `begin`: the state of another attempt, which is paused meanwhile. Here no agent ever acts."""
        await self._first_container()
        limit = (self._task.limits.storage_mb << 20) * 5 // 4 + (16 << 20)  # and the headers; more is a file of holes
        async with other._lock:
            try:
                await call(other._container.pause)
            except SandboxError:
                if not (why := await other._perished()):
                    raise
                self._report = unverifiable(self._task, why)
                return
            try:
                api, source = self._backend.client.api, other._container.id
                parts = await asyncio.to_thread(carried, api, source, list(self._volumes), uid=self._uid, limit=limit)
            except SandboxError as error:  # what no verifier can look at is the agent's doing
                self._report = unverifiable(self._task, f"its state cannot be copied: {error}")
                return
            finally:
                await call(other._container.unpause)
        for point, content in parts:
            with content:
                try:
                    await call(self._container.put_archive, point, content)
                except SandboxError as error:
                    if "no space" not in str(error):
                        raise
                    self._report = unverifiable(self._task, f"its files of holes do not fit as copies: {error}")
                    return

    async def _first_container(self) -> None:
        limits = self._task.limits
        for point in self._points:
            self._volumes[point] = await self._backend.tmpfs(
                size_mb=limits.storage_mb, inodes=limits.inodes, uid=self._uid, attempt=self._uid
            )
        await self._start([], trace=True)

    async def _start_shell(self) -> None:
        limits = self._task.limits
        self._shell = DockerShell(
            self._connect,
            self._kill,
            workdir=self._task.workdir,
            output_bytes=limits.output_bytes,
            env=self._task.env,
        )
        try:
            await self._shell.begin()
        except OSError as error:
            raise SandboxError(f"task {self._task.id}, image {self._image}: {error}") from error

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        """One command in the persistent bash. Raises SandboxError when the engine fails or the shell has ended for good."""
        text = command.encode("utf-8", "surrogateescape")
        if b"\0" in text:
            return CommandResult(output=b"bash: a command cannot hold a NUL byte\n", exit_code=2)
        async with self._lock:
            if self._shell is None:
                raise SandboxError(
                    "the agent's shell of this sandbox has ended (verified or closed); open a new sandbox"
                )
            limit = self._task.limits.command_timeout_s if timeout_s is None else timeout_s
            try:
                out = await self._shell.run(text, limit)
            except (OSError, SandboxError) as error:
                if why := await self._perished():
                    return CommandResult(output=f"[no shell: {why}]\n".encode(), exit_code=None, restarted=True)
                raise SandboxError(f"the container's shell did not come back: {error}") from error
        return CommandResult(
            output=out.output,
            exit_code=out.exit_code,
            timed_out=out.timed_out,
            restarted=out.restarted,
            truncated_bytes=out.truncated_bytes,
            duration_s=out.duration_s,
        )

    async def verify(self) -> VerifierReport:
        """The agent's processes end for good, then `/tests/test.sh` runs in a fresh container. A second call answers the same."""
        if self._report is None:
            began = time.monotonic()
            try:
                judgement, log = await self._judge()
            except SandboxError:
                if not (why := await self._perished()):
                    raise
                self._report = unverifiable(self._task, why)
                return self._report
            pristine = partial(self._backend.on_pristine_image, self._task, self._bundle)
            self._report = await report(judgement, log, began, pristine, solvable=self._bundle.has_solution)
        return self._report

    async def judge_state(self) -> Judgement:
        """The verifier's word on the present state, without the question whose fault a missing verdict is."""
        return (await self._judge())[0]

    async def check(self, step: Task) -> VerifierReport:
        """As the bubblewrap backend's: `step`'s verifier on a copy of the state; the agent goes on afterwards."""
        copy = await self._backend.copy_of(self, step)
        try:
            return await copy.verify()
        finally:
            await copy.close()

    async def run_solution(self, step: Task | None = None) -> CommandResult:
        """Run `solution/solve.sh` in a fresh container on the workspace (the `oracle` agent). Ends the agent's shell.

        `step`: that step's solution instead; then a new shell is there for what follows.
        """
        task, bundle = (self._task, self._bundle) if step is None else (step, self._backend.bundle(step))
        if not bundle.has_solution:
            raise TaskError(f"task {task.id}: {task.root / 'solution' / 'solve.sh'} is missing")
        began = time.monotonic()
        code, capture, _, _ = await self._script("solution", "solve.sh", task.agent_timeout_s, bundle)
        if step is not None:
            del self._volumes["/logs"], self._volumes[_RESULTS]
            await self._start([], trace=True)
            await self._start_shell()
        return CommandResult(
            output=capture.result()[0], exit_code=code, timed_out=code is None, duration_s=time.monotonic() - began
        )

    async def close(self) -> None:
        if self._places is None:
            return
        self.forget()
        client = self._backend.client
        for sock in filter(None, (self._stdin, getattr(self._stdin, "_sock", None))):
            sock.close()
        await call(remove_labelled, client, ATTEMPT, self._backend.attempt(self._uid))

    def forget(self) -> None:
        """Give the place back; the backend removes what is left."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        if self._places is not None:
            self._places.release()
            self._places = None
            self._backend.closed(self)

    # ------------------------------------------------------------------ containers

    async def _start(self, more: list[Mount], *, trace: bool) -> None:
        """The next container on this attempt's volumes; the last one goes only when this one holds them."""
        mounts = [Mount(point, name) for point, name in self._volumes.items()]
        container = await self._backend.container(self._task, self._image, mounts + more, uid=self._uid, trace=trace)
        try:
            stdin = await call(container.attach_socket, params={"stdin": 1, "stream": 1})
            await call(container.start)
        except BaseException:
            with contextlib.suppress(NotFound, APIError):
                await asyncio.to_thread(container.remove, force=True)
            raise
        await self._end_container()
        self._container, self._stdin = container, stdin

    async def _end_container(self) -> None:
        container, stdin, self._container, self._stdin = self._container, self._stdin, None, None
        if container is not None:
            await call(remove, container)
            getattr(stdin, "_sock", stdin).close()
            stdin.close()

    async def _connect(self) -> ExecStream:
        return await ExecStream.open(
            self._backend.client.api,
            self._container.id,
            command_line(PRELUDE.format(pids=self._task.limits.pids), two_ways=True),
            user=f"{self._uid}:{self._uid}",
            workdir=self._task.workdir,
            env=AGENT_ENV,
        )

    async def _kill(self, signal: str, since: tuple[int, int], also: int) -> None:
        await self._helper(KILLER, signal, *map(str, since), str(also))

    async def _helper(self, script: str, *arguments: str) -> int | None:
        """A short script of builtins as the agent's user; its exit code, None when the engine has lost it."""
        command = ["/bin/bash", "--noprofile", "--norc", "-c", script, "bash", *arguments]
        return await run_detached(
            self._backend.client.api, self._container.id, command, user=f"{self._uid}:{self._uid}"
        )

    def _image_files(self) -> list[tuple[str, int, bytes]]:
        """Regular files that the image itself has in the workdir (a volume hides them)."""
        api = self._backend.client.api
        probe = api.create_container(self._image, ["/bin/true"], labels=self._backend.labels(self._uid))
        try:
            with read_archive(api, probe["Id"], self._task.workdir, self._task.limits.storage_mb << 20) as tar:
                out = []
                for member in tar:
                    _, _, inside = member.name.partition("/")
                    file = tar.extractfile(member) if member.isreg() and inside else None
                    if file is not None:
                        out.append((inside, member.mode & 0o777, file.read()))
                return out
        except (NotFound, DockerException):  # no such folder in the image
            return []
        finally:
            with contextlib.suppress(NotFound, APIError):
                api.remove_container(probe["Id"], force=True)

    # ------------------------------------------------------------------ verifier

    async def _freeze_agent(self) -> None:
        """Its processes stand still until `_start` removes the container, and they with it."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        try:
            await call(self._container.pause)
        except SandboxError:  # an engine may fail to freeze a fork bomb; killing it does not need that
            if self._container is None or not await self._running():
                raise

    async def _running(self) -> bool:
        return bool((await call(self._backend.client.api.inspect_container, self._container.id))["State"]["Running"])

    async def _perished(self) -> str:
        """Why there is no life in the container any more, where its memory limit ended it: that is the agent's doing; else ""."""
        if self._container is None:
            return ""
        deadline = time.monotonic() + _SETTLE_S  # an engine hears of both some time after others have met with it
        while time.monotonic() < deadline:
            state = (await call(self._backend.client.api.inspect_container, self._container.id))["State"]
            if state["OOMKilled"]:
                return "the memory limit ended its processes"
            await asyncio.sleep(0.1)
        return ""

    async def _judge(self) -> tuple[Judgement, str]:
        code, capture, said, nonces = await self._script(
            "tests", "test.sh", self._task.verifier_timeout_s, self._bundle
        )
        results, strange = await call(result_files, self._backend.client.api, self._container.id)
        planted, links = self._evidence
        log = capture.result()[0].decode("utf-8", "replace") + evidence_log(planted, links)
        output = VerifierOutput(
            exit_code=code,
            results=results,
            strange=strange,
            channel=said,
            nonces=nonces,
            rewritten={n: c for n, c in self._rewritten.items() if n in RESULT_FILES or n.startswith("(")},
            planted=planted,
            links=links,
        )
        return judge(output, self._task.checks), log

    async def _script(
        self, tree: str, name: str, timeout_s: float, bundle: TaskBundle
    ) -> tuple[int | None, Capture, bytes, list[str]]:
        async with self._lock:
            await self._freeze_agent()
            logs = await self._backend.tmpfs(size_mb=16, inodes=4096, uid=0, attempt=self._uid)
            # of its own: what a program of the agent's does elsewhere does not keep the verifier from writing there
            results = await self._backend.tmpfs(size_mb=16, inodes=4096, uid=self._uid, attempt=self._uid)
            self._volumes |= {"/logs": logs, _RESULTS: results}
            hidden = await self._backend.filled_volume(f"{tree}:{bundle.key}", self._image, bundle.trees[tree])
            tools = await self._backend.tools(self._image)
            await self._start(
                [Mount(f"/{tree}", hidden, read_only=True), Mount("/opt/rsi", tools, read_only=True)],
                trace=tree == "solution",
            )
            folders = [(n, 0o755, self._uid) for n in ("agent", "home", "tmp")]
            self._evidence = await call(  # nobody can change it any more
                evidence,
                self._backend.client,
                self._container.id,
                {point: self._volumes[point] for point in self._points},
                {f"{self._task.workdir}/{path}" for path in self._task.files},
                4 * (self._task.limits.storage_mb << 20) + (16 << 20),
            )
            await call(self._container.put_archive, "/logs", make_tar([], uid=0, folders=folders))
            api, make = self._backend.client.api, ["/bin/bash", "-pc", MAKE_SHUT_PYTHON]
            await run_detached(api, self._container.id, make, user="0:0")
            watch = self._watch(await call(place_of, self._backend.client, results))
            capture, channel = Capture(LOG_BYTES), DockerChannel()
            own = self._task.verifier_env if tree == "tests" else self._task.solution_env
            stream = await ExecStream.open(
                self._backend.client.api,
                self._container.id,
                ["/bin/bash", "--noprofile", "--norc", "-c", _WRAPPER, "bash", f"/{tree}/{name}"],
                user=f"{self._uid}:{self._uid}",
                workdir=self._task.workdir,
                env=script_env(self._task.env, own),
            )
            code: int | None = None
            word = secrets.token_hex(16).encode()
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.send(word + b"\n" + channel.lay_out())
                    async for kind, data in stream.frames():
                        if kind == 1:
                            capture.add(data)
                        elif channel.feed(data):
                            await stream.send(channel.lay_out())
                    code = await stream.exit_code()
            except TimeoutError:
                await self._helper("kill -9 -1")
            except (OSError, SandboxError) as error:
                if not await self._perished():
                    raise SandboxError(f"the stream of the verifier broke: {error}") from error
                code = 137  # by what the agent left: its program was run
            finally:
                stream.close()
                self._rewritten = watch.finish() if watch else {}
            if code == 125 and word in capture.result()[0]:
                raise SandboxError(
                    f"image {self._image}: the verifier's bash could not be prepared (needs cp and chmod)"
                )
            return code, capture, channel.data, channel.nonces

    def _watch(self, place: str) -> ResultWatch | None:
        """Only on an engine of this machine whose folders we may enter."""
        return ResultWatch(place, asyncio.get_running_loop()) if place else None
