"""The embedded pool in real sandboxes: solutions pass twice, doing nothing passes nothing, and the corpus's transcripts
print there what they printed in pre-training."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.domain import CheckRole, CheckStatus, Task, Verdict
from stages.errors import SandboxUnavailable
from stages.harness.observation import tidy
from stages.pretrain import operators
from stages.pretrain.corpus import run_scripts
from stages.seeds import rng
from stages.tasks.chains import TaskSpec
from stages.tasks.families import FAMILIES
from stages.tasks.generate import generate_pool
from stages.tasks.harbor import load_suite
from stages.tasks.write import write_pool

TASKS = 48  # one of every family and chain length


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TaskSpec, Task]]:
    folder = tmp_path_factory.mktemp("pool") / "train"
    specs = generate_pool("train", TASKS, 11)
    assert len({spec.family for spec in specs}) == TASKS
    write_pool(specs, folder, kind="train", seed=11)
    tasks = load_suite(folder, strict=True).by_id
    return [(spec, tasks[spec.id]) for spec in specs]


async def attempt(backend: BubblewrapBackend, task: Task, commands: Sequence[str]) -> tuple[list[str], Verdict, int]:
    """(observations, verdict, P)"""
    sandbox = await backend.open(task)
    try:
        seen = []
        for command in commands:
            result = await sandbox.run(command)
            seen.append(tidy(result.output, result.exit_code, result.timed_out))
        report = await sandbox.verify()
    finally:
        await sandbox.close()
    assert [c.id for c in report.checks] == [c.id for c in task.checks]
    assert report.flags == (), (report.flags, report.log)
    progress = sum(c.status is CheckStatus.PASSED and c.role is CheckRole.SCENARIO for c in report.checks)
    return seen, report.verdict, progress


def in_sandboxes(jobs: Sequence[tuple[Task, Sequence[str]]]) -> list[tuple[list[str], Verdict, int]]:
    async def all_of() -> list[tuple[list[str], Verdict, int]]:
        backend = BubblewrapBackend(concurrency=4)
        try:
            await backend.start()
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        try:
            return await asyncio.gather(*(attempt(backend, task, commands) for task, commands in jobs))
        finally:
            await backend.aclose()

    return asyncio.run(all_of())


def test_solutions_pass_twice_and_nothing_passes_nothing(pool: list[tuple[TaskSpec, Task]]):
    jobs = []
    for spec, task in pool:
        jobs += [(task, spec.solution(random.Random(i))) for i in (0, 1)]
        jobs.append((task, ()))
    results = in_sandboxes(jobs)
    for i, (spec, task) in enumerate(pool):
        for _, verdict, progress in results[3 * i : 3 * i + 2]:
            assert (verdict, progress) == (Verdict.PASSED, len(task.checks) - 1), spec.instruction
        assert results[3 * i + 2] == ([], Verdict.FAILED, 0), spec.instruction


def test_mistakes_give_partial_progress(pool: list[tuple[TaskSpec, Task]]):
    jobs = [
        (task, [c for goal in spec.goals for c in FAMILIES[goal.family].wrong(goal, rng("wrong", task.id))])
        for spec, task in pool
    ]
    shares = []
    for (_, task), (_, verdict, progress) in zip(pool, in_sandboxes(jobs), strict=True):
        assert verdict is Verdict.FAILED
        shares.append(progress / (len(task.checks) - 1))
    assert 0.1 < sum(shares) / len(shares) < 0.8
    assert len(set(shares)) >= 6


def test_a_transcript_reads_in_the_sandbox_as_in_the_corpus(pool: list[tuple[TaskSpec, Task]], tmp_path: Path):
    plans = [operators.act(spec, rng("same", spec.id), 0.4) for spec, _ in pool]
    scripted = list(run_scripts([(spec, p.commands) for (spec, _), p in zip(pool, plans, strict=True)], tmp_path))
    jobs = [(task, plan.commands[:-1]) for (_, task), plan in zip(pool, plans, strict=True)]
    for (turns, success), (seen, verdict, _), plan in zip(scripted, in_sandboxes(jobs), plans, strict=True):
        assert [o for _, o in turns] == [*seen, ""], plan.commands
        assert (verdict is Verdict.PASSED) is success, plan.commands
    assert any(o.startswith("err ") for turns, _ in scripted for _, o in turns)
