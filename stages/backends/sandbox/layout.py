"""What a jail sees, as bwrap options: this machine's system files, or a prepared root filesystem. Standard library only.

System files are read-only in both cases: a verifier runs programs from there. Of a prepared root filesystem `/home`, `/srv` and
`/var` can be written, too: overlays whose upper halves lie on the attempt's own sized tmpfs, so that the verifier finds them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

UPPER = "/ws/over"
SHM_MB = 8
READ_ONLY = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_OVERLAID = ("home", "srv", "var")
_OURS = frozenset({"proc", "dev", "sys", "run", "tmp", "root", "tests", "solution", "logs"})
_NAMESPACES = [
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns", "--uid", "0", "--gid", "0", "--hostname", "sandbox",
    "--die-with-parent", "--new-session", "--cap-drop", "ALL",
]  # fmt: skip


def jail_options(root: str, workdir: str) -> list[str]:
    """Every namespace, the system files, the attempt's own writable folders. `root`: a prepared one; "": this machine's.

    The root itself is still writable for what the caller adds; end with `--remount-ro /`.
    """
    system = list(_prepared(root, workdir)) if root else list(_machine())
    var_tmp = [] if root and "var" in overlaid(root, workdir) else ["--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    return [
        *_NAMESPACES, *system, "--proc", "/proc", "--dev", "/dev", "--size", str(SHM_MB << 20), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev", "--dir", "/run", *var_tmp, "--bind", "/ws/tmp", "/tmp",
        "--bind", "/ws/home", "/root", "--bind", "/ws/work", workdir,
    ]  # fmt: skip


def overlaid(root: str, workdir: str) -> list[str]:
    """Names of the top folders that get an overlay: not the one that holds the workspace, an agent could move that away."""
    top = workdir.split("/")[1]
    return [
        n for n in _OVERLAID if root and n != top and os.path.isdir(f"{root}/{n}") and not os.path.islink(f"{root}/{n}")
    ]


def read_only_place(workdir: str) -> bool:
    """Whether a workspace there would lie in system files, where no jail can have a writable folder."""
    return workdir.strip("/").split("/")[0] in READ_ONLY


def _machine() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc")
    for name in READ_ONLY[2:]:
        if os.path.islink(f"/{name}"):
            yield from ("--symlink", os.readlink(f"/{name}"), f"/{name}")
        elif os.path.isdir(f"/{name}"):
            yield from ("--ro-bind", f"/{name}", f"/{name}")


def _prepared(root: str, workdir: str) -> Iterator[str]:
    parts = workdir.split("/")[1:]
    overlays = overlaid(root, workdir)
    for name in sorted(os.listdir(root)):
        if os.path.islink(f"{root}/{name}"):
            yield from ("--symlink", os.readlink(f"{root}/{name}"), f"/{name}")
        elif name in overlays:
            place = f"{UPPER}/{name}"
            yield from ("--overlay-src", f"{root}/{name}", "--overlay", f"{place}/up", f"{place}/work", f"/{name}")
        elif name == parts[0]:
            yield from _around(f"{root}/{name}", f"/{name}", parts[1:])
        elif name == "opt":  # /opt/rsi is the verifier's
            yield from _around(f"{root}/opt", "/opt", ["rsi"])
        elif name not in _OURS:
            yield from ("--ro-bind", f"{root}/{name}", f"/{name}")


def _around(source: str, target: str, parts: list[str]) -> Iterator[str]:
    """Everything below `source` but the way to a folder that is put there later, which needs a place to be made."""
    if not parts or not os.path.isdir(source):
        return
    for name in sorted(os.listdir(source)):
        if name == parts[0]:
            yield from _around(f"{source}/{name}", f"{target}/{name}", parts[1:])
        elif target != "/var" or name != "tmp":
            yield from ("--ro-bind", f"{source}/{name}", f"{target}/{name}")
