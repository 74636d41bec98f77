"""pytest for verifiers: a runner that ignores the workspace's configuration, and a reporter that no workspace file can imitate.

Runs inside the verifier's jail as `python3 -I /opt/rsi/lib/rsi_pytest.py ARGS`; standard library and pytest only.

Every outcome is written as a line `NONCE JSON` to an inherited descriptor. The nonce is read once from another descriptor, so
a program of the agent's that reads it first is found out (this runner then says so), and this process is not dumpable, so
nobody in the jail can read it from memory or open its descriptors. Children inherit neither.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from pathlib import Path

CHANNEL_FD, NONCE_FD = 194, 195
_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_DROPPED = {"-c": 1, "--config-file": 1, "--rootdir": 1, "--confcutdir": 1, "-p": 1, "-W": 0}


class Reporter:
    """Sends `{"id", "status"}` per test and `{"end", "count"}` at the end; also writes CTRF where `--ctrf` asks for it."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._outcomes: dict[str, tuple[str, str, float]] = {}
        self._ctrf: str | None = None

    def pytest_addoption(self, parser) -> None:
        parser.addoption("--ctrf", default=None, help="write a CTRF report there")

    def pytest_configure(self, config) -> None:
        self._ctrf = config.getoption("--ctrf")
        self._send({"begin": os.getpid()})

    def pytest_runtest_logreport(self, report) -> None:
        status = report.outcome if report.outcome in _RANK else "failed"
        if hasattr(report, "wasxfail"):
            status = "skipped"  # an expected failure is no passed check
        old = self._outcomes.get(report.nodeid, ("passed", "", 0.0))
        worst = max(old[0], status, key=_RANK.__getitem__)
        text = "" if status == "passed" else str(report.longrepr)[-2000:]
        self._outcomes[report.nodeid] = (worst, old[1] or text, old[2] + report.duration)
        if report.when == "teardown":
            self._send({"id": report.nodeid, "status": worst, "message": self._outcomes[report.nodeid][1]})

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = ("failed", str(report.longrepr)[-2000:], 0.0)
            self._send({"id": report.nodeid, "status": "failed", "message": self._outcomes[report.nodeid][1]})

    def pytest_sessionfinish(self, session, exitstatus) -> None:
        if self._ctrf:
            names = {"passed": "passed", "failed": "failed", "skipped": "skipped"}
            tests = [
                {"name": n, "status": names[s], "duration": round(d * 1000), "message": m}
                for n, (s, m, d) in self._outcomes.items()
            ]
            Path(self._ctrf).write_text(json.dumps({"results": {"tool": {"name": "pytest"}, "tests": tests}}))
        self._send({"end": int(exitstatus), "count": len(self._outcomes)})

    def _send(self, record: dict) -> None:
        data = f"{self._nonce} {json.dumps(record)}\n".encode()
        while data:
            data = data[os.write(CHANNEL_FD, data) :]


def read_nonce() -> str:
    """32 hex digits, or "stolen" when somebody else has taken them."""
    ready, _, _ = select.select([NONCE_FD], [], [], 2.0)
    data = os.read(NONCE_FD, 32) if ready else b""
    return data.decode() if len(data) == 32 else "stolen"


def arguments(given: list[str]) -> list[str]:
    """`given` without what would let the workspace in: configuration, roots, plug-ins. Paths must lie below /tests."""
    out: list[str] = []
    skip = 0
    for word in given:
        if skip:
            skip -= 1
            continue
        name, _, value = word.partition("=")
        if name in _DROPPED:
            skip = 0 if value else _DROPPED[name]
            continue
        if not word.startswith("-") and os.path.exists(word.split("::")[0]):
            real = os.path.realpath(word.split("::")[0])
            if real != "/tests" and not real.startswith("/tests/"):
                sys.exit(f"pytest in a verifier collects below /tests only, not {word}")
        out.append(word)
    if not any(os.path.exists(w.split("::")[0]) for w in out if not w.startswith("-")):
        out.append("/tests")
    return ["-c", "/dev/null", "--rootdir=/tests", "--confcutdir=/tests", "-p", "no:cacheprovider", *out]


def main() -> int:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    for fd in (CHANNEL_FD, NONCE_FD):
        os.set_inheritable(fd, False)
    os.environ.pop("LD_LIBRARY_PATH", None)
    for name in [n for n in os.environ if n.startswith(("PYTEST_", "PYTHON"))]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.executable = "/opt/rsi/bin/python3"
    sys.dont_write_bytecode = True
    sys.path.insert(0, "/opt/rsi/lib")
    given = arguments(sys.argv[1:])
    nonce = read_nonce()
    import pytest

    return int(pytest.main(given, plugins=[Reporter(nonce)]))


if __name__ == "__main__":
    sys.exit(main())
