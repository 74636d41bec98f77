"""A prepared root filesystem as a tar, without a registry: the files of installed Debian packages, nothing of the machine's own.

    python -m stages.backends.sandbox.rootfs rootfs.tar

`docker import rootfs.tar` makes an image of it (`DockerImages.prepared` does so). Needs `dpkg-query`; where there is none, say
which image to use instead. bubblewrap needs no such file: it binds the same allow-listed folders read-only.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from stages.errors import SandboxUnavailable

PACKAGES = (
    "bash", "dash", "coreutils", "findutils", "grep", "sed", "mawk", "tar", "gzip", "diffutils", "procps", "util-linux", "perl-base",
    "python3", "base-files", "libc-bin", "debianutils",
)  # fmt: skip
_USR_LINKS = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bash-completion|zoneinfo)/|/test/|/__pycache__/")
_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_FOLDERS = ("proc", "sys", "dev", "tmp", "run", "root", "app", "var/tmp", "opt", "usr/local/bin")


def write_rootfs(target: Path, packages: Iterable[str] = PACKAGES) -> None:
    """Write the tar (not compressed). Raises SandboxUnavailable where this is no Debian-like machine."""
    if shutil.which("dpkg-query") is None:
        raise SandboxUnavailable("no dpkg-query here: give the Docker backend an image of your own (image = …)")
    with tarfile.open(target, "w") as tar:
        seen: set[str] = set()
        for link in _USR_LINKS:
            if os.path.islink(f"/{link}"):
                _add(tar, f"/{link}", seen)
        for path in _with_alternatives(_files(_closure(packages))):
            _add(tar, path, seen)
        _add(tar, "/etc/ld.so.cache", seen)
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "var/tmp") else 0o755
            tar.addfile(entry)
        for name, text in _TEXTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))


def _closure(packages: Iterable[str]) -> list[str]:
    """The installed ones of `packages` and of everything that they depend on."""
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
    todo = list(packages)
    while todo:
        name = todo.pop()
        name = name if name in needs else provided.get(name, name)
        if name in needs and name not in out:
            out.add(name)
            todo += needs[name]
    return sorted(out)


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


def _add(tar: tarfile.TarFile, path: str, seen: set[str]) -> None:
    if path in seen or not os.path.lexists(path):
        return
    seen.add(path)
    entry = tar.gettarinfo(path, arcname=path.lstrip("/"))
    if entry is None or not (entry.isreg() or entry.issym() or entry.isdir() or entry.islnk()):
        return
    if entry.islnk():  # a hard link within the package: store the content
        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", os.path.getsize(path)
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode &= 0o755 if not entry.issym() else 0o777  # no set-user-id programs
    if entry.isreg():
        with open(path, "rb") as file:
            tar.addfile(entry, file)
    else:
        tar.addfile(entry)


if __name__ == "__main__":
    write_rootfs(Path(sys.argv[1]))
