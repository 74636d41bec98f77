"""Passwords of the console: argon2id, made by the command line and checked by the console."""

from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from stages.errors import ConfigError

SHORTEST = 8  # characters

_hasher = PasswordHasher()


def hash_password(password: str) -> str:
    """The text that goes into `users.password_hash` (about 50 ms). Raises ConfigError for a short password."""
    if len(password) < SHORTEST:
        raise ConfigError(f"The password has {len(password)} characters; at least {SHORTEST} are needed.")
    return _hasher.hash(password)


def verify_password(password_hash: str | None, password: str) -> bool:
    """True when they belong together. A person without a password cannot sign in with one."""
    # A missing hash takes as long as a wrong password, so that logins cannot be told apart by time.
    try:
        return _hasher.verify(password_hash or _nobody(), password) and bool(password_hash)
    except (VerificationError, InvalidHashError):
        return False


@cache
def _nobody() -> str:
    return _hasher.hash("nobody")
