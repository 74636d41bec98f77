"""`rsi rootfs build | list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import terminal

app = typer.Typer(
    name="rootfs",
    help="Prepared root filesystems: what sandboxes hold beside their task.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def build(
    target: Annotated[
        str,
        typer.Argument(
            help="A name (kept under --home), a new folder, or a new .tar file.",
            show_default=False,
            metavar="NAME|DIR|TAR",
        ),
    ],
    packages: Annotated[
        str, typer.Option(help="More Debian packages (host: programs), with commas.", show_default="none")
    ] = "",
    source: Annotated[
        str | None,
        typer.Option("--from", help="debootstrap, packages or host.", show_default="the best that works here"),
    ] = None,
) -> None:
    """Build a root filesystem without a container registry, for both sandbox backends.

    `debootstrap` makes a fresh Debian (root only); `packages` takes the files of this machine's Debian packages and fetches
    those that are not installed; `host` takes an allow-list of programs, on any distribution. Sandboxes mount it read-only, with
    overlays for /home, /srv and /var; verifiers get python3 from it and pytest from a mount of their own.

    Examples:

        rsi rootfs build base

        rsi rootfs build tools --packages jq,git,sqlite3

        rsi rootfs build ./rootfs.tar && docker import ./rootfs.tar base:1
    """
    from orchestrator import rootfs as rooms
    from stages.backends.sandbox import rootfs
    from stages.errors import ConfigError

    names = tuple(word for word in (p.strip() for p in packages.split(",")) if word)
    if source is not None and source not in set(rootfs.Source):
        raise ConfigError(f"--from {source}: use {', '.join(rootfs.Source)}")
    kind = rootfs.Source(source) if source else None
    out = terminal.console()
    out.print(f"Building from {kind or rootfs.best_source()}; with packages to fetch this takes minutes …")
    if target.endswith(".tar"):
        path = Path(target)
        if path.exists():
            raise ConfigError(f"{path} exists already: choose another name, or remove it")
        try:
            used = rootfs.write_rootfs(path, names, kind)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        out.print(
            f"Written to {path} (from {used}, {path.stat().st_size / 1e6:.0f} MB). `docker import {path} NAME` makes an image."
        )
        return
    made = rootfs.build(rooms.place(terminal.settings(), target), packages=names, source=kind)
    out.print(f"Built {made.name} in {made.folder} (from {made.source}, {made.size_bytes / 1e6:.0f} MB).")
    out.print(
        f'Use it: `rsi tasks run DIR --rootfs {target}`, RSI_ROOTFS={target}, or rootfs = "{made.name}" in a task\'s [metadata.terminal_rsi].'
    )


@app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """The root filesystems of this installation.

    Examples:

        rsi rootfs list

        rsi rootfs list --json
    """
    from orchestrator.rootfs import FOLDER
    from stages.backends.sandbox.rootfs import built_below

    settings = terminal.settings()
    found = built_below(settings.home / FOLDER)
    if json:
        import json as codec

        rows = [
            {"name": r.name, "folder": str(r.folder), "from": r.source, "packages": r.packages, "digest": r.digest,
             "size_bytes": r.size_bytes, "created": r.created, "default": r.name == settings.rootfs}
            for r in found
        ]  # fmt: skip
        print(codec.dumps(rows))
        return
    out = terminal.console()
    if not found:
        out.print(
            f"None in {settings.home / FOLDER}. Sandboxes use this machine's /usr. `rsi rootfs build base` makes one."
        )
        return
    table = terminal.table("name", "from", "MB", "packages", "digest", "created", right=("MB",))
    for r in found:
        name = f"{r.name} (default)" if r.name == settings.rootfs else r.name
        table.add_row(
            name, r.source, f"{r.size_bytes / 1e6:.0f}", ", ".join(r.packages) or "basic", r.digest[:12], r.created
        )
    out.print(table)
