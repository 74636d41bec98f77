"""A group of learner processes under torchrun, watched from outside: started, spoken to, and ended as one."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from stages.backends.learner.megatron import wire
from stages.backends.learner.megatron.layout import Layout
from stages.errors import LearnerError

SERVE = "stages.backends.learner.megatron.serve"
LOOK_S = 1.0
GRACE_S = 10.0  # for torchrun to end the others when one rank has died
TAIL = 3000  # characters of the ranks' output that an error quotes
PREFIX, SETTINGS = "rsi-learner-", "group.json"
KEEP_S = 86_400.0  # for a look at what a group that failed has said


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. A step may take hours; a rank that gives no sign of life may not."""

    start: float = 900.0
    call: float = 12 * 3600.0
    silence: float = 600.0  # writing a large shard may hold a rank's interpreter for minutes
    collective: float = 3 * 3600.0


def own_folder() -> tuple[Path, int | None]:
    """A new folder and the descriptor that locks it for as long as this process lives. Sweeps what killed owners left."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or its owner lives, or another start sweeps it
            _sweep(old)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # 0700; short, for the socket's path
    return folder, _lock(folder)


def _sweep(folder: Path) -> None:
    status = folder.lstat()
    unlocked_yet = not (folder / SETTINGS).exists()  # just made, or kept for a look
    if status.st_uid != os.getuid() or (unlocked_yet and time.time() - status.st_mtime < KEEP_S):
        return
    lock = _lock(folder)
    try:
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _lock(folder: Path) -> int:
    """Raises BlockingIOError while a living process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Group:
    """Running from construction to `close`. Not for use by several threads at once."""

    def __init__(
        self, layout: Layout, *, device: str, options: dict[str, Any], num_threads: int | None, limits: Limits
    ) -> None:
        """Raises LearnerError, with nothing left running, when the ranks do not come up."""
        self.limits = limits
        self._folder, self._lock = own_folder()
        self._log = self._folder / "ranks.log"
        self._lives: dict[int, socket.socket] = {}
        self._ranks: list[psutil.Process] = []  # as they said: an orphan is no descendant of torchrun any more
        self._commands: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._folder / "s"))
            self._listener.listen(layout.processes + 1)
            settings = {
                "socket": str(self._folder / "s"),
                "layout": dataclasses.asdict(layout),
                "options": options,
                "num_threads": num_threads,
                "collective_timeout_s": limits.collective,
            }
            (self._folder / SETTINGS).write_text(json.dumps(settings))
            self._launch(layout.processes, device, num_threads)
            self._meet(layout.processes)
            wire.decode_answer(self._await(limits.start, "start"))
        except BaseException:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        return self._commands is None

    def call(self, name: str, **kwargs: Any) -> Any:
        """One command to all ranks, and rank 0's answer. Raises what the ranks raised, or LearnerError; then it is over."""
        if self._commands is None:
            raise LearnerError("the learner's processes have ended; resume from the last checkpoint")
        try:
            wire.put(self._commands, wire.encode(name, kwargs))
        except OSError as error:
            raise self._failed(f"it went away before {name} ({error})") from error
        return wire.decode_answer(self._await(self.limits.call, name))

    def close(self) -> None:
        """Ends every process of the group. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if self._commands is not None and process.poll() is None:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    wire.put(self._commands, wire.encode("close", {}))
                    process.wait(timeout=GRACE_S)
            self._end(process)
        self._listener.close()
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._let_go()

    # ------------------------------------------------------------------ inner parts

    def _launch(self, processes: int, device: str, num_threads: int | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads or os.environ.get("OMP_NUM_THREADS", "1"))}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks up the host's name
        else:
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's order of kernels under TP and CP
        local = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *local,
            "--max-restarts=0",
            f"--log-dir={self._folder}",
        ]
        command += [f"--nproc-per-node={processes}", "-m", SERVE, str(self._folder / SETTINGS)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _meet(self, processes: int) -> None:
        """Takes the connections of all ranks."""
        until = time.monotonic() + self.limits.start
        self._listener.settimeout(LOOK_S)
        while len(self._lives) < processes or self._commands is None:
            try:
                s, _ = self._listener.accept()
            except TimeoutError:
                self._still_runs("before all ranks were there")
                if time.monotonic() > until:
                    raise self._failed(f"only {len(self._lives)} of {processes} ranks came up") from None
                continue
            s.settimeout(self.limits.silence)
            try:
                hello = json.loads(wire.take(s) or b"{}")
            except (OSError, ValueError) as error:
                raise self._failed(f"a rank did not say who it is ({error})") from error
            if hello.get("role") == "life":
                s.setblocking(False)
                self._lives[hello["rank"]] = s
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._ranks.append(psutil.Process(hello["pid"]))
            elif hello:
                self._commands = s

    def _await(self, limit_s: float, what: str) -> bytes:
        """The next frame of rank 0, for as long as every rank beats."""
        assert self._commands is not None
        started = time.monotonic()
        seen = dict.fromkeys(self._lives, started)
        while True:
            ready, _, _ = select.select([self._commands, *self._lives.values()], [], [], LOOK_S)
            now = time.monotonic()
            for rank, life in self._lives.items():
                if life in ready:
                    if not life.recv(4096):
                        self._wait_for_end()
                        raise self._failed(f"rank {rank} died during {what}")
                    seen[rank] = now
            if self._commands in ready:
                try:
                    frame = wire.take(self._commands)
                except OSError as error:
                    raise self._failed(f"rank 0 stopped in the middle of its answer to {what} ({error})") from error
                if frame is None:
                    self._wait_for_end()
                    raise self._failed(f"rank 0 died during {what}")
                return frame
            self._still_runs(f"during {what}")
            silent = [rank for rank, at in seen.items() if now - at > self.limits.silence]
            if silent:
                raise self._failed(f"rank {silent[0]} gave no sign of life for {self.limits.silence:.0f} s in {what}")
            if now - started > limit_s:
                raise self._failed(f"{what} took longer than {limit_s:.0f} s")

    def _still_runs(self, when: str) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise self._failed(f"torchrun ended with exit code {code} {when}")

    def _wait_for_end(self) -> None:
        """Lets torchrun write down which rank failed and why."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout=GRACE_S)

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _failed(self, what: str) -> LearnerError:
        """Ends everything and says what happened; the ranks' output stays for a look."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
        (self._folder / SETTINGS).unlink(missing_ok=True)
        self._let_go()
        tail = self._log.read_text(errors="replace")[-TAIL:].strip()
        return LearnerError(
            f"the learner's process group was ended: {what}. The last checkpoint stands; resume from it. "
            f"The ranks' output is in {self._log}" + (f"; its end:\n{tail}" if tail else "")
        )

    def _end(self, process: subprocess.Popen) -> None:
        """torchrun and every rank, stopped ones too: ranks are in sessions of their own, so by descent and by name."""
        ranks, self._ranks = self._ranks, []
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(process.pid)
            ranks = [launcher, *launcher.children(recursive=True), *ranks]
        for one in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil looks at its birth, too: never at a later process
                one.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=GRACE_S)
        for s in (self._listener, self._commands, *self._lives.values()):
            if s is not None:
                s.close()  # a rank that was orphaned before it was counted ends by this
        self._lives, self._commands = {}, None
