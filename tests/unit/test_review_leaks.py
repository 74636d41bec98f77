"""Planted leaks are rejected and clean runbooks pass, on written-out tasks; precision and recall are printed."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.domain import (
    Decision,
    EndReason,
    LeakPart,
    Review,
    Runbook,
    RunbookLine,
    Severity,
    Stratum,
    Task,
    Trajectory,
    Turn,
    Verdict,
)
from stages.leaks import REGISTRY, SHELL_HARNESS, HarnessRules, ReviewContext
from stages.leaks.passages import Passages, words_of
from stages.review import model_question, q_leak, review_runbook

FIXTURES = Path(__file__).parents[1] / "fixtures" / "leaks"


@dataclass(frozen=True)
class Case:
    name: str
    batch: str
    label: str
    hard: bool
    runbook: Runbook
    context: ReviewContext


def trajectory_of(task: Task, turns: list[tuple[str, str]]) -> Trajectory:
    return Trajectory(
        id=f"{task.id}-source",
        task_id=task.id,
        family=task.family,
        stratum=task.stratum,
        attempt=0,
        seed=0,
        turns=tuple(Turn(index=i, action=a, observation=o, exit_code=0) for i, (a, o) in enumerate(turns)),
        segments=(),
        checks=(),
        end_reason=EndReason.DONE,
        verdict=Verdict.PASSED,
        weight_version="0",
    )


def load(path: Path) -> list[Case]:
    with path.open("rb") as file:
        data = tomllib.load(file)
    task = Task(
        id=path.stem,
        suite="fixtures",
        family="f",
        stratum=Stratum.EASY,
        instruction=data["instruction"],
        root=path.parent,
        digest="",
        files={name: text.encode() for name, text in data.get("files", {}).items()},
    )
    context = ReviewContext(
        task=task,
        source=trajectory_of(task, data["turns"]),
        hidden_texts=data["hidden"],
        harness=SHELL_HARNESS if data.get("shell") else HarnessRules(),
    )
    return [
        Case(
            name=f"{path.stem}: {book['name']}",
            batch=path.parent.name,
            label=book["label"],
            hard=book.get("hard", False),
            runbook=Runbook(
                id=f"{path.stem}-{number}",
                task_id=task.id,
                source_trajectory_id=f"{task.id}-source",
                planner="test",
                lines=tuple(RunbookLine(text=line) for line in book["lines"]),
            ),
            context=context,
        )
        for number, book in enumerate(data["runbook"])
    ]


CASES = [case for path in sorted(FIXTURES.glob("*/*.toml")) for case in load(path)]
CLEAN = [c for c in CASES if c.label == "clean"]
LEAKS = [c for c in CASES if c.label != "clean"]


def told(review: Review) -> str:
    return "\n".join(
        f"  {f.rule} line {f.line}: {f.message} [{f.evidence!r} <- {f.evidence_source}]" for f in review.findings
    )


def test_there_are_enough_cases() -> None:
    for part in LeakPart:
        assert len([c for c in LEAKS if c.label == part.value]) >= 5, part
    assert len(CLEAN) >= 20
    assert len([c for c in CLEAN if not c.context.strict]) >= 12


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in LEAKS])
def test_leak_is_rejected_by_its_part(case: Case) -> None:
    review = review_runbook(case.runbook, case.context)
    assert review.decision is Decision.REJECT
    assert case.label in {f.part.value for f in review.findings}, told(review)
    if case.hard:
        assert any(f.severity is Severity.HARD and f.part.value == case.label for f in review.findings), told(review)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CLEAN])
def test_clean_runbook_passes(case: Case) -> None:
    review = review_runbook(case.runbook, case.context)
    assert review.decision is Decision.APPROVE, told(review)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CLEAN])
def test_source_trajectory_is_no_leak(case: Case) -> None:
    assert case.context.source is not None
    clean, findings = q_leak(case.context.source, case.context)
    assert clean, findings


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in LEAKS])
def test_finding_points_at_its_text(case: Case) -> None:
    for f in review_runbook(case.runbook, case.context).findings:
        assert f.rule.startswith(f"{f.part.value}.")
        assert f.message
        if f.line is not None and f.line < len(case.runbook.lines):
            text = case.runbook.lines[f.line].text
            assert 0 <= f.start <= f.end <= len(text)


def test_question_to_a_model_holds_nothing_hidden() -> None:
    """A model reviewer is told messages; evidence and its hidden place stay with people."""
    hidden_findings = 0
    for case in CASES:
        review = review_runbook(case.runbook, case.context)
        question = model_question(case.runbook, case.context, review)
        told = "\n".join(f.message for f in question.findings)
        assert not [*Passages(case.context.hidden_texts).runs(words_of(told))]
        for f in review.findings:
            if f.evidence_source.startswith(("tests/", "solution/")):
                hidden_findings += 1
                assert f.evidence_source not in told or f.evidence_source in case.runbook.text
    assert hidden_findings > 10


def test_precision_and_recall(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for batch in sorted({c.batch for c in CASES}):
        cases = [c for c in CASES if c.batch == batch]
        rejected = {c.name for c in cases if review_runbook(c.runbook, c.context).decision is Decision.REJECT}
        bad = {c.name for c in cases if c.label != "clean"}
        caught = len(rejected & bad)
        rows.append((batch, len(bad), len(cases) - len(bad), caught / len(rejected), caught / len(bad)))
    with capsys.disabled():
        print()
        for batch, leaks, clean, precision, recall in rows:
            print(
                f"leak gate, {batch} batch: {leaks} leaks, {clean} clean: precision {precision:.3f}, recall {recall:.3f}"
            )
    assert all(row[3] == 1.0 and row[4] == 1.0 for row in rows)


def test_one_runbook_takes_under_a_millisecond() -> None:
    books = [(c.runbook, c.context) for c in CASES]
    for book, context in books:
        review_runbook(book, context)  # the index of a context is built once
    start = time.process_time()
    for _ in range(3):
        for book, context in books:
            review_runbook(book, context)
    mean_ms = 1000 * (time.process_time() - start) / (3 * len(books))
    assert mean_ms <= 1.0, f"{mean_ms:.2f} ms per runbook"


def test_every_part_has_rules() -> None:
    assert set(REGISTRY) == set(LeakPart)
    assert all(len(rules) >= 3 for rules in REGISTRY.values())
