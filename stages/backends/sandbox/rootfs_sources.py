"""Where the files of a prepared root filesystem come from: debootstrap, Debian packages, or allow-listed files of this machine.

No container registry, and nothing of the machine's own: no home folders, no configuration, no secrets.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from stages.errors import SandboxUnavailable

PACKAGES = (
    "bash", "dash", "coreutils", "findutils", "grep", "sed", "mawk", "tar", "gzip", "diffutils", "procps", "util-linux", "perl-base",
    "python3", "base-files", "libc-bin", "debianutils",
)  # fmt: skip
_COMMANDS = """
bash sh dash awk basename cat chmod chown cmp comm cp cut date dd df diff dirname du echo egrep env expand expr false fgrep
find flock fold getopt grep gunzip gzip head hostname id install join kill ln ls md5sum mkdir mkfifo mktemp mount mv nl
nproc od paste perl pgrep pkill printf prlimit ps pwd readlink realpath rm rmdir sed seq setsid sha1sum sha256sum shuf sleep
sort split stat stdbuf sync tac tail tar tee test timeout touch tr true truncate tty uname uniq unshare wc which xargs yes
zcat
"""  # for a machine without dpkg
_USR_LINKS = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bash-completion|zoneinfo)/|/test/|/__pycache__/")
_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
_FOLDERS = ("proc", "sys", "dev", "tmp", "run", "root", "app", "var", "var/tmp", "opt", "srv", "home", "usr/local/bin")


def from_packages(target: Path, packages: Iterable[str]) -> None:
    """A tar of the files of Debian packages; those that are not installed are fetched by `apt-get download`, as any user.

    Packages' own scripts are not run. Raises SandboxUnavailable naming a package that cannot be had.
    """
    with tarfile.open(target, "w") as tar:
        out = _Tar(tar)
        out.links()
        closure, absent = _closure(packages)
        out.files(_with_alternatives(_files(closure)))
        if absent:
            with tempfile.TemporaryDirectory(prefix="rsi-debs-") as folder:
                for deb in _download(absent, Path(folder)):
                    out.deb(deb)
        out.finish()


def from_host(target: Path, packages: Sequence[str]) -> None:
    """A tar of an allow-list of this machine's programs with their libraries and its Python. `packages` are further programs.

    Raises SandboxUnavailable naming a program that is not here.
    """
    python = f"python3.{sys.version_info.minor}"
    wanted = [*_COMMANDS.split(), *packages, "python3", python]
    found = {name: shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin") for name in wanted}
    for name in (*packages, "bash", "cp", "chmod"):
        if not found[name]:
            raise SandboxUnavailable(f"no program {name} on this machine: install it, or leave it out of --packages")
    programs = sorted({path for path in found.values() if path})
    libraries = _libraries([os.path.realpath(p) for p in programs])
    stdlib = [f"/usr/lib/{n}" for n in ("python3", python) if os.path.isdir(f"/usr/lib/{n}")]
    perl = [str(p) for p in Path("/usr/lib").glob("*/perl-base")] + [str(p) for p in Path("/usr/share").glob("perl*")]
    with tarfile.open(target, "w") as tar:
        out = _Tar(tar)
        out.links()
        out.files(_chain(programs))
        out.files(_chain(libraries))
        for root in (*stdlib, *perl):
            out.files(p for p in map(str, sorted(Path(root).rglob("*"))) if not _LEFT_OUT.search(p + "/"))
        modules = [str(p) for root in stdlib for p in Path(root).rglob("*.so")]
        out.files(_chain(_libraries(modules)))
        out.finish()


def from_debootstrap(target: Path, packages: Iterable[str]) -> None:
    """A tar of a fresh Debian of this machine's release. Needs root, debootstrap and a Debian mirror.

    Raises SandboxUnavailable with debootstrap's last words.
    """
    release = _release()
    with tempfile.TemporaryDirectory(prefix="rsi-debootstrap-") as folder:
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", release, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
            raise SandboxUnavailable(f"debootstrap of {release} failed: {last}. `--from packages` needs no debootstrap")
        with tarfile.open(target, "w") as tar:
            for path in sorted(Path(folder).rglob("*")):
                name = str(path.relative_to(folder))
                if name.startswith(("var/cache/apt/", "var/lib/apt/lists/")) or _LEFT_OUT.search(f"/{name}/"):
                    continue
                _Tar(tar).add(str(path), name)


def _release() -> str:
    words = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return words.get("VERSION_CODENAME", "stable").strip('"')


class _Tar:
    """Adds paths of this machine once each, owned by root, without set-user-id bits."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._seen: set[str] = set()

    def links(self) -> None:
        for link in _USR_LINKS:
            if os.path.islink(f"/{link}"):
                self.add(f"/{link}", link)

    def files(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.add(path, path.lstrip("/"))

    def finish(self) -> None:
        self.add("/etc/ld.so.cache", "etc/ld.so.cache")
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "var/tmp") else 0o755
            self._put(entry, None)
        for name, text in _TEXTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            self._put(entry, io.BytesIO(text.encode()))

    def add(self, path: str, name: str) -> None:
        if name in self._seen or not os.path.lexists(path):
            return
        entry = self._tar.gettarinfo(path, arcname=name)
        if entry is None or not (entry.isreg() or entry.issym() or entry.isdir() or entry.islnk()):
            return
        if entry.islnk():  # a hard link within the package: store the content
            entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", os.path.getsize(path)
        if not entry.isreg():
            self._put(entry, None)
            return
        try:
            with open(path, "rb") as file:
                self._put(entry, file)
        except PermissionError:  # a program that only root may read is none that a task needs
            return

    def deb(self, path: Path) -> None:
        """The files of a package that is not installed."""
        with tempfile.TemporaryFile() as spool:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=spool, check=True)
            spool.seek(0)
            with tarfile.open(fileobj=spool) as package:
                for entry in package:
                    full = "/" + entry.name.removeprefix("./").strip("/")
                    if (
                        full == "/"
                        or ".." in full.split("/")
                        or not (entry.isreg() or entry.islnk() or entry.issym() or entry.isdir())  # no devices
                        or _LEFT_OUT.search(full + "/")
                        or not full.startswith(("/usr/", "/bin/", "/sbin/", "/lib"))
                    ):
                        continue
                    if os.path.islink("/" + full.split("/")[1]):  # /bin is /usr/bin here
                        full = "/usr" + full
                    content = package.extractfile(entry) if entry.isreg() or entry.islnk() else None
                    if entry.islnk() and content is not None:
                        size = package.getmember(entry.linkname).size
                        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", size
                    entry.name = full.lstrip("/")
                    if entry.name not in self._seen:
                        self._put(entry, content)

    def _put(self, entry: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        self._seen.add(entry.name)
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        if not (entry.isdir() and entry.mode & 0o1000):
            entry.mode &= 0o755 if not entry.issym() else 0o777  # no set-user-id programs
        self._tar.addfile(entry, content)


def _closure(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """(installed ones of `packages` and of everything that they depend on, those of `packages` that are not installed)."""
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}\t${Status}\t${Provides}\t${Pre-Depends}, ${Depends}\n"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    needs: dict[str, list[str]] = {}
    provided: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        name, status, provides, depends = line.split("\t")
        if status.endswith(" installed"):
            needs[name] = _names(depends)
            provided.update(dict.fromkeys(_names(provides), name))
    out: set[str] = set()
    wanted = list(packages)
    todo = list(wanted)
    while todo:
        name = todo.pop()
        name = name if name in needs else provided.get(name, name)
        if name in needs and name not in out:
            out.add(name)
            todo += needs[name]
    return sorted(out), [p for p in wanted if p not in needs and p not in provided]


def _names(field: str) -> list[str]:
    return [n for n in (re.split(r"[\s(:]", p.strip(), maxsplit=1)[0] for p in re.split(r"[,|]", field)) if n]


def _files(packages: Iterable[str]) -> Iterator[str]:
    answer = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True)
    for path in answer.stdout.splitlines():
        if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")) and not _LEFT_OUT.search(path + "/"):
            yield os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _with_alternatives(paths: Iterator[str]) -> Iterator[str]:
    known = set()
    for path in paths:
        known.add(path)
        yield path
    for link in sorted(Path("/etc/alternatives").glob("*")):
        if os.path.realpath(link) in known:
            yield str(link)
            for folder in ("/usr/bin", "/usr/sbin"):
                if os.path.islink(f"{folder}/{link.name}"):
                    yield f"{folder}/{link.name}"


def _download(packages: Sequence[str], folder: Path) -> list[Path]:
    """.deb files of `packages` and of what they need beyond what is installed."""
    quiet = {"cwd": folder, "capture_output": True, "text": True, "check": False, "env": {**os.environ, "LC_ALL": "C"}}
    plan = subprocess.run(["apt-get", "-s", "-q", "--no-install-recommends", "install", *packages], **quiet)  # type: ignore[call-overload]
    names = re.findall(r"^Inst (\S+)", plan.stdout, re.MULTILINE)
    fetched = subprocess.run(["apt-get", "-q", "download", *names], **quiet) if names else plan  # type: ignore[call-overload]
    if not names or fetched.returncode:
        last = (fetched.stderr.strip().splitlines() or ["no such package"])[-1]
        raise SandboxUnavailable(
            f"packages {', '.join(packages)} are not installed here and cannot be fetched: {last}. Run `apt-get update` as "
            "root, correct the name, or install them"
        )
    return sorted(folder.glob("*.deb"))


def _chain(paths: Iterable[str]) -> Iterator[str]:
    """Each path and the links that it goes through."""
    for path in paths:
        here = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        while True:
            yield here
            if not os.path.islink(here):
                break
            target = os.path.join(os.path.dirname(here), os.readlink(here))
            here = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))


def _libraries(programs: Sequence[str]) -> list[str]:
    """Shared libraries and loaders that `ldd` names."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout if programs else ""
    return sorted(set(re.findall(r"(?:=> |^\s+)(/\S+)(?= \()", said, re.MULTILINE)))
