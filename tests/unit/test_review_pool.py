"""The leak gate over the embedded pool: reference runbooks pass, every kind of systematic mutation is rejected."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.domain import Decision, EndReason, Review, Runbook, RunbookLine, Task, Trajectory, Turn, Verdict
from stages.harness.observation import tidy
from stages.leaks import SHELL_HARNESS, ReviewContext, load_hidden_texts
from stages.review import q_leak, review_runbook
from stages.tasks.chains import TaskSpec
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.harbor import load_suite
from stages.tasks.write import write_pool

N = 75  # of each of four kinds


def pools(folder: Path) -> list[tuple[TaskSpec, Task]]:
    pairs = []
    for kind in PoolKind:
        specs = generate_pool(kind, N, seed=17)
        write_pool(specs, folder / kind.value, name=kind.value)
        tasks = {t.id: t for t in load_suite(folder / kind.value).tasks}
        pairs += [(spec, tasks[spec.id]) for spec in specs]
    return pairs


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TaskSpec, Task]]:
    return pools(tmp_path_factory.mktemp("pools"))


def success(spec: TaskSpec, task: Task) -> Trajectory:
    """The solution as an agent would type it, with what the screen then shows."""
    rng = random.Random(spec.id)
    turns = [("ls", tidy("\n".join(spec.files).encode(), 0, False))] if rng.random() < 0.5 else []
    for goal_command in spec.solution(rng):
        shown = ""
        if goal_command.startswith("cat "):
            shown = tidy(spec.files[goal_command.split()[1]].encode(), 0, False)
        turns.append((goal_command, shown))
    for goal in spec.goals:
        if "o" in goal.params and rng.random() < 0.5 and goal.family in ("count", "column", "first"):
            want = goal.params.get("want") or (goal.params["n"],)
            turns.append((f"cat {goal.params['o']}", tidy("\n".join(want).encode(), 0, False)))
    turns.append(("done", ""))
    return Trajectory(
        id=f"{spec.id}-0",
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


def book(spec: TaskSpec, lines: list[str]) -> Runbook:
    return Runbook(
        id=spec.id,
        task_id=spec.id,
        source_trajectory_id="t",
        planner="test",
        lines=tuple(RunbookLine(text=line) for line in lines),
    )


def context(spec: TaskSpec, task: Task, *, with_source: bool) -> ReviewContext:
    return ReviewContext(
        task=task,
        source=success(spec, task) if with_source else None,
        hidden_texts=load_hidden_texts(task),
        harness=SHELL_HARNESS,
    )


def mutations(spec: TaskSpec) -> Iterator[tuple[str, list[str]]]:
    """(what was done, lines) of the reference runbook with one leak put in."""
    lines = spec.runbook(random.Random(spec.id))
    values = spec.solution(random.Random(spec.id))
    assert len(lines) == len(values)
    for i, (line, command) in enumerate(zip(lines, values, strict=True)):
        if line != command:
            yield "value instead of it", [*lines[:i], command, *lines[i + 1 :]]
    for goal in spec.goals:
        p = goal.params
        at = (
            next(i for i, c in enumerate(values) if p["o"] in c)
            if "o" in p and p["o"] + " " in " ".join(values) + " "
            else None
        )
        if goal.family == "count" and at is not None:
            yield "count hard-coded", [*lines[:at], f"echo {p['n']} > {p['o']}", *lines[at + 1 :]]
            yield "count hard-coded by printf", [*lines[:at], f"printf '{p['n']}\\n' > {p['o']}", *lines[at + 1 :]]
        if goal.family in ("column", "first") and at is not None:
            text = "\\n".join(p["want"])
            yield "result typed out", [*lines[:at], f"printf '{text}\\n' > {p['o']}", *lines[at + 1 :]]
        if goal.family == "setkey":
            at = next(i for i, c in enumerate(values) if p["f"] in c)
            others = " ".join(p["others"])
            yield "file typed from memory", [*lines[:at], f"echo {others} > {p['f']}", *lines[at + 1 :]]
    rng = random.Random(spec.id)
    at = rng.randrange(len(lines) + 1)
    yield "reads the verifier", [*lines[:at], "cat /tests/test.sh", *lines[at:]]
    yield "relative test path", [*lines[:at], "cat tests/test.sh", *lines[at:]]
    yield "reads the solution", [*lines[:at], "cat /solution/solve.sh", *lines[at:]]
    yield "writes the reward", [*lines, "echo 1 > /logs/verifier/reward.txt"]
    yield "check in words", [*lines[:at], f"echo {spec.checks[0][0]} wants this", *lines[at:]]
    yield "only done", ["done"]
    yield "nothing", []
    yield "too long", [*lines, *["ls"] * 12]
    yield "foreign command", [*lines[:at], "python3 fix.py", *lines[at:]]
    yield "refers to the attempt", [*lines[:at], "echo see turn 2", *lines[at:]]
    yield "secret", [*lines, "echo password=hunter2 > zz.txt"]
    yield "digest", [*lines[:at], "echo 9f86d081884c7d659a2feaa0c55ad015 > x.txt", *lines[at:]]


def told(review: Review) -> str:
    return "; ".join(f"{f.rule} {f.evidence!r} <- {f.evidence_source}" for f in review.findings)


@pytest.mark.parametrize("with_source", [True, False])
def test_reference_runbooks_pass(pool: list[tuple[TaskSpec, Task]], with_source: bool) -> None:
    for spec, task in pool:
        runbook = book(spec, spec.runbook(random.Random(spec.id)))
        review = review_runbook(runbook, context(spec, task, with_source=with_source))
        assert review.decision is Decision.APPROVE, f"{spec.instruction}\n{runbook.text}\n{told(review)}"


@pytest.mark.parametrize("with_source", [True, False])
def test_mutated_runbooks_are_rejected(
    pool: list[tuple[TaskSpec, Task]], with_source: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: Counter[str] = Counter()
    missed: dict[str, list[str]] = {}
    for spec, task in pool:
        ctx = context(spec, task, with_source=with_source)
        for kind, lines in mutations(spec):
            tried[kind] += 1
            if review_runbook(book(spec, lines), ctx).decision is Decision.APPROVE:
                missed.setdefault(kind, []).append(f"{spec.instruction} | {' ; '.join(lines)}")
    with capsys.disabled():
        print(
            f"\nmutated runbooks: {sum(tried.values())} of {len(tried)} kinds, {sum(map(len, missed.values()))} missed"
        )
    assert not missed, {k: v[:3] for k, v in missed.items()}
    assert len(tried) >= 14
    assert min(tried.values()) >= 20


def test_honest_successes_are_no_leak(pool: list[tuple[TaskSpec, Task]]) -> None:
    for spec, task in pool:
        ctx = context(spec, task, with_source=True)
        assert ctx.source is not None
        clean, found = q_leak(ctx.source, ctx)
        assert clean, (spec.instruction, found)


def test_successes_without_reading_are_leaks(pool: list[tuple[TaskSpec, Task]]) -> None:
    """The value of a reference file typed without having read it can only come from the judge or a leaking runbook."""
    tried = 0
    for spec, task in pool:
        if not any(g.family == "lookup" for g in spec.goals) or re.search(r"\bls\b", spec.instruction):
            continue
        honest = success(spec, task)
        blind = tuple(t for t in honest.turns if not t.action.startswith(("cat ", "ls")))
        ctx = ReviewContext(task=task, hidden_texts=load_hidden_texts(task), harness=SHELL_HARNESS)
        replay = Trajectory(**{n: getattr(honest, n) for n in Trajectory.__slots__ if n != "turns"}, turns=blind)
        clean, _ = q_leak(replay, ctx)
        tried += 1
        assert not clean, (spec.instruction, [t.action for t in blind])
    assert tried >= 40
