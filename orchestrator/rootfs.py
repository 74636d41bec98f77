"""Prepared root filesystems of this installation: where they lie, and which one sandboxes use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.settings import Settings
from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.backends.sandbox.rootfs import Rootfs

FOLDER = "rootfs"


def place(settings: Settings, target: str) -> Path:
    """Where `target` lies: a plain name is below `home`, anything with a slash is a path."""
    return Path(target).expanduser().resolve() if "/" in target else settings.home / FOLDER / target


def for_sandboxes(settings: Settings, chosen: str | None = None) -> tuple[dict[str, Rootfs], str]:
    """(every one that tasks may name, the name of the one for the others). `chosen`: a name or a folder; None: the setting's.

    Raises ConfigError when it was never built.
    """
    from stages.backends.sandbox.rootfs import built_below, load

    known = {found.name: found for found in built_below(settings.home / FOLDER)}
    wanted = settings.rootfs if chosen is None else chosen
    if not wanted:
        return known, ""
    folder = place(settings, wanted)
    if not folder.is_dir():
        names = ", ".join(known) or "none yet"
        raise ConfigError(
            f"no root filesystem {wanted!r} ({folder}); built: {names}. Build it with `rsi rootfs build {wanted}`"
        )
    found = load(folder)
    return known | {found.name: found}, found.name
