"""Overlap of suites: each kind is found, disjoint suites are let through, validation on a reported suite is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from stages.errors import TaskError
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.harbor import Suite, load_suite
from stages.tasks.overlap import NEAR, OverlapKind, _near, find_overlap, refuse_overlap, shingles
from stages.tasks.write import write_pool

TOML = '[environment]\ndocker_image = "debian:12-slim"\n'
LONG = "write a program that reads numbers from standard input and prints the sum of all even ones on one line"


def suite(root: Path, name: str, tasks: dict[str, dict[str, str]]) -> Suite:
    for task, files in tasks.items():
        for path, text in ({"task.toml": TOML, "tests/test.sh": f"# {task}\n"} | files).items():
            target = root / name / task / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return load_suite(root / name)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Suite]:
    root = tmp_path_factory.mktemp("pools")
    for kind in PoolKind:
        write_pool(generate_pool(kind, 120, 0), root / kind)
    return {kind: load_suite(root / kind) for kind in PoolKind}


def test_embedded_suites_do_not_overlap(pools: dict[str, Suite]):
    reported = [pools[PoolKind.HELDOUT_NAMES], pools[PoolKind.HELDOUT_COMBINATIONS]]
    refuse_overlap(pools[PoolKind.VALIDATION], reported)
    for a in PoolKind:
        for b in PoolKind:
            assert a == b or find_overlap(pools[a], pools[b]) == ()


def test_a_suite_overlaps_itself_and_any_part_of_itself(pools: dict[str, Suite], tmp_path: Path):
    whole = pools[PoolKind.VALIDATION]
    with pytest.raises(TaskError, match="is the reported suite"):
        refuse_overlap(whole, [whole])
    some = whole.tasks[7]
    shutil.copytree(some.root, tmp_path / "part" / "renamed")
    part = load_suite(tmp_path / "part")
    (pair,) = find_overlap(whole, part)
    assert (pair.kind, pair.task, pair.other) == (OverlapKind.SAME_TASK, some.id, "renamed")
    with pytest.raises(TaskError, match=f"overlaps the reported suite 'part' in 1 pair.*{some.id} ~ renamed"):
        refuse_overlap(whole, [pools[PoolKind.HELDOUT_NAMES], part])


def test_same_instruction(tmp_path: Path):
    a = suite(tmp_path, "a", {"x": {"instruction.md": LONG}})
    b = suite(tmp_path, "b", {"y": {"instruction.md": LONG.upper().replace(" ", "  ") + "."}})
    (pair,) = find_overlap(a, b)
    assert pair.kind in (OverlapKind.SAME_INSTRUCTION, OverlapKind.NEAR_INSTRUCTION)
    assert find_overlap(a, suite(tmp_path, "c", {"y": {"instruction.md": LONG.upper()}}))[0].kind == "same instruction"


def test_near_instruction(tmp_path: Path):
    a = suite(tmp_path, "a", {"x": {"instruction.md": LONG}, "z": {"instruction.md": "sort the file"}})
    b = suite(tmp_path, "b", {"y": {"instruction.md": LONG + " and stops"}})
    (pair,) = find_overlap(a, b)
    assert (pair.kind, pair.task, pair.other) == (OverlapKind.NEAR_INSTRUCTION, "x", "y")
    far = suite(tmp_path, "far", {"y": {"instruction.md": LONG[:40] + " something different altogether"}})
    assert find_overlap(a, far) == ()


def test_shared_file_but_not_boilerplate(tmp_path: Path):
    data, common = "1,2,3\n" * 40, "# boilerplate of every test\n" * 10
    texts = [f"task number {i} about {w}" for i, w in enumerate(["sorting", "sums", "logs", "mail", "dates"])]

    def tasks(prefix: str) -> dict[str, dict[str, str]]:
        return {
            f"{prefix}{i}": {"instruction.md": f"{prefix} {t}", "tests/common.sh": common} for i, t in enumerate(texts)
        }

    first, second = tasks("red"), tasks("blue")
    first["red2"]["environment/data.csv"] = second["blue4"]["solution/answer.csv"] = data
    first["red3"]["environment/tiny"] = second["blue1"]["environment/tiny"] = "1\n"
    found = find_overlap(suite(tmp_path, "a", first), suite(tmp_path, "b", second))
    assert [(o.kind, o.task, o.other, o.detail) for o in found] == [
        (OverlapKind.SHARED_FILE, "red2", "blue4", "environment/data.csv")
    ]


def test_prefix_filter_finds_what_brute_force_finds(pools: dict[str, Suite]):
    rng = random.Random(0)
    tasks = list(pools[PoolKind.TRAIN].tasks[:60])
    changed = []
    for task in tasks:
        words = task.instruction.split()
        for _ in range(rng.randint(0, 2)):
            words[rng.randrange(len(words))] = "changed"
        changed.append(type(task)(**{f: getattr(task, f) for f in task.__slots__} | {"instruction": " ".join(words)}))
    for near in (0.4, 0.6, NEAR, 1.0):
        brute = set()
        for a in tasks:
            for b in changed:
                x, y = shingles(a.instruction), shingles(b.instruction)
                if len(x & y) / len(x | y) >= near:
                    brute.add((a.id, b.id))
        assert {(a, b) for a, b, _ in _near(tasks, changed, near)} == brute
        assert brute
