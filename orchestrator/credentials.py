"""Random secrets that let somebody in, their digests, and the key that signs the console's cookies.

A cookie, a link and an API token hold 256 random bits, so that a plain SHA-256 is enough to store them by: nobody can
try them out, and a stolen database lets nobody in. (Passwords are argon2: `orchestrator.passwords`.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from stages.errors import ConfigError

TOKEN_PREFIX = "rsi_"
SHORTEST_KEY = 32  # characters
HINT = len(TOKEN_PREFIX) + 6


def fresh() -> str:
    """256 random bits as text that fits a URL and a cookie."""
    return secrets.token_urlsafe(32)


def fresh_token() -> str:
    """An API token; the prefix lets a secret scanner know it."""
    return TOKEN_PREFIX + fresh()


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def signing_key(path: Path) -> str:
    """The key in `path`; the first reader makes it, readable by its owner only.

    Raises ConfigError when the file cannot be read or written, or holds too little.
    """
    try:
        if not path.exists():
            _make(path)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The file that signs the console's cookies, {path}, cannot be used: {error}. "
            "Make it readable for this account, or name another with RSI_SECRET_FILE."
        ) from error
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"The file {path} holds {len(key)} characters; a key has at least {SHORTEST_KEY}. Delete it and a new one is made."
        )
    return key


def _make(path: Path) -> None:
    """Whole or not at all: of two consoles that start together, one makes the key and both read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(fresh() + "\n")
        with suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink()
