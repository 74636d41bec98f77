"""A small seccomp filter as classic BPF bytes for `bwrap --seccomp FD`. Standard library only.

Denied: kernel keyrings, io_uring, userfaultfd, bpf, perf, module loading, mounts, namespaces, file handles, TIOCSTI, sockets
outside the network namespace's reach (vsock, alg). `clone3` answers ENOSYS, so that libc falls back to `clone`, whose flags
can be inspected. `trace=False` is the verifier's sandbox, where a program of the agent's may run: no ptrace and process_vm_*, no
hard links (a second name of a result file would go unseen), no limits for other processes (the verifier's writing would fail).
"""

from __future__ import annotations

import errno
import os
import struct

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where the architecture lacks the call
_DENIED = {
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "syslog": (103, 116), "nfsservctl": (180, 42),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58),
}  # fmt: skip
_TRACING = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "link": (86, None), "linkat": (265, 37),
}  # fmt: skip
_PRLIMIT = (302, 261)
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_CLONE_NAMESPACES = 0x7E020000 | 0x80  # NEWUSER, NEWPID, NEWNET, NEWNS, NEWUTS, NEWIPC, NEWCGROUP, NEWTIME
_FAMILIES_ALLOWED = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_IOCTLS_DENIED = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH_OFFSET, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets into struct seccomp_data; low words, little endian


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, k)


def program(*, trace: bool = True) -> bytes:
    """The filter for this machine's architecture. Raises OSError where none is known."""
    machine = os.uname().machine
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}: only {', '.join(_ARCH)} are known")
    column = list(_ARCH).index(machine)
    deny = _op(_RET, _ERRNO | errno.EPERM)
    out = [_op(_LD, _ARCH_OFFSET), _op(_JEQ, _ARCH[machine], 1, 0), _op(_RET, _KILL), _op(_LD, _NR)]
    if machine == "x86_64":  # the x32 numbers would walk past the list below
        out += [_op(_JGE, 0x40000000, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    out += [_op(_JEQ, _CLONE3[column], 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    for numbers in {**_DENIED, **({} if trace else _TRACING)}.values():
        number = numbers[column]
        if number is not None:
            out += [_op(_JEQ, number, 0, 1), deny]
    if not trace:
        out += [_op(_JEQ, _PRLIMIT[column], 0, 4), _op(_LD, _ARG0), _op(_JEQ, 0, 1, 0), deny, _op(_RET, _ALLOW)]
    out += [_op(_JEQ, _CLONE[column], 0, 4), _op(_LD, _ARG0), _op(_JSET, _CLONE_NAMESPACES, 0, 1), deny]
    out += [_op(_RET, _ALLOW)]
    body = [
        _op(_LD, _ARG0),
        *(_op(_JEQ, family, len(_FAMILIES_ALLOWED) - i, 0) for i, family in enumerate(_FAMILIES_ALLOWED)),
    ]
    out += [_op(_JEQ, _SOCKET[column], 0, len(body) + 2), *body, deny, _op(_RET, _ALLOW)]
    body = [_op(_LD, _ARG1)]
    for request in _IOCTLS_DENIED:
        body += [_op(_JEQ, request, 0, 1), deny]
    out += [_op(_JEQ, _IOCTL[column], 0, len(body)), *body, _op(_RET, _ALLOW)]
    return b"".join(out)


def docker_profile(*, trace: bool = True) -> dict[str, object]:
    """The same filter in the form that `docker run --security-opt seccomp=…` takes (it knows every architecture's numbers)."""
    names = [*_DENIED, *(() if trace else _TRACING)]

    def refuse(names: list[str], number: int, **more: object) -> dict[str, object]:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, **more}

    masked = [
        {"index": 0, "value": 1 << bit, "valueTwo": 1 << bit, "op": "SCMP_CMP_MASKED_EQ"}
        for bit in range(7, 32)
        if _CLONE_NAMESPACES >> bit & 1
    ]
    families = [
        {"index": 0, "value": f, "valueTwo": 0, "op": "SCMP_CMP_EQ"} for f in range(46) if f not in _FAMILIES_ALLOWED
    ]
    low = 0xFFFFFFFF
    others = [] if trace else [{"index": 0, "value": 0, "valueTwo": 0, "op": "SCMP_CMP_NE"}]
    requests = [{"index": 1, "value": low, "valueTwo": r, "op": "SCMP_CMP_MASKED_EQ"} for r in _IOCTLS_DENIED]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            refuse(names, errno.EPERM),
            refuse(["clone3"], errno.ENOSYS),
            *(refuse(["clone"], errno.EPERM, args=[m]) for m in masked),
            *(refuse(["prlimit64"], errno.EPERM, args=[o]) for o in others),
            *(refuse(["socket"], errno.EPERM, args=[f]) for f in families),
            *(refuse(["ioctl"], errno.EPERM, args=[r]) for r in requests),
        ],
    }
