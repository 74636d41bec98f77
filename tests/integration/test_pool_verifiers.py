"""Every embedded verifier, run for real: solutions pass, doing nothing passes nothing, mistakes pass something."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.seeds import rng
from stages.tasks.chains import TaskSpec, draw_task
from stages.tasks.families import FAMILIES
from stages.tasks.names import Partition

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
PER_FAMILY = 12


@dataclass
class Box:
    """One attempt's directories on the host. (The sandboxes have tests of their own; here only the scripts count.)"""

    root: Path
    spec: TaskSpec

    @property
    def app(self) -> Path:
        return self.root / "app"

    def fresh(self) -> Box:
        self.app.mkdir(parents=True)
        (self.root / "logs").mkdir()
        for path, text in self.spec.files.items():
            (self.app / path).write_text(text)
            (self.app / path).chmod(0o644)
        return self

    def sh(self, *commands: str) -> None:
        script = "\n".join(commands)
        subprocess.run(["/bin/bash", "-c", script], cwd=self.app, env=ENV, capture_output=True, timeout=20, check=False)

    def verify(self) -> tuple[int, bool, dict[str, str]]:
        """(P, strict, status by check id)"""
        script = self.spec.test_script.replace(
            "app=/app logs=/logs/verifier", f"app={self.app} logs={self.root / 'logs'}"
        )
        done = subprocess.run(
            ["/bin/bash"], input=script.encode(), env=ENV, capture_output=True, timeout=20, check=False
        )
        assert done.stderr == b"", done.stderr.decode()
        results = json.loads((self.root / "logs/ctrf.json").read_text())["results"]
        statuses = {t["name"]: t["status"] for t in results["tests"]}
        assert list(statuses) == [check.id for check in self.spec.manifest]
        assert results["summary"]["tests"] == len(statuses)
        assert results["summary"]["passed"] == sum(s == "passed" for s in statuses.values())
        reward = (self.root / "logs/reward.txt").read_text()
        strict = all(s == "passed" for s in statuses.values())
        assert reward == f"{int(strict)}\n"
        assert (done.returncode == 0) == strict
        progress = sum(s == "passed" for name, s in statuses.items() if name != "untouched")
        return progress, strict, statuses


def boxes(tmp_path: Path, spec: TaskSpec):
    """A factory of fresh boxes."""
    count = iter(range(1000))
    return lambda: Box(tmp_path / str(next(count)), spec).fresh()


def sample(family: str, i: int) -> TaskSpec:
    return draw_task(rng("verifier test", family, i), f"{family}-{i}", 1 + i % 4, Partition.TRAIN, lead=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_solution_nothing_and_mistakes(family: str, tmp_path: Path):
    graded: set[float] = set()
    for i in range(PER_FAMILY):
        spec = sample(family, i)
        box = boxes(tmp_path / str(i), spec)
        total = len(spec.manifest) - 1

        for attempt in range(2):
            solved = box()
            solved.sh("set -e", *spec.solution(random.Random(attempt)))
            assert solved.verify()[:2] == (total, True), spec.instruction
        assert solved.verify()[:2] == (total, True), "verifying twice gives the same"

        progress, strict, statuses = box().verify()
        assert (progress, strict) == (0, False), (spec.instruction, statuses)
        assert statuses["untouched"] == "passed"

        wrong = box()
        wrong.sh(*(c for goal in spec.goals for c in FAMILIES[goal.family].wrong(goal, random.Random(i))))
        progress, strict, statuses = wrong.verify()
        assert not strict, (spec.instruction, statuses)
        graded.add(progress / total)
    assert any(g > 0 for g in graded), "some mistakes must be worth something"
    assert len(graded) >= 3, f"progress is graded: {graded}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_single_mistake_fails_and_many_can_be_repaired(family: str, tmp_path: Path):
    repaired = damaged = 0
    seen: set[tuple[str, ...]] = set()
    spec = sample(family, 0)
    goal = spec.goals[0]
    box = boxes(tmp_path, spec)
    for i in range(40):
        commands = FAMILIES[family].wrong(goal, random.Random(i))
        if tuple(commands) in seen:
            continue
        seen.add(tuple(commands))
        attempt = box()
        attempt.sh(*commands)
        assert not attempt.verify()[1], commands
        attempt.sh(*FAMILIES[family].right(goal, random.Random(0)))
        if attempt.verify()[1]:
            repaired += 1
        else:
            damaged += 1
    assert len(seen) >= 3
    assert repaired >= 1
    assert repaired + damaged == len(seen)


HOSTILE = {
    "symlink to another file": 'for f in $targets; do rm -rf "$f"; ln -s /etc/passwd "$f"; done',
    "directory in place of a file": 'for f in $targets; do rm -rf "$f"; mkdir -p "$f"; done',
    "named pipe": 'for f in $targets; do rm -rf "$f"; mkfifo "$f"; done',
    "huge file": 'for f in $targets; do rm -rf "$f"; truncate -s 5G "$f"; done',
    "one endless line": 'for f in $targets; do rm -rf "$f"; head -c 3000000 /dev/zero | tr \'\\0\' a > "$f"; done',
    "unreadable": 'for f in $targets; do : > "$f"; chmod 000 "$f"; done',
    "names with newlines, quotes and options": "touch -- $'a\\nb' '$(touch pwned)' -rf '*' \"it's\"; mkdir -p -- --help",
    "everything gone": "rm -rf ./* .[!.]*",
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_hostile_workspaces_fail_fast_and_quietly(trick: str, tmp_path: Path):
    for i, family in enumerate(FAMILIES):
        spec = sample(family, i)
        attempt = boxes(tmp_path / family, spec)()
        outputs = [str(goal.params[key]) for goal in spec.goals for key in ("f", "o", "d", "x") if key in goal.params]
        targets = " ".join([*spec.files, *outputs])
        attempt.sh(f"targets='{targets}'", HOSTILE[trick])
        _, strict, _ = attempt.verify()
        assert not strict
        assert not (attempt.app / "pwned").exists()


def test_workspace_itself_is_gone(tmp_path: Path):
    spec = sample("lookup", 0)
    attempt = boxes(tmp_path, spec)()
    attempt.sh(f"rm -rf '{attempt.app}'")
    progress, strict, statuses = attempt.verify()
    assert (progress, strict, statuses["untouched"]) == (0, False, "failed")


def test_planted_reports_are_replaced(tmp_path: Path):
    spec = sample("create", 0)
    attempt = boxes(tmp_path, spec)()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.symlink(victim, attempt.root / "logs/ctrf.json")
    (attempt.root / "logs/reward.txt").mkdir()
    assert not attempt.verify()[1]
    assert victim.read_text() == "mine"


def test_nul_bytes_do_not_pass_as_text(tmp_path: Path):
    spec = sample("create", 0)
    goal = spec.goals[0]
    attempt = boxes(tmp_path, spec)()
    (attempt.app / goal.params["f"]).write_bytes(goal.params["w"].encode() + b"\n\0")
    assert not attempt.verify()[1]


def test_gate_notices_each_touched_input(tmp_path: Path):
    for i, family in enumerate(FAMILIES):
        spec = sample(family, i)
        box = boxes(tmp_path / family, spec)
        assert spec.untouched
        for path in spec.untouched:
            attempt = box()
            attempt.sh(*spec.solution(random.Random(0)))
            target = attempt.app / path
            mode = target.stat().st_mode
            target.chmod(0o644)
            target.write_text(target.read_text() + "more\n")
            target.chmod(mode)
            progress, strict, statuses = attempt.verify()
            assert statuses["untouched"] == "failed"
            assert not strict
            assert progress == len(spec.manifest) - 1, "no scenario check depends on it"
