"""The hardening table of the sandbox, row by row: what a hostile shell tries, and that it fails. Every backend."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.domain import Limits, Verdict
from tests.integration.sandbox_kit import KINDS, SOLVE_SH, Box, Machine, make_task, open_machine, skip_slow_half

SECRET = f"rsi-secret-{secrets.token_hex(8)}"


ON_DOCKER = frozenset(
    {
        "test_fork_bomb_is_held_and_ended_from_outside",
        "test_memory_of_all_processes_together",
        "test_disk_inodes_and_shared_memory",
        "test_network",
        "test_no_capabilities_and_no_way_to_get_them",
    }
)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    os.environ["RSI_TEST_SECRET"] = SECRET  # must reach no sandbox
    pipe = os.pipe()
    os.set_inheritable(pipe[0], True)  # nor may this
    try:
        out = open_machine(request)
    finally:
        del os.environ["RSI_TEST_SECRET"]
    yield out
    out.close()
    for fd in pipe:
        os.close(fd)


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ON_DOCKER)
    return started


@pytest.fixture
def box(machine: Machine, tmp_path: Path) -> Iterator[Box]:
    with machine.box(make_task(tmp_path)) as out:
        yield out


def syscall(box: Box, *arguments: int) -> int:
    """errno of one raw system call, 0 when it worked."""
    words = " ".join(map(str, arguments))
    return int(
        box.say(
            "perl -e '$r = syscall(shift() + 0, map { $_ + 0 } @ARGV); print $r == -1 ? $!+0 : 0' " + words
            + " || python3 -c 'import ctypes, sys; l = ctypes.CDLL(None, use_errno=True); r = l.syscall(*map(int, sys.argv[1:]));"
            " print(ctypes.get_errno() if r == -1 else 0)' " + words
        )
    )  # fmt: skip


# --------------------------------------------------------------------------- resources


def test_fork_bomb_is_held_and_ended_from_outside(machine: Machine, box: Box, tmp_path: Path) -> None:
    began = time.monotonic()
    box.run("f() { f | f & }; f; sleep 60", timeout_s=1.0)
    with machine.box(make_task(tmp_path)) as other:
        assert other.say("echo fine") == "fine"
    assert "still here" in box.say("echo still here", timeout_s=20)  # among what the last of the bomb complained about
    assert time.monotonic() - began < 40


def test_memory_hog_dies_and_the_attempt_keeps_its_verdict(box: Box) -> None:
    result = box.run("x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo $((6 * 7)) ${#x}", timeout_s=20)
    assert b"42 200000000" not in result.output
    box.run(SOLVE_SH)
    assert box.verify().verdict is Verdict.PASSED


def test_memory_of_all_processes_together(machine: Machine, box: Box) -> None:
    if "memory" not in getattr(machine.backend, "cgroups", ["memory"]):
        pytest.skip("no memory cgroup for this user: the limit is per process, and `rsi doctor` says so")
    said = box.say(
        "f() { x=$(head -c 70000000 /dev/zero | tr '\\0' a); sleep 0.5; echo -n $((6 * 7)); }; f & f & wait",
        timeout_s=20,
    )
    assert "4242" not in said


def test_disk_inodes_and_shared_memory(box: Box) -> None:
    for path, most in (("/app/f", 8 << 20), ("/tmp/f", 8 << 20), ("/root/f", 8 << 20), ("/dev/shm/f", 9 << 20)):
        assert int(box.say(f"head -c 64M /dev/zero > {path} 2>/dev/null; stat -c %s {path}; rm {path}")) <= most
    assert int(box.say("mkdir n; for i in $(seq 2000); do : > n/$i; done 2>/dev/null; ls n | wc -l")) <= 512


def test_limits_cannot_be_raised(box: Box) -> None:
    assert box.say("ulimit -u 5000 2>/dev/null && echo raised; ulimit -c unlimited 2>/dev/null && echo raised") == ""


def test_crashes_reach_no_core_handler(box: Box) -> None:
    assert box.say("prlimit --core --noheadings -o SOFT,HARD 2>/dev/null || ulimit -Hc").split() in (["1", "1"], ["0"])


def test_limits_are_the_tasks(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path, limits=Limits(pids=20, storage_mb=2, inodes=64, memory_mb=64, output_bytes=1000))
    with machine.box(task) as small:
        assert int(small.say("ulimit -u")) == 20
        assert len(small.run("yes | head -c 5000").output) < 1100
        assert int(small.say("head -c 64M /dev/zero > f 2>/dev/null; stat -c %s f")) <= 2 << 20


# --------------------------------------------------------------------------- leaks from the machine


def test_environment_and_command_lines(box: Box) -> None:
    seen = box.say("cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ | tr '\\0' '\\n'")
    for word in (SECRET, "PYTHONPATH", "VIRTUAL_ENV", "/vlogs", "/store", "--ro-bind"):
        assert word not in seen
    names = {line.split("=")[0] for line in box.say("env").splitlines()}
    assert names <= {
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PATH",
        "LANG",
        "TERM",
        "PAGER",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "HOSTNAME",
    }


def test_inherited_descriptors(box: Box) -> None:
    links = box.say(
        "for p in /proc/[0-9]*; do for f in $p/fd/*; do readlink $f; done; done 2>/dev/null | sort -u"
    ).splitlines()
    strange = [x for x in links if not x.startswith(("pipe:", "/dev/null", "/proc/", "anon_inode:", "socket:"))]
    assert [x for x in strange if "memfd" not in x] == []
    assert "socket:" not in box.say("readlink /proc/self/fd/* 2>/dev/null")


def test_host_files(box: Box, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.write_text(SECRET)
    for path in (
        hidden,
        Path.home(),
        Path(__file__),
        Path("/etc/shadow"),
        Path("/var/lib"),
        Path("/boot"),
    ):
        if path != Path("/root"):
            assert box.say(f"ls -d {path} 2>/dev/null") == ""
    assert box.say("ls -A /root /tmp /run /mnt /srv /home /media 2>/dev/null | grep -v :") == ""
    known = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero mqueue"
    assert set(box.say("ls /dev").split()) <= set(known.split(" "))


def test_host_processes(box: Box) -> None:
    assert int(box.say("set -- /proc/[0-9]*; echo $#")) < 8
    for pid in {os.getpid(), os.getppid()} - {1}:  # 1 is the jail's own init, too
        assert box.say(f"kill -0 {pid} 2>/dev/null && echo reached") == ""


def test_network(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"rsi-{secrets.token_hex(4)}"
        abstract.bind("\0" + name)
        abstract.listen()
        port = tcp.getsockname()[1]
        assert box.say(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo in") == ""
        assert box.say(f"grep -c {name} /proc/net/unix") == "0"
    assert box.say("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") in ("lo", "")
    assert box.say("timeout 2 bash -c 'exec 3<>/dev/udp/8.8.8.8/53; echo hi >&3' 2>/dev/null && echo out") == ""


def test_proc_and_sys(machine: Machine, box: Box) -> None:
    for path in (
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/1/oom_score_adj",
    ):
        before = box.say(f"cat {path} 2>/dev/null")
        box.run(f"echo 1 > {path} 2>/dev/null")
        assert box.say(f"cat {path} 2>/dev/null") == before or path.endswith("oom_score_adj")
    if machine.kind == "docker":  # there, but read-only
        assert box.say("mkdir /sys/fs/cgroup/memory/x /sys/fs/cgroup/x 2>/dev/null && echo made") == ""
    else:
        assert box.say("ls -d /sys/kernel /sys/fs/cgroup 2>/dev/null") == ""
    assert box.say("head -c 1 /proc/kcore 2>/dev/null") == ""


# --------------------------------------------------------------------------- privileges


def test_no_capabilities_and_no_way_to_get_them(machine: Machine, box: Box) -> None:
    status = box.say("cat /proc/self/status")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{name}:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert machine.kind == "docker" or "nosuid" in box.say("grep ' /usr ' /proc/mounts")


def test_mount_mknod_chroot_raw_sockets(box: Box) -> None:
    assert box.say("mount -t tmpfs x /tmp 2>/dev/null && echo mounted; umount /app 2>/dev/null && echo unmounted") == ""
    assert box.say("mknod /tmp/sda b 8 0 2>/dev/null && echo made; chroot / true 2>/dev/null && echo chrooted") == ""
    assert syscall(box, 41, 2, 3, 1) == 1  # socket(AF_INET, SOCK_RAW, ICMP)
    assert syscall(box, 41, 17, 3, 0) == 1  # AF_PACKET
    assert syscall(box, 41, 40, 1, 0) == 1  # AF_VSOCK, which no network namespace contains
    assert syscall(box, 41, 38, 5, 0) == 1  # AF_ALG


def test_no_new_namespaces(box: Box) -> None:
    assert box.say("unshare -U true 2>/dev/null && echo made; unshare -Urmpf true 2>/dev/null && echo made") == ""
    assert syscall(box, 272, 0x10000000) == 1  # unshare(CLONE_NEWUSER)
    assert syscall(box, 56, 0x10000000 | 17, 0, 0, 0, 0) == 1  # clone(CLONE_NEWUSER | SIGCHLD)
    assert syscall(box, 435, 0, 0) == 38  # clone3: ENOSYS, so that libc uses clone


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "keyctl": (250, 0, -2, 1),
        "add_key": (248, 0, 0, 0, 0, -2),
        "io_uring_setup": (425, 1, 0),
        "userfaultfd": (323, 1),
        "bpf": (321, 0, 0, 0),
        "perf_event_open": (298, 0, 0, -1, -1, 0),
        "setns": (308, 0, 0),
        "open_by_handle_at": (304, 0, 0, 0),
        "fsopen": (430, 0, 0),
        "kexec_load": (246, 0, 0, 0, 0),
        "init_module": (175, 0, 0, 0),
        "clock_settime": (227, 0, 0),
    }.items(),
)
def test_system_call_filter(box: Box, name: str, call: tuple[int, ...]) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are x86_64's; the filter itself is chosen by architecture")
    assert syscall(box, *call) == 1, name


def test_threads_work_without_clone3(box: Box) -> None:
    said = box.say("command -v python3 >/dev/null || echo 10; python3 -c 'import threading as t; x=[]; a=[t.Thread(target=x.append, args=(1,)) for _ in range(10)]; [i.start() for i in a]; [i.join() for i in a]; print(len(x))'")  # fmt: skip
    assert said == "10"


def test_no_terminal_to_push_keys_into(box: Box) -> None:
    assert box.say("(: < /dev/tty) 2>/dev/null && echo terminal") == ""
    assert syscall(box, 16, 0, 0x5412, 0) == 1  # ioctl(TIOCSTI)
    assert (
        syscall(box, 16, 0, 0x5412 | (1 << 32), 0) == 1
    )  # the kernel looks at the low 32 bits only; so does the filter


def test_system_files_are_read_only(box: Box) -> None:
    said = box.say(
        "for p in / /usr /usr/bin /usr/lib /etc /dev /bin /run /var /proc/sys; do (: > $p/x) 2>/dev/null && echo $p; done"
    )
    assert said == ""
    assert (
        box.say("chmod 777 /usr 2>/dev/null && echo changed; mv /usr/bin/ls /usr/bin/l 2>/dev/null && echo moved") == ""
    )


# --------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    "plant",
    ["ln -s /etc/passwd {}", "mkfifo {}", "mkdir {}", "ln -s /dev/zero {}", "head -c 9M /dev/zero > {}", "ln -s {} {}"],
)
def test_odd_result_files_are_refused(machine: Machine, tmp_path: Path, plant: str) -> None:
    began = time.monotonic()
    sh = plant.replace("{}", "/logs/verifier/reward.txt")
    with machine.box(make_task(tmp_path, test_sh=sh, checks=())) as box:
        report = box.verify()
    assert report.verdict is Verdict.VERIFIER_ERROR  # it does so on a pristine image too
    assert "not a plain file" in report.log
    assert time.monotonic() - began < 60


def test_leftovers(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        box.run(
            "setsid nohup sleep 321 >/dev/null 2>&1 & (setsid setsid sleep 321 &) ; perl -e 'fork; fork; sleep 321' &"
        )
    machine.wait_for_nothing()
    for pid in (p for p in os.listdir("/proc") if p.isdigit()):
        with contextlib.suppress(OSError):
            assert Path(f"/proc/{pid}/cmdline").read_bytes() != b"sleep\x00321\x00"
