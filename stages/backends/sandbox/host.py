"""The sandbox host: one small process that starts, drives, verifies and removes every sandbox of a backend.

    training process ──unix socket──▶ guard ──▶ host (init of a PID namespace, own mounts)
                                                 └─▶ bwrap ──▶ agent's bash        one per attempt
                                                 └─▶ bwrap ──▶ /tests/test.sh      after the agent is dead

It ends, with everything below it, when the socket closes or its parent dies (kill -9 included). Run as
`python -m stages.backends.sandbox.host SOCKET_FD PARENT_PID`; standard library only, because it must stay small and start fast.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from stages.backends.sandbox import kernel, seccomp, world
from stages.backends.sandbox.attempt import Attempt, TaskStore
from stages.backends.sandbox.cgroups import Cgroups
from stages.backends.sandbox.spawn import Reaper, memory_file, reserve_descriptors
from stages.backends.sandbox.wire import FrameReader, pack


class Host:
    """Serves one connection. Every request has an `id` and gets exactly one answer with it."""

    def __init__(self, connection: socket.socket, config: dict[str, Any], cgroups: Cgroups) -> None:
        self._connection = connection
        self._uid = int(config["uid"])
        self._cgroups = cgroups
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        self._filters = {trace: memory_file(seccomp.program(trace=trace)) for trace in (True, False)}
        self._undertaker = world.Undertaker()
        self._store = TaskStore("/store")
        self._attempts: dict[str, Attempt] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        # starting jails and running verifiers is work for the processors: beyond a few each they only run into time limits
        # apart, since a verifier that an agent made hang would keep other attempts from starting
        self._opening, self._judging = (asyncio.Semaphore(4 * (os.cpu_count() or 1)) for _ in range(2))
        self._send_lock = asyncio.Lock()

    async def serve(self, ends: list[int]) -> None:
        """Until the socket closes or one of `ends` becomes readable (parent or guard dead)."""
        loop = asyncio.get_running_loop()
        self._reaper = Reaper()
        for fd in ends:
            loop.add_reader(fd, self._done.set)
        loop.add_signal_handler(signal.SIGTERM, self._done.set)
        await self._send({"event": "ready", "uid": self._uid, "cgroups": self._cgroups.describe()})
        reading = asyncio.create_task(self._read())
        await self._done.wait()
        reading.cancel()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*(a.close() for a in self._attempts.values()), return_exceptions=True)
        self._cgroups.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        while True:
            try:
                data = await loop.sock_recv(self._connection, 1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                self._done.set()
                return
            for head, blob in frames.feed(data):
                task = asyncio.create_task(self._answer(head, blob))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _answer(self, head: dict[str, Any], blob: bytes) -> None:
        try:
            reply, out = await self._handle(head, blob)
        except Exception as error:
            reply, out = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}, b""
        await self._send({"id": head["id"], **reply}, out)

    async def _send(self, head: dict[str, Any], blob: bytes = b"") -> None:
        async with self._send_lock:
            try:
                await asyncio.get_running_loop().sock_sendall(self._connection, pack(head, blob))
            except ConnectionError:
                self._done.set()

    async def _handle(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        op = head["op"]
        if op == "task":
            self._store.put(head["key"], head["trees"], blob)
            return {}, b""
        if op == "forget":
            self._store.forget(head["key"])
            return {}, b""
        if op == "open":
            attempt = Attempt(
                name=head["sid"],
                bundle=self._store.get(head["key"]),
                spec=head["spec"],
                reaper=self._reaper,
                home_fd=self._home,
                undertaker=self._undertaker,
                uid=self._uid,
                filters=self._filters,
                cgroups=self._cgroups,
            )
            self._attempts[head["sid"]] = attempt
            try:
                async with self._opening:
                    if "from" in head:
                        return {"refused": await attempt.adopt(self._attempts[head["from"]])}, b""
                    await attempt.open()
            except BaseException:  # it may have been closed while it waited, and have made something since
                self._attempts.pop(head["sid"], None)
                await attempt.close()
                raise
            return {}, b""
        if op == "close":
            await self._close(head["sid"])
            return {}, b""
        attempt = self._attempts[head["sid"]]
        if op == "run":
            outcome = await attempt.run(blob, head["timeout_s"])
            return {
                "exit_code": outcome.exit_code,
                "timed_out": outcome.timed_out,
                "restarted": outcome.restarted,
                "truncated_bytes": outcome.truncated_bytes,
                "duration_s": outcome.duration_s,
            }, outcome.output
        if op == "script":
            bundle = self._store.get(head["key"]) if "key" in head else None
            async with self._judging:
                return await attempt.script(head["kind"], head["timeout_s"], bundle)
        if op == "shell":
            await attempt.start_shell()
            return {}, b""
        raise ValueError(f"unknown operation {op!r}")

    async def _close(self, sid: str) -> None:
        attempt = self._attempts.pop(sid, None)
        if attempt is not None:
            await attempt.close()
            self._reaper.kill_strays()


def _first_frame(connection: socket.socket) -> dict[str, Any]:
    frames = FrameReader()
    while data := connection.recv(1 << 16):
        for head, _ in frames.feed(data):
            return head
    os._exit(0)


def main() -> None:
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection.set_inheritable(False)
    try:
        parent_pidfd = os.pidfd_open(parent)
        if os.getppid() != parent:
            os._exit(0)  # it died before we could watch it
        config = _first_frame(connection)
        cgroups = Cgroups.create(enabled=config["cgroups"])
        if config.get("host_uid"):
            kernel.become(int(config["host_uid"]))
        guard_gone = world.enter_namespaces()
        world.build_root(config)
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        # 1 byte, not 0: a core_pattern that pipes to a program of the machine ignores 0 and heeds only 1
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        if config["uid"]:
            kernel.become_keeping_admin(int(config["uid"]))
        kernel.die_with_parent(signal.SIGKILL)  # here, because the kernel forgets it when credentials change
        reserve_descriptors()
    except (OSError, KeyError, ValueError) as error:
        connection.sendall(pack({"event": "fatal", "error": str(error)}))
        os._exit(1)
    connection.setblocking(False)

    async def run() -> None:
        await Host(connection, config, cgroups).serve([parent_pidfd, guard_gone])

    asyncio.run(run())
    os._exit(0)


if __name__ == "__main__":
    main()
