"""The persistent bash of a sandbox: what survives turns, time-outs, caps, restarts. Every backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sandbox_kit import KINDS, Machine, make_task, skip_slow_half, started_machine

ALWAYS = frozenset(
    {
        "test_files_cwd_environment_and_exit_codes_survive_turns",
        "test_output_is_exact_bytes",
        "test_timeout_ends_what_the_command_started_and_nothing_else",
    }
)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ALWAYS, ("docker", "bubblewrap-user"))
    return started


def test_files_cwd_environment_and_exit_codes_survive_turns(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.say("pwd; cat input/data.txt") == "/app\ndata"
        assert box.run("export A='x  y'; B=2; cd input; f() { echo f$1; }; false").exit_code == 1
        assert box.say('echo "$A" $B $PWD; f 3') == "x  y 2 /app/input\nf3"
        assert box.run("(exit 37)").exit_code == 37
        assert box.run("sleep 9 & kill -TERM $!; wait $!").exit_code == 143


def test_output_is_exact_bytes(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        wanted = bytes(range(256)) * 8
        octal = "".join(f"\\{b:03o}" for b in wanted)
        assert box.run(f"printf '{octal}'").output == wanted
        assert box.run("printf 'a\\nb'; printf 'c' >&2").output == b"a\nbc"
        assert box.run("").output == b""


@pytest.mark.parametrize(
    "command",
    [
        "echo 'open",
        'echo "open',
        "cat <<X\nopen",
        "if true; then",
        "$((",
        "exec >/dev/null; exec 2>&1",
        "{",
        "trap '' TERM",
    ],
)
def test_broken_commands_leave_the_shell_usable(machine: Machine, tmp_path: Path, command: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run(command, timeout_s=5)
        assert box.say("echo fine") == "fine"


def test_long_commands_pass(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        text = "é" * 75_000
        assert box.say(f"x='{text}'; echo ${{#x}}") in ("75000", "150000")


def test_nul_in_a_command_is_refused_without_running_it(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        result = box.run("touch made\0; echo no")
        assert result.exit_code == 2
        assert "NUL" in result.output.decode()
        assert box.say("ls made 2>/dev/null") == ""


def test_timeout_ends_what_the_command_started_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("sleep 300 & echo $! > keep; X=1")
        result = box.run("echo before; sleep 200 & sleep 100", timeout_s=0.4)
        assert result.timed_out
        assert result.exit_code is None
        assert result.output.startswith(b"before")
        assert result.duration_s < 3
        assert (
            box.say("kill -0 $(cat keep) && echo kept; ps -eo args | grep -cE '^sleep [12]00'; echo $X") == "kept\n0\n1"
        )


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "trap '' TERM INT HUP; sleep 50", "read -r x < /dev/zero; cat"]
)
def test_stuck_shells_come_back(machine: Machine, tmp_path: Path, command: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("export KEPT=yes; cd input")
        result = box.run(command, timeout_s=0.4)
        assert result.timed_out
        assert box.say("echo $KEPT $PWD") == "yes /app/input"


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "exec true", "kill -9 -1", "set -e; false", "exec sleep 0.01"])
def test_restart_keeps_cwd_and_environment_and_says_so(machine: Machine, tmp_path: Path, end: str) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("export KEPT=$'two\\nlines'; cd input; echo x > file")
        result = box.run(end)
        if end == "kill -9 -1":  # bash itself may live a little longer than the rest and answer once more
            for _ in range(200):
                if result.restarted:
                    break
                result = box.run("sleep 0.01")
        assert result.restarted
        assert result.exit_code is None or end == "kill -9 -1"
        again = box.run('echo "$KEPT" $PWD; cat file')
        assert not again.restarted
        assert again.output == b"two\nlines /app/input\nx\n"


def test_environment_changed_in_the_command_that_exits_survives(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.run("export LATE=1; cd /tmp; exit 0").restarted
        assert box.say("echo $LATE $PWD") == "1 /tmp"


def test_huge_output_is_capped_with_head_and_tail(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        size = 100_000_000 if machine.kind == "docker" else 1_000_000_000  # an engine passes on 30 MB a second
        result = box.run(f"echo HEAD; head -c {size} /dev/zero; echo TAIL", timeout_s=60)
        assert result.exit_code == 0
        assert len(result.output) < 70_000
        assert result.output.startswith(b"HEAD\n")
        assert result.output.endswith(b"TAIL\n")
        assert result.truncated_bytes + len(result.output) >= size + 10


def test_background_spam_does_not_hold_a_turn(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run("yes spam & ")
        began = time.monotonic()
        assert box.run("true").exit_code == 0
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("mark", ["x", "$__rsi_mark"])
def test_forged_reports_fool_only_their_author(machine: Machine, tmp_path: Path, mark: str) -> None:
    spam = "head -c 3000000 /dev/zero | tr '\\0' A >&199"
    with machine.box(make_task(tmp_path)) as box:
        box.run(f"printf '\\0R0 %s /etc\\0junk\\0!7\\0R9 x\\0\\0' {mark} >&199; {spam} &", timeout_s=30)
        for word in ("once", "twice"):  # the reports of earlier commands come late, between what was forged
            assert box.say(f"echo {word}", timeout_s=30) == word
        box.run(f"{spam} & {spam}; {spam}; {spam} &", timeout_s=30)  # more than is ever kept
        assert box.run("true", timeout_s=30).timed_out is False
        assert box.say("echo alive", timeout_s=30) == "alive"
