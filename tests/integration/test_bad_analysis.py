"""Bad input to evaluation, comparison and audit, through the command line: clear words, and no wrong number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import models as m
from orchestrator.cli import app
from orchestrator.store import Store
from stages.errors import RsiError
from stages.records import EvaluationDone
from tests import factories
from tests import trials as t

Rsi = Callable[..., str]


@pytest.fixture
def rsi(store: Store, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rsi:
    """What a command says: its output, or the message that a person gets instead of a traceback."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RSI_ARTIFACT_URL", str(tmp_path / "artifacts"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        if done.exception is None:
            return done.output
        assert isinstance(done.exception, RsiError), done.exception
        return str(done.exception)

    return run


def json_of(said: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(said)
    return found


def test_an_empty_suite(store: Store, rsi: Rsi, tmp_path: Path) -> None:
    cycle = factories.cycle(store)
    (tmp_path / "suite").mkdir()
    assert "There is no cycle 987654." in rsi("evaluate", "987654", "--suite", str(tmp_path / "suite"))
    assert "no retained checkpoint yet" in rsi("evaluate", str(cycle.id), "--suite", str(tmp_path / "suite"))
    checkpoints = [
        store.checkpoints.save(m.Checkpoint(cycle_id=cycle.id, name=name, actor_digest=name * 8, retained=True))
        for name in ("Base", "RSR-1")
    ]
    assert "holds no task folder" in rsi("evaluate", str(cycle.id), "--suite", str(tmp_path / "suite"))
    assert "use heldout-names" in rsi("evaluate", str(cycle.id), "--suite", str(tmp_path / "gone"))
    assert "no retained checkpoint RPR-9; it has Base, RSR-1" in rsi(
        "evaluate", str(cycle.id), "--checkpoint", "Base", "--checkpoint", "RPR-9"
    )
    for c in checkpoints:
        empty = EvaluationDone(
            suite="nothing", suite_digest="d" * 64, checkpoint=c.name, k=3, passed=0, attempts=0, verdicts=0, tasks=()
        )
        store.evaluations.save(empty, cycle_id=cycle.id, checkpoint_id=c.id)
    assert "on nothing has no task" in rsi("compare", *(str(c.id) for c in checkpoints))
    for chosen in (("--suite", "nothing"), ("--cycle", str(cycle.id)), ("--suite", "nothing", "--formulas", "binary")):
        assert "no attempt with a verdict to audit (0 were masked)" in rsi("audit", "run", *chosen)


def test_one_attempt_per_task(rsi: Rsi, tmp_path: Path) -> None:
    tasks = "abcdefghijkl"
    before = t.job(tmp_path, "before", {x: [float(x < "d")] for x in tasks})
    after = t.job(tmp_path, "after", {x: [float(x < "h")] for x in tasks})
    rsi("import", "harbor", str(before), str(after))
    said = rsi("compare", "before", "after")
    assert "one attempt per task" in said
    found = json_of(rsi("compare", "before", "after", "--format", "json"))
    (row,) = found["comparisons"]
    assert row["flip_p"] == 2 * 0.5**4  # McNemar's exact test of four flips


@pytest.mark.parametrize(("reward", "percent"), [(1.0, "100 %"), (0.0, "0 %")])
def test_all_pass_and_all_fail(rsi: Rsi, tmp_path: Path, reward: float, percent: str) -> None:
    jobs = [t.job(tmp_path, name, {x: [reward] * 3 for x in "abcdefghijkl"}) for name in ("before", "after")]
    rsi("import", "harbor", *map(str, jobs))
    said = rsi("compare", "before", "after")
    assert f"every task has the rate {percent.replace(' ', '')}" in said
    assert "no interval can be estimated" in said
    found = json_of(rsi("compare", "before", "after", "--format", "json"))
    (row,) = found["comparisons"]
    assert (row["difference"], row["low"], row["high"], row["flip_p"], row["tasks_needed"]) == (
        0.0,
        None,
        None,
        None,
        None,
    )
    for score in found["scores"]:
        assert score["bootstrap_low"] is None
        low, high = score["verdicts_low"], score["verdicts_high"]
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert high - low > 0.2  # as of 12 attempts, not of 36
    said = rsi("audit", "run", "--checkpoint", "before")
    assert "—" in said  # nothing to divide by is missing, not 0
    audits = json_of(rsi("audit", "export", "1", "--format", "json"))["rows"]
    missing = "mean_failure" if reward else "mean_success"
    assert {row[missing] for row in audits} == {None}


def test_a_scale_of_zero(rsi: Rsi, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"a": [0.0, 0.0]})
    t.trial(job, "b", 0, reward=0.0, checks=("failed", "failed"))
    rsi("import", "harbor", str(job), "--suite", "s")
    scales = tmp_path / "scales.json"
    scales.write_text('{"s": 0}', encoding="utf-8")
    assert "no number above 0" in rsi("audit", "run", "--suite", "s", "--scales", f"given:{scales}")
    assert "No audit yet" in rsi("audit", "list")
    shutil.rmtree(job)
    nothing = t.job(tmp_path, "nothing", {})
    for n in range(12):
        t.trial(nothing, "c", n, reward=0.0, checks=("failed", "failed"))
    rsi("import", "harbor", str(nothing), "--suite", "zero")
    said = rsi("audit", "run", "--suite", "zero")
    assert "at the floor of one check: zero" in said
    rows = json_of(rsi("audit", "export", "1", "--format", "json"))["rows"]
    assert all(r["failure_share"] is None and r["mean_failure"] == 0.0 for r in rows)  # no reward mass to share


def test_rewards_that_are_no_numbers(rsi: Rsi, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"a": [1.0, float("nan"), float("inf"), 0.0]})
    said = rsi("import", "harbor", str(job))
    assert "2 trials stored" in said
    assert "2 left out" in said
    assert "a__001/result.json" in said
    assert "1/2 = 50.0 %" in said


def test_a_trial_that_is_there_twice(rsi: Rsi, tmp_path: Path) -> None:
    job = t.job(tmp_path, "j", {"a": [1.0, 0.0]})
    shutil.copytree(job / "a__000", job / "a__009")
    said = rsi("import", "harbor", str(job), str(job))
    assert "it is counted once" in said
    assert "1/2 = 50.0 %" in said
    assert "1/2 = 50.0 %" in rsi("import", "harbor", str(job))


def test_a_suite_that_changed_between_two_evaluations(rsi: Rsi, tmp_path: Path) -> None:
    before = t.job(tmp_path, "before", {x: [1.0, 0.0] for x in "abc"})
    after = t.job(tmp_path, "after", {x: [1.0, 1.0] for x in "ab"})
    for n in range(2):
        t.trial(after, "c", n, checksum="another")
    rsi("import", "harbor", str(before), str(after))
    said = rsi("compare", "before", "after")
    assert "changed between the evaluations" in said
    assert "1 tasks are in one evaluation only, or not vouched for, and are left out" in said
    found = json_of(rsi("compare", "before", "after", "--format", "json"))
    (row,) = found["comparisons"]
    assert (row["common_tasks"], row["difference"]) == (2, 0.5)
    assert dict(found["optimism"]) == {"small-bench@1.0": None}  # several versions: nothing is estimated
    assert "The luck of choosing on small-bench@1.0 cannot be estimated" in said
