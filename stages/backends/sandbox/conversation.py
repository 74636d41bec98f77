"""The conversation with the persistent bash: what both backends' shells say and hear.

Inside the sandbox a supervisor bash (re)starts a loop bash. The loop reads pairs of a NUL-ended mark and a NUL-ended command
from descriptor 198 and answers on 199 with `NUL R<rc> <mark> <cwd> NUL <export -p> NUL`; its EXIT trap answers `X…` in the
same form; the supervisor answers `NUL !<rc> NUL` when the loop ended (`exit`, `exec prog`, `kill -9 $$`). Exit codes therefore
never mix with output, and the environment of the last good moment is known, so it survives a restart. Everything an agent can
write to 199 is treated as hostile: it can fool only its own observation. The mark, new for every command, tells a report from
one that comes late because of what the agent wrote; the NUL before each keeps it apart from that. Where output and reports
come by different ways and may overtake each other (Docker), the mark is printed after the command's output, too, and
`NUL B<uptime> <last process id> <pid> NUL` says when it began.

Standard library only.
"""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass

_LOOP = r"""
exec 200>&1
__rsi_report() { builtin printf '\0%s%d %s %s\0' "$1" "$2" "$__rsi_mark" "$PWD" >&199; builtin export -p >&199; builtin printf '\0' >&199; }
trap '__rsi_report X "$?"' EXIT
while IFS= builtin read -r -d '' -u 198 __rsi_mark && IFS= builtin read -r -d '' -u 198 __rsi_command; do
 @BEGIN@{ eval "$__rsi_command"; } </dev/null >&200 2>&200 198<&- 200>&-
 __rsi_code=$?; @MARK@__rsi_report R "$__rsi_code"
done
"""
_BEGIN = r"""builtin read -r __rsi_up _ < /proc/uptime; builtin read -r _ _ _ _ __rsi_last < /proc/loadavg
 builtin printf '\0B%s %d %d\0' "$__rsi_up" "$__rsi_last" $$ >&199
 """
_MARK = r"""builtin printf %s "$__rsi_mark" >&200; """
_SUPERVISOR = r"""
%s
while :; do
 bash --noprofile --norc -c "$1" bash
 printf '\0!%%d\0' "$?" >&199
done
"""
MAX_REPORT_BYTES = 4 << 20
RESTORE_S = 30.0  # a new bash answers in milliseconds; a machine with a load of 100 takes its time
RESTORE_OLD_S = 5.0  # with what an agent left of its environment, which may be made so that it never ends


class NoShell(OSError):
    """A bash was started and does not answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One command, as the shell reports it."""

    output: bytes
    exit_code: int | None
    timed_out: bool
    restarted: bool
    truncated_bytes: int
    duration_s: float


def command_line(prelude: str, *, two_ways: bool = False) -> list[str]:
    """argv of the supervisor. `prelude` runs once before it (limits, descriptors). `two_ways`: reports may overtake output."""
    loop = _LOOP.replace("@BEGIN@", _BEGIN if two_ways else "").replace("@MARK@", _MARK if two_ways else "")
    return ["/bin/bash", "--noprofile", "--norc", "-c", _SUPERVISOR % prelude, "bash", loop]


class Reports:
    """Parses what comes from descriptor 199 and remembers cwd and environment for a restart."""

    def __init__(self, workdir: str, exports: bytes = b"") -> None:
        self.cwd = os.fsencode(workdir)
        self.exports = exports
        self.began: tuple[int, int] | None = None  # of the running command: 1/100 s of uptime, last process id then
        self.loop_pid: int | None = None  # as the sandbox counts
        self.mark = b""  # of the running command
        self._buffer = bytearray()
        self._first = (self.cwd, self.exports)

    def __len__(self) -> int:
        return len(self._buffer)

    def forget(self) -> None:
        """Back to the directory and the environment of the beginning."""
        self.cwd, self.exports = self._first

    def ask(self, command: bytes) -> bytes:
        """What to send for a command; only the report about this one counts from now on."""
        self._buffer.clear()
        self.began = None
        self.mark = b"\x1e" + secrets.token_hex(12).encode() + b"\x1e"
        return self.mark + b"\0" + command + b"\0"

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[str, int | None] | None:
        """("done", rc) or ("ended", rc of the loop bash); None while there is no whole message."""
        while True:
            end = self._buffer.find(b"\0")
            if end < 0:
                return None
            first = bytes(self._buffer[:end])
            if first.startswith(b"!"):
                del self._buffer[: end + 1]
                return "ended", _number(first[1:])
            if first.startswith(b"B"):
                del self._buffer[: end + 1]
                self._began(first[1:])
                continue
            if not first.startswith((b"R", b"X")):  # what stands between two reports, or the agent's own
                del self._buffer[: end + 1]
                continue
            end2 = self._buffer.find(b"\0", end + 1)
            if end2 < 0:
                return None
            exports = bytes(self._buffer[end + 1 : end2])
            del self._buffer[: end2 + 1]
            code, _, rest = first[1:].partition(b" ")
            mark, _, cwd = rest.partition(b" ")
            if mark not in (self.mark, b""):  # without one: the agent's shell has lost its variables
                continue
            if cwd.startswith(b"/"):
                self.cwd = cwd
            if exports.startswith(b"declare -x "):
                self.exports = exports
            if first.startswith(b"R"):
                return "done", _number(code)

    def restore_script(self) -> bytes:
        """Gives a new bash the old environment and directory."""
        cwd = shlex.quote(os.fsdecode(self.cwd))
        return self.exports + b"\n" + os.fsencode(f"cd -- {cwd} 2>/dev/null || cd /")

    def _began(self, text: bytes) -> None:
        words = text.split()
        if len(words) == 3 and len(text) < 60 and all(w.replace(b".", b"", 1).isdigit() for w in words):
            self.began = int(float(words[0]) * 100), int(float(words[1]))
            self.loop_pid = int(float(words[2]))


def no_shell(error: OSError) -> bytes:
    """What an agent is told that has made it impossible to give it a shell."""
    return f"[no shell: {error}]\n".encode("utf-8", "replace")


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 4 else None
