"""What a sandbox on this machine really enforces: every row is an attack that was just tried (`rsi doctor`).

Works for any backend: it only opens a sandbox of a small task of its own and runs commands in it.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stages.backends.protocols import Capability, Sandbox, SandboxBackend
from stages.domain import Limits, Stratum, Task, Verdict
from stages.errors import SandboxError

_LIMITS = Limits(memory_mb=96, storage_mb=8, inodes=256, pids=40, cpus=0.5, command_timeout_s=10.0)
_SLOW = replace(_LIMITS, cpus=0.1)  # so little that a busy machine cannot look like a limit
# Passed: what the agent left in the background had begun to write, and writes no more.
_TEST_SH = """#!/bin/bash
began=$(wc -c < {workdir}/ticks.txt); sleep 0.3; later=$(wc -c < {workdir}/ticks.txt)
[ "$began" -gt 0 ] && [ "$began" = "$later" ] && echo 1 > /logs/verifier/reward.txt
"""

# One syscall by number, from whichever interpreter the sandbox has; prints the errno (0: it worked).
_SYSCALL = (
    "syscall_errno() {{ if command -v perl >/dev/null; then perl -e '$r = syscall(@ARGV[0..0], map {{ $_ + 0 }} @ARGV[1..$#ARGV]);"
    " print $r == -1 ? $!+0 : 0' \"$@\"; else python3 -c 'import ctypes, sys; l = ctypes.CDLL(None, use_errno=True);"
    ' r = l.syscall(*map(int, sys.argv[1:])); print(ctypes.get_errno() if r == -1 else 0)\' "$@"; fi; }}; {calls}'
)
_CALLS = {
    "x86_64": {
        "keyctl": "250 0 -2 1",
        "io_uring_setup": "425 1 0",
        "userfaultfd": "323 0",
        "bpf": "321 0 0 0",
        "clone3": "435 0 0",
    },
    "aarch64": {
        "keyctl": "219 0 -2 1",
        "io_uring_setup": "425 1 0",
        "userfaultfd": "282 0",
        "bpf": "280 0 0 0",
        "clone3": "435 0 0",
    },
}


def probe_task(root: Path) -> Task:
    """A task that passes when nothing of the agent writes any more; written below `root`."""
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "test.sh").write_text(_TEST_SH.format(workdir="/app"))
    return Task(
        id="capability-probe",
        suite="doctor",
        family="doctor",
        stratum=Stratum.EASY,
        instruction="",
        root=root,
        digest=secrets.token_hex(8),
        files={"hello.txt": b"hello\n"},
        limits=_LIMITS,
        verifier_timeout_s=20.0,
    )


async def probe(backend: SandboxBackend) -> list[Capability]:
    """All rows, in the order of the threat table. A backend that cannot start gives one row that says why."""
    try:
        await backend.start()
    except SandboxError as error:
        return [Capability(name="sandbox", enforced=False, detail=str(error))]
    rows: list[Capability] = []
    with tempfile.TemporaryDirectory(prefix="rsi-probe-") as folder:
        task = probe_task(Path(folder) / "task")
        for group, limits in _GROUPS:
            sandbox = await backend.open(replace(task, limits=limits))
            try:
                rows += await group(sandbox)
            finally:
                await sandbox.close()
    return rows


async def _say(sandbox: Sandbox, command: str, timeout_s: float = 10.0) -> str:
    return (await sandbox.run(command, timeout_s=timeout_s)).output.decode(errors="replace").strip()


async def _isolation(sandbox: Sandbox) -> Sequence[Capability]:
    rows = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = await _say(sandbox, f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo open || echo closed")
        links = await _say(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\\n' ' '")
        rows.append(_row("no network", said == "closed" and links.split() in ([], ["lo"]), f"a listener on this machine: {said}; interfaces: {links or 'none'}"))  # fmt: skip
    with tempfile.NamedTemporaryFile(prefix="rsi-secret-") as secret:
        seen = await _say(
            sandbox, f"ls -d {secret.name} {Path.home()}/.[a-z]* /home/* /etc/shadow /var/lib 2>/dev/null"
        )
        rows.append(_row("host files hidden", not seen, seen or "a temporary file, home folders, /etc/shadow"))
    mine = os.getpid()
    seen = await _say(sandbox, "ls -d /proc/[0-9]* | wc -l")
    rows.append(
        _row("host processes hidden", seen.isdigit() and int(seen) < 12, f"{seen} processes visible; ours is {mine}")
    )
    leak = await _say(sandbox, "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -ciE '[r]si-probe|[v]logs|[/]store|[P]YTHONPATH|[V]IRTUAL_ENV'")  # fmt: skip
    rows.append(
        _row("environment and arguments clean", leak == "0", "nothing of ours in any /proc/*/environ or cmdline")
    )
    said = await _say(sandbox, "for p in /usr/x /etc/x /x /dev/x /bin/x; do (: > $p) 2>/dev/null && echo $p; done")
    rows.append(_row("system files read-only", not said, "/, /usr, /etc, /dev" if not said else f"writable: {said}"))
    status = dict(
        line.split(":\t", 1) for line in (await _say(sandbox, "cat /proc/self/status")).splitlines() if ":\t" in line
    )
    caps = status.get("CapEff", "?") + status.get("CapBnd", "?")
    rows.append(
        _row(
            "no capabilities", set(caps) == {"0"}, f"effective {status.get('CapEff')}, bounding {status.get('CapBnd')}"
        )
    )
    rows.append(_row("no new privileges", status.get("NoNewPrivs") == "1", f"NoNewPrivs {status.get('NoNewPrivs')}"))
    said = await _say(sandbox, "unshare -Ur true 2>&1 && echo made; mount -t tmpfs x /tmp 2>&1 && echo mounted; chroot / true 2>&1 && echo chrooted")  # fmt: skip
    bad = [w for w in ("made", "mounted", "chrooted") if w in said.split()]
    rows.append(_row("no namespaces, mounts, chroot", not bad, "all refused" if not bad else f"allowed: {bad}"))
    calls = _CALLS.get(os.uname().machine, {})
    said = await _say(sandbox, _SYSCALL.format(calls="; ".join(f"syscall_errno {c}; echo" for c in calls.values())))
    got = dict(zip(calls, said.split(), strict=False))
    good = status.get("Seccomp") == "2" and len(got) == len(calls) > 0
    good = good and all(v == ("38" if k == "clone3" else "1") for k, v in got.items())
    rows.append(
        _row(
            "system call filter",
            good,
            f"mode {status.get('Seccomp')}; errno " + ", ".join(f"{k} {v}" for k, v in got.items()),
        )
    )
    return rows


async def _processes(sandbox: Sandbox) -> Sequence[Capability]:
    said = await _say(
        sandbox,
        "sleep 0.6 & p=$!; bash -c 'for i in {1..200}; do sleep 9 & done' 2>/dev/null & wait $p; set -- /proc/[0-9]*; echo $#",
    )
    count = int(said.split()[0]) if said.split() and said.split()[0].isdigit() else -1
    return [_row("processes, whole sandbox", 0 < count <= _LIMITS.pids + 8, f"200 forks, {count} alive at the limit of {_LIMITS.pids}")]  # fmt: skip


async def _resources(sandbox: Sandbox) -> Sequence[Capability]:
    rows = []
    said = await _say(sandbox, "head -c 64M /dev/zero > /tmp/x; stat -c %s /tmp/x; rm -f /tmp/x")
    size = int(said.split()[-1]) if said and said.split()[-1].isdigit() else -1
    rows.append(
        _row("disk space", 0 <= size <= _LIMITS.storage_mb << 20, f"64 MiB written, {max(size, 0) >> 20} MiB kept")
    )
    said = await _say(sandbox, "head -c 64M /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x; rm -f /dev/shm/x")
    size = int(said.split()[-1]) if said and said.split()[-1].isdigit() else -1
    rows.append(
        _row("shared memory", 0 <= size <= 32 << 20, f"64 MiB written to /dev/shm, {max(size, 0) >> 20} MiB kept")
    )
    said = await _say(
        sandbox,
        "mkdir /tmp/n; for i in $(seq 1000); do : > /tmp/n/$i; done 2>/dev/null; ls /tmp/n | wc -l; rm -rf /tmp/n",
    )
    rows.append(_row("files (inodes)", said.isdigit() and int(said) <= _LIMITS.inodes, f"1000 files made, {said} kept"))
    result = await sandbox.run("yes | head -c 20000000", timeout_s=10)
    rows.append(
        _row(
            "output cap",
            len(result.output) <= _LIMITS.output_bytes + 100,
            f"20 MB printed, {len(result.output)} bytes kept",
        )
    )
    result = await sandbox.run("sleep 60 & sleep 60", timeout_s=0.3)
    rows.append(
        _row(
            "command time-out",
            result.timed_out and result.duration_s < 5,
            f"sleep 60 ended after {result.duration_s:.1f} s",
        )
    )
    return rows


async def _memory(sandbox: Sandbox) -> Sequence[Capability]:
    # `tail` on a pipe holds exactly what it will print; the reader makes it hold that for a while
    part, whole = (_LIMITS.memory_mb * 2 // 3) << 20, (_LIMITS.memory_mb * 2) << 20
    hold = "hold() { head -c $1 /dev/zero | tail -c $1 | { sleep 1; wc -c; }; }; "
    one = await _say(sandbox, hold + f"hold {whole} 2>/dev/null; echo end", 30)
    both = await _say(sandbox, hold + f"hold {part} 2>/dev/null & hold {part} 2>/dev/null & wait; echo end", 30)
    lived = both.split().count(str(part))
    return [
        _row("memory, one process", "end" in one and str(whole) not in one.split(), f"{whole >> 20} MiB under a limit of {_LIMITS.memory_mb}"),
        _row("memory, whole sandbox", "end" in both and lived < 2, f"two processes of {part >> 20} MiB each: {lived} lived"),
    ]  # fmt: skip


async def _processor(sandbox: Sandbox) -> Sequence[Capability]:
    # so many loops that they would get a large part of a busy machine, too: little use of it can only be the limit
    loops = "for i in {1..24}; do (while :; do :; done) & done; sleep 1; kill $(jobs -p); wait"
    said = await _say(sandbox, f"bash -c 'b=$EPOCHREALTIME; {loops} 2>/dev/null; echo $b $EPOCHREALTIME; times'", 30)
    lines = said.splitlines() or [""]
    used, words = (
        _seconds(lines[-1]),
        next((line.split() for line in lines if re.fullmatch(r"[\d.]+ [\d.]+", line)), []),
    )
    took = float(words[1]) - float(words[0]) if words else 1.0
    detail = f"24 loops at {_SLOW.cpus} CPU used {used:.2f} s of it in {took:.1f} s"
    return [_row("CPU, whole sandbox", 0 < used < 0.25 * took, detail)]


async def _verifier(sandbox: Sandbox) -> Sequence[Capability]:
    hidden = await _say(
        sandbox, "ls -d /tests /solution /logs /opt/rsi 2>/dev/null; find / -xdev -name test.sh 2>/dev/null"
    )
    await sandbox.run(
        "setsid bash -c 'while :; do echo >> ticks.txt; sleep 0.01; done' & until [ -s ticks.txt ]; do :; done"
    )
    report = await sandbox.verify()
    return [
        _row(
            "verifier hidden from the agent",
            not hidden,
            hidden or "no /tests, /solution or /logs before the agent is dead",
        ),
        _row(
            "agent dead before the verifier runs",
            report.verdict is Verdict.PASSED,
            f"what it left running writes no more: {report.verdict}",
        ),
    ]


def _seconds(times_line: str) -> float:
    """Sum of bash's `times` line, `0m0.123s 0m0.045s`."""
    total = 0.0
    for word in times_line.split():
        minutes, _, seconds = word.rstrip("s").partition("m")
        try:
            total += 60 * float(minutes) + float(seconds)
        except ValueError:
            return -1.0
    return total


def _row(name: str, enforced: bool, detail: str) -> Capability:
    return Capability(name=name, enforced=enforced, detail=detail)


_GROUPS: tuple[tuple[Callable[[Sandbox], Awaitable[Sequence[Capability]]], Limits], ...] = (
    (_isolation, _LIMITS),
    (_processes, _LIMITS),
    (_resources, _LIMITS),
    (_memory, _LIMITS),
    (_processor, _SLOW),
    (_verifier, _LIMITS),
)
