"""A screen in a sandbox: tmux inside it, driven through the persistent shell. For full-screen programs and Terminus-2 keystrokes.

    terminal = Terminal(sandbox)
    await terminal.start()
    await terminal.send("vi notes.txt\n")
    await terminal.send("Escape", duration_s=0.2)
    print(await terminal.screen())

Works with every backend whose image (bubblewrap: whose machine) has tmux. Keystrokes are tmux's: an argument that is a key name
(`Enter`, `C-c`, `Escape`) is that key, anything else is typed as it stands.
"""

from __future__ import annotations

import asyncio
import shlex

from stages.backends.protocols import Shell
from stages.errors import SandboxError

_SESSION = "rsi"
_MAX_HISTORY_LINES = 100_000
_MAX_SEND_BYTES = 16_000  # tmux refuses longer messages; longer texts are sent in parts
_PATIENCE_S = 15.0


class Terminal:
    """One screen of `columns` × `rows` characters. Not for two users at once."""

    def __init__(self, sandbox: Shell, *, columns: int = 160, rows: int = 40) -> None:
        self._sandbox = sandbox
        self._size = f"-x {columns} -y {rows}"
        self._seen = ""

    async def start(self) -> None:
        """Raises SandboxError when there is no tmux in the sandbox or it does not come up. A screen that is there is used."""
        if await self.is_alive():  # of an earlier step of the same task
            self._seen = await self._history()
            return
        await self._tmux(f"-f /dev/null new-session -d {self._size} -s {_SESSION} 'exec bash --noprofile --norc -i'")
        await self._tmux(f"set-option -t {_SESSION} history-limit {_MAX_HISTORY_LINES}")
        for _ in range(100):  # the first prompt: keys typed before it would show twice
            if (await self.screen()).strip():
                break
            await asyncio.sleep(0.05)
        self._seen = await self._history()

    async def send(self, keystrokes: str, *, duration_s: float = 1.0) -> None:
        """Type, then wait. Raises SandboxError when the screen is gone (its bash has ended)."""
        for part in _parts(keystrokes):
            # a semicolon at the end of an argument would end tmux's command
            safe = f"{part[:-1]}\\;" if part.endswith(";") else part
            await self._tmux(f"send-keys -t {_SESSION} -- {shlex.quote(safe)}")
        await asyncio.sleep(min(max(duration_s, 0.0), 60.0))

    async def screen(self) -> str:
        """What is visible now, without trailing blank lines."""
        return (await self._tmux(f"capture-pane -p -t {_SESSION}")).rstrip("\n")

    async def new_output(self) -> tuple[str, bool]:
        """(text, True) with the lines that came since the last call, or (the screen, False) when it was redrawn or cleared."""
        now = await self._history()
        before, self._seen = self._seen, now
        old = before.rstrip()
        if old and now.startswith(old) and len(now.rstrip()) > len(old):
            last_line = old.rfind("\n") + 1  # a prompt that has been typed at belongs to the new text
            return now[last_line:].rstrip("\n"), True
        return await self.screen(), False

    async def is_alive(self) -> bool:
        result = await self._sandbox.run(f"tmux has-session -t {_SESSION} 2>/dev/null", timeout_s=_PATIENCE_S)
        return result.exit_code == 0

    async def _history(self) -> str:
        return await self._tmux(f"capture-pane -p -S - -t {_SESSION}")

    async def _tmux(self, arguments: str) -> str:
        result = await self._sandbox.run(f"TERM=xterm-256color tmux {arguments}", timeout_s=_PATIENCE_S)
        text = result.output.decode("utf-8", "replace")
        if result.exit_code == 127:
            raise SandboxError(
                "no tmux in this sandbox: install it on this machine (bubblewrap) or in the image (docker)"
            )
        if result.exit_code != 0:
            raise SandboxError(
                f"tmux {arguments.split()[0]} failed in the sandbox: {text.strip() or 'no answer in time'}"
            )
        return text


def _parts(keystrokes: str) -> list[str]:
    if len(keystrokes.encode()) <= _MAX_SEND_BYTES:
        return [keystrokes] if keystrokes else []
    step = _MAX_SEND_BYTES // 4
    return [keystrokes[i : i + step] for i in range(0, len(keystrokes), step)]
