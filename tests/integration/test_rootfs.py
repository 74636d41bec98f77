"""Prepared root filesystems: built by one command, read-only below every sandbox, the same files for both backends."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from orchestrator.cli import app
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.backends.sandbox.rootfs import Rootfs, load
from stages.domain import Verdict
from stages.errors import ConfigError, SandboxUnavailable, TaskError
from tests.integration.sandbox_kit import SOLVE_SH, TEST_SH, Machine, make_task

PYTEST_SH = "pytest -q /tests/test_it.py"
TEST_PY = "def test_it():\n    assert open('/srv/made').read() == open('/home/made').read() == open('/var/made').read() == 'yes\\n'\n"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """An installation with one root filesystem, "base", from this machine's packages, where every user may read it."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg here: only `--from host` works (tested with CI_FULL=1)")
    with tempfile.TemporaryDirectory(prefix="rsi-home-") as folder:
        Path(folder).chmod(0o755)
        done = CliRunner().invoke(app, ["--home", folder, "rootfs", "build", "base", "--from", "packages"])
        assert done.exit_code == 0, done.output
        yield Path(folder)


@pytest.fixture(scope="module")
def base(home: Path) -> Rootfs:
    return load(home / "rootfs" / "base")


@pytest.fixture(scope="module", params=["bubblewrap", "bubblewrap-user", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.full])])  # fmt: skip
def machine(request: pytest.FixtureRequest, base: Rootfs) -> Iterator[Machine]:
    known = {"base": base}
    if request.param == "docker":
        url = request.getfixturevalue("docker_url")
        out = Machine("docker", DockerBackend(base_url=url, rootfs=known, default_rootfs="base"))
    elif request.param == "bubblewrap-user" and os.getuid() != 0:
        pytest.skip("already a normal user: the plain bubblewrap row is this one")
    else:
        uid = 60_001 if request.param == "bubblewrap-user" else None
        out = Machine(request.param, BubblewrapBackend(host_uid=uid, rootfs=known, default_rootfs="base"))
    yield out
    out.close()


def rsi(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["--home", str(home), *words])


def test_its_programs_and_none_of_this_machine(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.say("python3 -c 'print(6 * 7)'; perl -e 'print 7'", 20) == "42\n7"
        here = {name for name in ("apt-get", "tmux", "gcc", "git") if shutil.which(name)}
        assert here
        assert box.say(f"command -v {' '.join(here)}") == ""
        assert (
            box.say("cat /etc/passwd | wc -l; ls -d /etc/apt /var/lib/dpkg 2>/dev/null; ls -A /opt 2>/dev/null") == "2"
        )
        box.run(SOLVE_SH)
        assert box.verify().verdict is Verdict.PASSED


def test_system_files_are_read_only(machine: Machine, tmp_path: Path) -> None:
    places = "/ /usr /usr/bin /usr/local/bin /etc /opt /bin /lib"
    with machine.box(make_task(tmp_path)) as box:
        assert box.say(f"for p in {places}; do (: > $p/x) 2>/dev/null && echo $p; done") == ""
        assert box.say("rm -f /usr/bin/python3 /etc/passwd 2>/dev/null; ls /usr/bin/python3 /etc/passwd | wc -l") == "2"


def test_writable_folders_last_until_the_verifier_and_no_longer(machine: Machine, tmp_path: Path) -> None:
    if machine.kind == "docker":
        pytest.skip("there /tmp, /root and the workspace are writable only")
    task = make_task(tmp_path, test_sh=PYTEST_SH, tests={"test_it.py": TEST_PY}, checks=())
    with machine.box(task) as box:
        assert (
            box.say("for d in /srv /home /var; do echo yes > $d/made || echo $d; done; : > /var/tmp/x || echo tmp")
            == ""
        )
        assert int(box.say("head -c 64M /dev/zero > /srv/f 2>/dev/null; stat -c %s /srv/f; rm /srv/f")) <= 8 << 20
        report = box.verify()
        assert report.verdict is Verdict.PASSED, report
    with machine.box(task) as box:
        assert box.say("ls /srv /home; ls -d /var/made /var/tmp/x 2>/dev/null; true") in ("", "/home:\n\n/srv:")
    assert not any((machine.backend._rootfs["base"].root / d / "made").exists() for d in ("srv", "home", "var"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("workdir", ["/srv/site", "/home/user/a/b", "/var/www"])
def test_workspaces_in_writable_folders(machine: Machine, tmp_path: Path, workdir: str) -> None:
    if machine.kind == "docker":
        pytest.skip("the same code as for every workspace")
    with machine.box(make_task(tmp_path, workdir=workdir)) as box:
        assert box.say("pwd; cat input/data.txt") == f"{workdir}\ndata"
        # the way to the workspace cannot be moved away under the verifier's feet
        assert box.say(f"mv -T {Path(workdir).parent} {Path(workdir).parent}2 2>/dev/null && echo moved") == ""
        box.run(SOLVE_SH)
        assert box.verify().verdict is Verdict.PASSED


def test_planted_files_are_found_in_the_writable_folders(machine: Machine, tmp_path: Path) -> None:
    if machine.kind == "docker":
        pytest.skip("there they cannot be written")
    with machine.box(make_task(tmp_path)) as box:
        box.run(SOLVE_SH + "echo x > /srv/conftest.py; ln -s /tests/test.sh /home/answer")
        report = box.verify()
    assert report.verdict is Verdict.FAILED
    assert set(report.flags) == {"planted_files", "link_to_verifier"}
    assert "/srv/conftest.py" in report.log


def test_a_task_names_its_own(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"'other', which is not here: build it with `rsi rootfs build other`"):
        machine.wait(machine.backend.open(replace(make_task(tmp_path), rootfs="other")))
    if machine.kind != "docker":
        with pytest.raises(TaskError, match=r"RUN make needs an image build.*Docker backend"):
            machine.wait(
                machine.backend.open(replace(make_task(tmp_path), needs_docker=("RUN make needs an image build",)))
            )
        with pytest.raises(TaskError, match="lies in system files"):
            machine.wait(machine.backend.open(make_task(tmp_path, workdir="/usr/src/app")))


# --------------------------------------------------------------------------- the command


def test_list_and_refusals(home: Path, base: Rootfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_ROOTFS", "base")
    (row,) = json.loads(rsi(home, "rootfs", "list", "--json").stdout)
    assert (row["name"], row["from"], row["digest"], row["default"]) == ("base", "packages", base.digest, True)
    assert "base (default)" in rsi(home, "rootfs", "list").stdout
    assert isinstance(rsi(home, "rootfs", "build", "base").exception, ConfigError)
    assert "debootstrap, packages, host" in str(rsi(home, "rootfs", "build", "x", "--from", "thin air").exception)
    absent = rsi(home, "rootfs", "build", "x", "--from", "packages", "--packages", "no-such-package-anywhere").exception
    assert isinstance(absent, SandboxUnavailable)
    assert "no-such-package-anywhere" in str(absent)
    absent = rsi(home, "rootfs", "build", "x", "--from", "host", "--packages", "no-such-program").exception
    assert "no program no-such-program" in str(absent)
    assert [p.name for p in (home / "rootfs").iterdir()] == ["base"]  # nothing half built


def test_what_is_no_root_filesystem_is_said(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no root filesystem that `rsi rootfs build` made"):
        load(tmp_path)
    monkeypatch.setenv("RSI_ROOTFS", "gone")
    named = rsi(home, "tasks", "run", str(harbor(tmp_path)), "--agent", "nop", "--anyway")
    assert "no root filesystem 'gone'" in str(named.exception)


def harbor(root: Path, key: str = "") -> Path:
    """A Harbor folder whose Dockerfile installs something."""
    folder = root / "installs"
    for name, text in {
        "instruction.md": "Write 42 to answer.txt and list input/ in out/list.txt.\n",
        "task.toml": f"[environment]\nnetwork_mode = 'no-network'\n[metadata.terminal_rsi]\n{key}",
        "environment/Dockerfile": "FROM debian:12-slim\nRUN apt-get install -y python3\nWORKDIR /app\nCOPY input/ /app/input/\n",
        "environment/input/data.txt": "data\n",
        "tests/test.sh": TEST_SH,
        "solution/solve.sh": "python3 -c 'print(42)' > answer.txt\n" + SOLVE_SH,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_tasks_run_on_it(home: Path, tmp_path: Path) -> None:
    words = ("--agent", "oracle", "--json", "--log")
    refused = rsi(
        home, "tasks", "run", str(harbor(tmp_path)), *words, str(tmp_path / "l1"), "--rootfs", "base"
    ).exception
    assert "RUN apt-get install -y python3 needs an image build (environment/Dockerfile line 2)" in str(refused)
    assert "--backend docker" in str(refused)
    named = rsi(home, "tasks", "run", str(harbor(tmp_path, "rootfs = 'base'\n")), *words, str(tmp_path / "l2"))
    assert json.loads(named.stdout)["verdict"] == "passed", named.output


def test_a_tar_for_docker_import(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.tar"
    assert rsi(home, "rootfs", "build", str(target), "--from", "packages").exit_code == 0
    with tarfile.open(target) as tar:
        members = tar.getmembers()
    assert {"usr/bin/bash", "etc/passwd", "tmp", "home"} <= {m.name for m in members}
    assert {(m.uid, m.gid) for m in members} == {(0, 0)}
    assert not [m.name for m in members if m.mode & 0o6000]  # no set-user-id programs
    assert not [m.name for m in members if m.name.startswith(("root/", "home/", "etc/shadow", "var/lib", "..", "/"))]
    assert isinstance(rsi(home, "rootfs", "build", str(target)).exception, ConfigError)


@pytest.mark.full
@pytest.mark.parametrize("source", ["host", "debootstrap"])
def test_other_sources(tmp_path: Path, source: str) -> None:
    if source == "debootstrap" and (os.getuid() != 0 or shutil.which("debootstrap") is None):
        pytest.skip("needs root, debootstrap and a Debian mirror")
    done = rsi(tmp_path, "rootfs", "build", str(tmp_path / "other"), "--from", source)
    assert done.exit_code == 0, done.exception
    machine = Machine(
        "bubblewrap", BubblewrapBackend(rootfs={"other": load(tmp_path / "other")}, default_rootfs="other")
    )
    try:
        with machine.box(make_task(tmp_path, test_sh="pytest -q /tests/t.py", tests={"t.py": "def test_x():\n    import ssl\n"}, checks=())) as box:  # fmt: skip
            assert box.say("python3 -c 'print(6 * 7)'", 20) == "42"
            assert box.verify().verdict is Verdict.PASSED
    finally:
        machine.close()
