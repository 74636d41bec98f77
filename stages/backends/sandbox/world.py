"""The host process's own little world: private namespaces, a root of allow-listed host files, nothing else.

Layout seen by the host (never by an agent, whose bwrap builds its own root from parts of it):

    /usr /bin /lib …   the machine's, read-only        /etc       a generated subset
    /opt/bwrap         the bwrap binary                /opt/rsi   verifier tools (read-only)
    /rootfs/NAME       prepared root filesystems       /tools/NAME verifier tools for each of them
    /store             task files and tests, by key    /ws, /vlogs   mount points of one attempt

Every attempt gets a copy of this mount namespace with its own sized tmpfs on /ws; the namespace is held by a descriptor.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.backends.sandbox import kernel
from stages.backends.sandbox.layout import READ_ONLY

UNREADABLE_BASH = "/opt/rsi/bin/bash-verifier"
_PYTHON = "bin/python-verifier"
ROOTFS = "/rootfs"
INTERPRETERS = ("/usr/local/bin/python3", "/usr/bin/python3")  # of a prepared root filesystem, as tools.py looks for it
_ETC_COPIED = (
    "ld.so.cache",
    "ld.so.conf",
    "nsswitch.conf",
    "services",
    "protocols",
    "mime.types",
    "debian_version",
    "os-release",
)
_ETC_BOUND = ("alternatives", "ld.so.conf.d")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ETC_TEXT = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "shells": "/bin/sh\n/bin/bash\n",
}


def enter_namespaces() -> int:
    """New mount and PID namespaces (and a user namespace where not root); returns in the new PID namespace's init.

    The caller's own process stays outside as a guard that waits for it: when either dies, so does everything below. Returns
    a descriptor that reads end-of-file when the guard is gone. Raises OSError where the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        except OSError:
            _enter_user_namespace(uid, gid)
    else:
        _enter_user_namespace(uid, gid)
    guard_gone, guard_alive = os.pipe()
    child = os.fork()
    if child:
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) > 2 and int(fd) != guard_alive:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(int(fd))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(guard_alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes us
    return guard_gone


def _enter_user_namespace(uid: int, gid: int) -> None:
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def build_root(config: dict[str, Any]) -> None:
    """Mount the world on a tmpfs and make it the root. `config` is the backend's start-up message."""
    os.umask(0o022)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = "/tmp"  # any existing directory: the mount is ours alone and becomes "/"
    copies = {target: _read_tree(source) for target, source in config["copy"].items()}
    tools, bash = config["tools"], Path("/bin/bash").read_bytes()
    binds, links = {}, dict(tools["links"])
    # opened before /tmp is covered: a source may lie below it
    rootfs = {name: _open_rootfs(name, path) for name, path in config["rootfs"].items()}
    for name, source in tools["binds"].items():
        try:
            binds[name] = os.open(source, os.O_PATH | os.O_DIRECTORY)
        except OSError:  # an interpreter in a folder that this user may not enter
            if name != "python":
                continue
            links = {k: v for k, v in links.items() if not k.startswith("ld/")} | {"interpreter": "/usr/bin/python3"}
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1g,mode=0755")
    for name in ("usr", "etc", "dev", "proc", "opt/bwrap", "opt/rsi", "store", "ws", "vlogs", "tmp"):
        os.makedirs(f"{root}/{name}")
    _bind("/usr", f"{root}/usr")
    for name in READ_ONLY[2:]:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}").lstrip("/"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.makedirs(f"{root}/{name}")
            _bind(f"/{name}", f"{root}/{name}")
    _make_etc(f"{root}/etc")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    for target, tree in copies.items():
        _write_tree(f"{root}/{target}", tree)
    _make_tools(f"{root}/opt/rsi", tools["texts"], binds, links, bash)
    _make_unreadable_python(f"{root}/opt/rsi", root, [links["interpreter"]])
    portable = tools["texts"] | {"interpreter": tools["interpreter"]}
    plain = {name: fd for name, fd in binds.items() if name != "python"}
    for name, fd in rootfs.items():  # of another distribution perhaps: its own bash and python3
        os.makedirs(f"{root}{ROOTFS}/{name}")
        _bind(f"/proc/self/fd/{fd}", f"{root}{ROOTFS}/{name}")
        own = Path(f"{root}{ROOTFS}/{name}/usr/bin/bash")
        _make_tools(f"{root}{tools_of(name)}", portable, plain, {}, own.read_bytes() if own.is_file() else bash)
        _make_unreadable_python(f"{root}{tools_of(name)}", f"{root}{ROOTFS}/{name}", INTERPRETERS)
    for fd in (*binds.values(), *rootfs.values()):
        os.close(fd)
    kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.pivot_root(root)


def tools_of(rootfs: str) -> str:
    """Where the host keeps the verifier's tools for a prepared root filesystem, or ("") for this machine's files."""
    return f"/tools/{rootfs}" if rootfs else "/opt/rsi"


def _open_rootfs(name: str, path: str) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise OSError(
            error.errno, f"root filesystem {name}: user {os.getuid()} cannot enter {path}: {error.strerror}"
        ) from error


def _make_tools(place: str, texts: dict[str, str], binds: dict[str, int], links: dict[str, str], bash: bytes) -> None:
    for name, fd in binds.items():
        os.makedirs(f"{place}/{name}")
        _bind(f"/proc/self/fd/{fd}", f"{place}/{name}")
    _write_tree(place, {n: (0o755, t.encode()) for n, t in texts.items()})
    for name, target in links.items():
        os.makedirs(os.path.dirname(f"{place}/{name}"), exist_ok=True)
        os.symlink(target, f"{place}/{name}")
    # a program that its user cannot read is not dumpable: no process of the jail can trace it or open its /proc/PID/mem
    unreadable = Path(f"{place}/{UNREADABLE_BASH.removeprefix('/opt/rsi/')}")
    unreadable.write_bytes(bash)
    os.chmod(unreadable, 0o111)  # noqa: S103


def _make_unreadable_python(place: str, system: str, candidates: Sequence[str]) -> None:
    """A second copy of the first interpreter that `system` has, as for bash, and where jails have the readable one."""
    for path in candidates:
        for _ in range(20):
            if not os.path.islink(system + path):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(system + path)))
        if os.path.isfile(system + path):
            shutil.copyfile(system + path, f"{place}/{_PYTHON}")
            os.chmod(f"{place}/{_PYTHON}", 0o111)  # noqa: S103
            os.symlink(path, f"{place}/{_PYTHON}-place")
            return


def unreadable_python(rootfs: str) -> list[str]:
    """Options that put it in the place of the readable one: between its start and the moment in which the test runner shuts
    itself off, a program of the agent's could open its memory."""
    own = f"{tools_of(rootfs)}/{_PYTHON}"
    return ["--ro-bind", own, os.readlink(f"{own}-place")] if os.path.islink(f"{own}-place") else []


def _bind(source: str, target: str) -> None:
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _make_etc(etc: str) -> None:
    for name in _ETC_COPIED:
        with contextlib.suppress(OSError):  # not every distribution has every file
            shutil.copyfile(f"/etc/{name}", f"{etc}/{name}")
    for name in _ETC_BOUND:
        if os.path.isdir(f"/etc/{name}"):
            shutil.copytree(f"/etc/{name}", f"{etc}/{name}", symlinks=True)
    for name, text in _ETC_TEXT.items():
        Path(f"{etc}/{name}").write_text(text)


def _read_tree(path: str) -> dict[str, tuple[int, bytes]]:
    """Relative path -> (mode, content) of the regular files below `path`; symlinks are followed, caches left out."""
    out: dict[str, tuple[int, bytes]] = {}
    for folder, dirs, names in os.walk(path, followlinks=True):
        dirs[:] = [d for d in dirs if d != "__pycache__"]
        for name in names:
            full = os.path.join(folder, name)
            if os.path.isfile(full):
                out[os.path.relpath(full, path)] = (os.stat(full).st_mode & 0o777, Path(full).read_bytes())
    return out


def _write_tree(path: str, tree: dict[str, tuple[int, bytes]]) -> None:
    for name, (mode, content) in tree.items():
        full = os.path.join(path, name)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        Path(full).write_bytes(content)
        os.chmod(full, mode | 0o444 | (mode & 0o111 and 0o111))


class Undertaker:
    """A thread that closes the descriptors of mount namespaces: the kernel then waits for milliseconds, nobody else has to."""

    def __init__(self) -> None:
        self._closing: queue.SimpleQueue[int] = queue.SimpleQueue()
        apart = threading.Event()
        threading.Thread(target=self._work, args=(apart,), daemon=True).start()
        apart.wait()

    def close(self, fd: int) -> None:
        self._closing.put(fd)

    def _work(self, apart: threading.Event) -> None:
        kernel.unshare(kernel.CLONE_FS)  # who shares its root and directory may not enter mount namespaces
        apart.set()
        while True:
            os.close(self._closing.get())


class AttemptWorld:
    """One attempt's mount namespace: the host's world plus a sized tmpfs on /ws. Gone when closed and nobody runs in it."""

    def __init__(self, home_fd: int, undertaker: Undertaker, *, size_mb: int, inodes: int, uid: int) -> None:
        self._home_fd, self._undertaker = home_fd, undertaker
        self.fd = -1
        kernel.unshare(kernel.CLONE_NEWNS)
        try:
            self.fd = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            kernel.mount(
                "tmpfs", "/ws", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                f"size={size_mb}m,nr_inodes={inodes},mode=0755,uid={uid},gid={uid}",
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        finally:
            kernel.setns(home_fd, kernel.CLONE_NEWNS)

    def __enter__(self) -> None:
        kernel.setns(self.fd, kernel.CLONE_NEWNS)

    def __exit__(self, *_: object) -> None:
        kernel.setns(self._home_fd, kernel.CLONE_NEWNS)

    def close(self) -> None:
        if self.fd >= 0:
            self._undertaker.close(self.fd)
            self.fd = -1
