"""The verifier of an embedded task: `tests/test.sh`, pure bash, at most one external process.

Hostile workspaces: files are read through `slurp`, which takes regular files of less than 4096 characters without NUL and
nothing else (no link, directory, FIFO or device), so that neither a huge file nor a special one can stall or fool it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stages.domain import CheckRole, CheckSpec
from stages.tasks.families import Check
from stages.tasks.families.base import quote

GATE = "untouched"
"""Id of the gate check: every input that must not change is there, byte for byte."""

FUNCTIONS = r"""
slurp() { # text of a small regular file into $text; fails on anything else
  local rc=1
  text=
  [[ -f $1 && ! -L $1 ]] || return 1
  { IFS= read -r -d '' -n 4096 text; rc=$?; } 2>/dev/null <"$1" || return 1
  ((rc)) # the end of the file came before the limit and before any NUL
}
is_file() { [[ -f $1 && ! -L $1 ]]; }
is_dir() { [[ -d $1 && ! -L $1 ]]; }
gone() { # no entry of any kind under any of these names
  local f
  for f; do [[ ! -e $f && ! -L $f ]] || return 1; done
}
equals() { slurp "$1" && [[ $text == "$2" ]]; }
has() { slurp "$1" && [[ $text == *"$2"* ]]; }
has_lines() { # every given line is a whole line of the file
  slurp "$1" || return 1
  local line
  for line in "${@:2}"; do [[ $'\n'$text == *$'\n'"$line"$'\n'* ]] || return 1; done
}
mode() { # octal permissions of a regular file into $m; one stat for all files
  is_file "$1" || return 1
  [[ $modes ]] || modes=$'\n'$(/usr/bin/stat -c '%n %a' -- "${moded[@]}" 2>/dev/null)$'\n'
  [[ $modes == *$'\n'"$1 "* ]] || return 1
  m=${modes#*$'\n'"$1 "} m=${m%%$'\n'*}
}
"""

_HEAD = r"""#!/bin/bash
# Verifier of one embedded task (generated). Reads the workspace, reports every check as CTRF, starts one process at most.
PATH=/usr/bin:/bin LC_ALL=C
app=/app logs=/logs/verifier
"""

_REPORT = r"""
now() { t=${EPOCHREALTIME/[.,]/}; }
rows= passed=0 failed=0
report() { # the status of the previous command is the check's outcome
  local ok=$? status=failed before=$t
  now
  if ((ok == 0 && usable)); then status=passed; ((++passed)); else ((++failed)); fi
  rows+="${rows:+,}{\"name\":\"$1\",\"status\":\"$status\",\"duration\":$(((t - before) / 1000))}"
}
now
start=$t usable=1
cd -P -- "$app" 2>/dev/null || usable=0
"""

_TAIL = r"""
cd /
for out in "$logs"/ctrf.json "$logs"/reward.txt; do
  [[ -e $out || -L $out ]] && /bin/rm -rf -- "$out"
done
[[ -d $logs ]] || /bin/mkdir -p -- "$logs"
printf '{"results":{"tool":{"name":"terminal-rsi"},"summary":{"tests":%d,"passed":%d,"failed":%d,"pending":0,"skipped":0,"other":0,"start":%d,"stop":%d},"tests":[%s]}}\n' \
  "$((passed + failed))" "$passed" "$failed" "$((start / 1000))" "$((t / 1000))" "$rows" >"$logs"/ctrf.json
printf '%d\n' "$((failed == 0))" >"$logs"/reward.txt
((failed == 0))
"""


def check_id(position: int, family: str, check: Check) -> str:
    """Id of a check in its task: "2-move-arrived"."""
    return f"{position}-{family}-{check.id}"


def manifest(ids: Iterable[str]) -> tuple[CheckSpec, ...]:
    """The test-id manifest: scenario checks in order, then the gate."""
    return (*(CheckSpec(id=i) for i in ids), CheckSpec(id=GATE, role=CheckRole.GATE))


def gate_test(inputs: Sequence[tuple[str, str]]) -> str:
    """Bash condition: every (path, content) is there unchanged."""
    return " && ".join(f"equals {quote(path)} {quote(text)}" for path, text in inputs) or "true"


def moded_files(paths: Iterable[str]) -> str:
    """Bash assignment of the files whose modes `mode` may be asked for."""
    return f"modes= moded=({' '.join(quote(p) for p in paths)})"


def test_script(checks: Sequence[tuple[str, str]], moded: Iterable[str]) -> str:
    """The whole of `tests/test.sh`. `checks`: (id, bash condition), the gate included. Exit status 0 iff all passed."""
    body = "".join(f"{{ {test}; }}\nreport {name}\n" for name, test in checks)
    return f"{_HEAD}{moded_files(moded)}\n{FUNCTIONS}{_REPORT}{body}{_TAIL}"


def inline_script(checks: Sequence[tuple[str, str]], moded: Iterable[str]) -> str:
    """The same conditions for a shell that already stands in the workspace and has `FUNCTIONS`; sets $verdict to a
    string of 1 (passed) and 0, one digit a check. For the scripted transcripts of the pre-training corpus."""
    body = "".join(f"if {{ {test}; }}; then verdict+=1; else verdict+=0; fi\n" for _, test in checks)
    return f"verdict=\n{moded_files(moded)}\n{body}"
