"""Strangers' files in a batch: each broken one is a clear error with its file named, and the rest of the batch lands."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.import_trials import import_harbor
from orchestrator.store import Store
from stages.errors import TaskError
from stages.tasks.harbor import load_suite
from tests import trials as t


def bomb(path: Path) -> None:
    """64 MiB of zeros in 64 KiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("result.json", b"0" * (64 << 20))


def replaced(name: str, content: bytes | None) -> Callable[[Path], None]:
    """A file with other content; None: a folder in its place."""

    def change(trial: Path) -> None:
        (trial / name).unlink(missing_ok=True)
        (trial / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (trial / name).mkdir()
        else:
            (trial / name).write_bytes(content)

    return change


def linked(name: str, target: str) -> Callable[[Path], None]:
    def change(trial: Path) -> None:
        (trial / name).unlink()
        (trial / name).symlink_to(target)

    return change


GOOD_RESULT = (
    '{"task_name": "x", "trial_name": "x", "agent_info": {"name": "a"}, "verifier_result": {"rewards": {"reward": %s}}}'
)
BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "nan": (replaced("result.json", (GOOD_RESULT % "NaN").encode()), "result.json", "NaN is no number"),
    "beyond measure": (replaced("result.json", (GOOD_RESULT % ("1" + "0" * 400)).encode()), "result.json", "valid number"),
    "infinite": (replaced("result.json", (GOOD_RESULT % "1e999").encode()), "result.json", "finite"),
    "negative": (replaced("result.json", (GOOD_RESULT % "-3").encode()), "result.json", "not between 0 and 1"),
    "words": (replaced("result.json", (GOOD_RESULT % '"good"').encode()), "result.json", "valid number"),
    "nan-written": (replaced("verifier/reward.txt", b"nan"), "verifier", "one was changed"),
    "reward-folder": (replaced("verifier/reward.txt", None), "verifier/reward.txt", "no regular file"),
    "ctrf-folder": (replaced("verifier/ctrf.json", None), "verifier/ctrf.json", "no regular file"),
    "bytes": (replaced("result.json", b'{"task_name": "\xff\xfe"}'), "result.json", "not UTF-8"),
    "reward-bytes": (replaced("verifier/reward.txt", b"\xff1"), "verifier/reward.txt", "not UTF-8"),
    "cut": (replaced("result.json", b'{"task_name": "x", "tri'), "result.json", "probably cut off"),
    "list": (replaced("result.json", b"[]"), "result.json", "valid dictionary"),
    "empty": (replaced("result.json", b""), "result.json", "no JSON"),
    "deep": (replaced("result.json", b"[" * 200_000), "result.json", "nested too deeply"),
    "digits": (replaced("result.json", b"9" * 10_000), "result.json", "no JSON"),
    "folder": (replaced("result.json", None), "result.json", "no regular file"),
    "link-out": (linked("result.json", "/etc/passwd"), "result.json", "symbolic link"),
    "reward-link": (linked("verifier/reward.txt", "../../good__000/verifier/reward.txt"), "verifier/reward.txt", "link"),
    "huge": (lambda trial: os.truncate(trial / "result.json", 1 << 40), "result.json", "1099511627776 bytes"),
    "control": (replaced("result.json", b'{"task_name": "a\\u0000b"}'), "result.json", "task_name"),
}  # fmt: skip


def test_a_job_of_broken_trials(store: Store, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"good": [1.0, 0.0]})
    for name, (change, _, _) in BROKEN.items():
        change(t.trial(job, name, 0))
    (job / "linked-trial").symlink_to("/etc")
    bomb(job / "more.zip")
    bomb(job / "good__000" / "agent.zip")  # inside a trial nobody looks at it
    report = import_harbor(store, [job])
    (found,) = report.evaluations
    assert (found.attempts, found.passed, found.tasks) == (2, 1, 1)
    said = {name: [line for line in report.skipped if f"/{name}__000/" in line] for name in BROKEN}
    for name, (_, file, words) in BROKEN.items():
        (line,) = said[name]
        assert f"{name}__000/{file}" in line, line
        assert words in line, line
        assert "\n" not in line
    others = [line for line in report.skipped if not any(line in lines for lines in said.values())]
    assert len(others) == 2
    assert any("linked-trial is a symbolic link" in line for line in others)
    assert any("more.zip is an archive and was not opened" in line for line in others)


TOML = "[environment]\ndocker_image = 'a:1'\n"
TASKS: dict[str, tuple[dict[str, bytes], str]] = {
    "no-toml": ({"task.toml": b""}, "missing"),
    "toml": ({"task.toml": b"[agent\n"}, "task.toml:1: not valid TOML"),
    "toml-bytes": ({"task.toml": b"x = '\xff'\n"}, "task.toml:1: not UTF-8"),
    "toml-type": ({"task.toml": b"[agent]\ntimeout_sec = 'soon'\n"}, "task.toml:2: agent.timeout_sec"),
    "toml-nan": ({"task.toml": b"[agent]\ntimeout_sec = nan\n"}, "task.toml:2: agent.timeout_sec"),
    "silent": ({"instruction.md": b""}, "instruction.md"),
    "bytes": ({"instruction.md": b"do \xff\n"}, "instruction.md:1: not UTF-8"),
    "untested": ({"tests/test.sh": b""}, "tests/test.sh: missing"),
    "link-out": ({}, "secret"),
    "pipe": ({}, "pipe"),
}


def suite(root: Path) -> Path:
    for name, (change, _) in {"good": ({}, ""), **TASKS}.items():
        files = {"task.toml": TOML.encode(), "instruction.md": b"Do it.\n", "tests/test.sh": b"exit 1\n"} | change
        for path, data in files.items():
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            if data:  # no content: no file
                (root / name / path).write_bytes(data)
    (root / "link-out" / "tests" / "secret").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe" / "tests" / "pipe")
    return root


def test_a_suite_of_broken_tasks(tmp_path: Path) -> None:
    folder = suite(tmp_path / "suite")
    kept = load_suite(folder, skip_broken=True)
    assert [task.id for task in kept.tasks] == ["good"]
    assert len(kept.broken) == len(TASKS)
    for name, (_, words) in TASKS.items():
        (line,) = [b for b in kept.broken if f"/{name}/" in b]
        assert words in line, line
    with pytest.raises(TaskError, match="and 5 more"):
        load_suite(folder)


def test_the_linter_names_every_one_of_them(tmp_path: Path) -> None:
    folder = suite(tmp_path / "suite")
    done = CliRunner().invoke(app, ["tasks", "check", str(folder)])
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    errors = [line for line in done.output.splitlines() if ": error: " in line]
    for name in TASKS:
        assert any(f"/{name}" in line for line in errors), name
    assert not any("/good/" in line for line in errors)
