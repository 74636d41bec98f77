"""Overlap of two suites: the same task, nearly the same instruction, or the same workspace, test or solution file.

A validation suite that overlaps a reported suite is refused, by digest or by tasks (spec §9, disjointness).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stages.domain import Task
from stages.errors import TaskError
from stages.tasks.digests import read_folder
from stages.tasks.harbor import Suite

SHINGLE = 3  # words; with fewer, two templated instructions look alike that share no name
NEAR = 0.8  # Jaccard similarity of shingles from which two instructions are near duplicates
SMALL_FILE_BYTES = 64  # files under this size prove nothing by being equal
COMMON_SHARE = 0.25  # a file in more tasks of its suite than this (and in more than one) is boilerplate


_TELLING = ("environment", "tests", "solution", "steps")
_RECIPES = ("Dockerfile", "docker-compose.yaml")  # alike wherever tasks share a base image


class OverlapKind(StrEnum):
    SAME_TASK = "same task"  # equal digests
    SAME_INSTRUCTION = "same instruction"  # equal after folding case and blanks
    NEAR_INSTRUCTION = "near-duplicate instruction"
    SHARED_FILE = "shared file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One pair of tasks that should not be in both suites."""

    kind: OverlapKind
    task: str  # id in the first suite
    other: str  # id in the second
    detail: str = ""  # the similarity, or the path


def find_overlap(first: Suite, second: Suite, *, near: float = NEAR) -> tuple[Overlap, ...]:
    """Every overlapping pair, strongest kind first. A pair is listed once, under its strongest kind.

    Reads tests and solutions from the suites' folders; raises TaskError when a folder is gone.
    """
    found: dict[tuple[str, str], Overlap] = {}

    def add(kind: OverlapKind, task: str, other: str, detail: str = "") -> None:
        found.setdefault((task, other), Overlap(kind=kind, task=task, other=other, detail=detail))

    for task, other in _equal(first, second, lambda t: t.digest):
        add(OverlapKind.SAME_TASK, task, other)
    for task, other in _equal(first, second, lambda t: " ".join(_words(t.instruction))):
        add(OverlapKind.SAME_INSTRUCTION, task, other)
    for task, other, similarity in _near(first.tasks, second.tasks, near):
        add(OverlapKind.NEAR_INSTRUCTION, task, other, f"{similarity:.2f}")
    for task, other, path in _shared_files(first, second):
        add(OverlapKind.SHARED_FILE, task, other, path)
    order = list(OverlapKind)
    return tuple(sorted(found.values(), key=lambda o: (order.index(o.kind), o.task, o.other)))


def refuse_overlap(validation: Suite, reported: Sequence[Suite]) -> None:
    """Raise TaskError if the protected validation suite shares its digest or a task with a reported suite."""
    for suite in reported:
        if suite.digest == validation.digest:
            raise TaskError(
                f"validation suite {validation.name!r} is the reported suite {suite.name!r} (digest "
                f"{suite.digest[:12]}…): choose another validation suite, steps may not be chosen on what is reported"
            )
        pairs = find_overlap(validation, suite)
        if pairs:
            listed = "; ".join(
                f"{o.task} ~ {o.other} ({o.kind}{f', {o.detail}' if o.detail else ''})" for o in pairs[:3]
            )
            raise TaskError(
                f"validation suite {validation.name!r} overlaps the reported suite {suite.name!r} in {len(pairs)} "
                f"pair(s): {listed}{' …' if len(pairs) > 3 else ''}: remove those tasks from one of them"
            )


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of `SHINGLE` words, punctuation and case aside; the whole text if it is shorter."""
    words = _words(text)
    return frozenset(tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1)))


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.\-/=]+", text.lower())


def _equal(first: Suite, second: Suite, key: Callable[[Task], str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for task in first.tasks:
        groups[key(task)].append(task.id)
    return [(task, other.id) for other in second.tasks for task in groups.get(key(other), ())]


def _near(first: Sequence[Task], second: Sequence[Task], near: float) -> list[tuple[str, str, float]]:
    """Pairs with Jaccard ≥ `near`, by prefix filtering: two such sets share one of their rarest shingles."""
    sets_a = {t.id: shingles(t.instruction) for t in first}
    sets_b = {t.id: shingles(t.instruction) for t in second}
    frequency = Counter(s for group in (sets_a, sets_b) for shingled in group.values() for s in shingled)

    def prefix(items: frozenset[tuple[str, ...]]) -> list[tuple[str, ...]]:
        ordered = sorted(items, key=lambda s: (frequency[s], s))
        return ordered[: len(ordered) - math.ceil(near * len(ordered)) + 1]

    index: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, items in sets_a.items():
        for shingle in prefix(items):
            index[shingle].append(name)
    found = []
    for other, items in sets_b.items():
        for name in sorted({n for shingle in prefix(items) for n in index.get(shingle, ())}):
            common = len(sets_a[name] & items)
            similarity = common / (len(sets_a[name]) + len(items) - common)
            if similarity >= near:
                found.append((name, other, similarity))
    return found


def _shared_files(first: Suite, second: Suite) -> list[tuple[str, str, str]]:
    a, b = _telling_files(first), _telling_files(second)
    return [
        (task, other, path)
        for digest, owners in a.items()
        for task, path in owners.items()
        for other in b.get(digest, ())
    ]


def _telling_files(suite: Suite) -> Mapping[str, Mapping[str, str]]:
    """File digest → {task id: path}, without small files and without the suite's boilerplate."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for task in suite.tasks:
        for path, content in read_folder(task.root).items():
            telling = path.partition("/")[0] in _TELLING and path.rpartition("/")[2] not in _RECIPES
            if telling and len(content) >= SMALL_FILE_BYTES:
                owners[hashlib.sha256(content).hexdigest()].setdefault(task.id, path)
    limit = max(1.0, COMMON_SHARE * len(suite.tasks))
    return {digest: by_task for digest, by_task in owners.items() if len(by_task) <= limit}
