"""The few Linux calls that Python 3.11 lacks: namespaces, mounts, prctl. Imported by the host: standard library only."""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_CAPS_KEPT = (1, 5, 18, 21)  # DAC_OVERRIDE (cgroup files), KILL, SYS_CHROOT and SYS_ADMIN (mounts, setns)
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare(0x{flags:x})")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None) -> None:
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            fstype.encode() if fstype else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        f"mount {fstype or 'bind'} {source} on {target}",
    )


def umount(target: str) -> None:
    _check(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(new_root: str) -> None:
    """Make `new_root` (a mount point) the root and drop the old one from the namespace."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    os.chdir(new_root)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), f"pivot_root {new_root}")
    umount(".")
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def inotify(path: str, mask: int) -> int:
    """A non-blocking inotify descriptor that watches `path`."""
    fd = int(_libc.inotify_init1(ctypes.c_int(os.O_NONBLOCK | os.O_CLOEXEC)))
    _check(0 if fd >= 0 else -1, "inotify_init1")
    watch = int(_libc.inotify_add_watch(ctypes.c_int(fd), path.encode(), ctypes.c_uint32(mask)))
    if watch < 0:
        os.close(fd)
        _check(-1, f"inotify_add_watch {path}")
    return fd


def become(uid: int) -> None:
    """Give up root for good; the process may still write its own uid_map (it stays dumpable)."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def become_keeping_admin(uid: int) -> None:
    """Change to a normal user but keep what mounting, entering namespaces and writing cgroups need.

    Programs started from here lose it all on exec, so starting one needs no change of user between fork and exec.
    """
    _check(_libc.prctl(_PR_SET_KEEPCAPS, ctypes.c_ulong(1), 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    mask = sum(1 << c for c in _CAPS_KEPT)
    header = struct.pack("=Ii", 0x20080522, 0)
    data = struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0)  # effective, permitted, inheritable; low words, then high
    _check(_libc.capset(header, data), "capset")
