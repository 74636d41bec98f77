"""tmux in a sandbox: full-screen programs, key names, incremental output. Skips where this machine has no tmux."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.terminal import Terminal
from stages.errors import SandboxError
from tests.integration.sandbox_kit import Machine, make_task

pytestmark = pytest.mark.skipif(shutil.which("tmux", path="/usr/bin:/bin") is None, reason="no tmux on this machine")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    out = Machine("bubblewrap", BubblewrapBackend())
    yield out
    out.close()


def test_keys_screen_and_new_output(machine: Machine, tmp_path: Path) -> None:
    async def use() -> None:
        sandbox = await machine.backend.open(make_task(tmp_path))
        terminal = Terminal(sandbox, columns=100, rows=30)
        await terminal.start()
        await terminal.send("cat input/data.txt; export A=7\n", duration_s=0.4)
        text, fresh = await terminal.new_output()
        assert fresh
        assert "data" in text.splitlines()
        await terminal.send("echo A is $A in $PWD; tput cols", duration_s=0.1)
        await terminal.send("Enter", duration_s=0.5)
        text, fresh = await terminal.new_output()
        assert fresh
        assert "A is 7 in /app" in text.splitlines()
        assert "100" in text.splitlines()
        await terminal.send("sleep 100\n", duration_s=0.2)
        await terminal.send("C-c", duration_s=0.3)
        await terminal.send("echo status $?\n", duration_s=0.4)
        assert "status 130" in await terminal.screen()
        await sandbox.close()

    machine.wait(use())


def test_full_screen_program_and_its_end(machine: Machine, tmp_path: Path) -> None:
    async def use() -> None:
        sandbox = await machine.backend.open(make_task(tmp_path))
        await sandbox.run("seq 1 500 > numbers.txt; export LESS=")
        terminal = Terminal(sandbox, columns=80, rows=20)
        await terminal.start()
        await terminal.send("less numbers.txt\n", duration_s=0.5)
        assert (await terminal.screen()).splitlines()[0] == "1"
        await terminal.send("G", duration_s=0.4)
        screen, fresh = await terminal.new_output()
        assert not fresh
        assert "500" in screen.splitlines()
        await terminal.send("q", duration_s=0.3)
        await terminal.send("exit\n", duration_s=0.5)
        assert not await terminal.is_alive()
        with pytest.raises(SandboxError, match="tmux"):
            await terminal.send("x\n")
        assert (await sandbox.run("echo the shell itself is untouched")).exit_code == 0
        assert (await sandbox.verify()).verdict == "failed"
        await sandbox.close()

    if shutil.which("less", path="/usr/bin:/bin") is None:
        pytest.skip("no less on this machine")
    machine.wait(use())


def test_odd_and_long_keystrokes(machine: Machine, tmp_path: Path) -> None:
    async def use() -> None:
        sandbox = await machine.backend.open(make_task(tmp_path))
        terminal = Terminal(sandbox)
        await terminal.start()
        await terminal.send("cat > typed.txt <<'X'\nit's \"odd\"; $HOME `x` -- \\n ünïcode;\nX\n", duration_s=0.6)
        assert (await sandbox.run("cat typed.txt")).output.decode() == 'it\'s "odd"; $HOME `x` -- \\n ünïcode;\n'
        await terminal.send("printf '%s' ';", duration_s=0.1)
        await terminal.send("' a\\;", duration_s=0.1)
        await terminal.send("", duration_s=0.1)
        await terminal.send(" > semi.txt\n", duration_s=0.4)
        assert (await sandbox.run("cat semi.txt")).output == b";a;"
        line = "y" * 3000
        await terminal.send("cat > long.txt <<'X'\n" + f"{line}\n" * 8 + "X\n", duration_s=0.0)
        until = "for i in {1..500}; do [ $(wc -c < long.txt) = 24008 ] && break; sleep 0.02; done 2>/dev/null"
        assert (await sandbox.run(f"{until}; wc -c < long.txt")).output.strip() == b"24008"
        await sandbox.close()

    machine.wait(use())
