"""One embedded task: a chain of one to four subgoals, joined by "then", beside files that are none of its business."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

from stages.domain import CheckSpec, Stratum
from stages.tasks.families import FAMILIES, Subgoal
from stages.tasks.families.base import lines
from stages.tasks.names import NameSource, Partition
from stages.tasks.verifier import GATE, check_id, gate_test, manifest, test_script

STRATA = {1: Stratum.EASY, 2: Stratum.MEDIUM, 3: Stratum.HARD, 4: Stratum.EXTREME}
"""Stratum by number of subgoals."""

_PATH = (
    "create",
    "column",
    "chmod",
    "move",
    "setkey",
    "append",
    "count",
    "lookup",
    "copy",
    "prune",
    "modefile",
    "first",
)
HELD_PAIRS = frozenset(frozenset(pair) for pair in pairwise(_PATH))
"""Eleven of the 66 unordered pairs of families. No chain of training, validation or pre-training holds one (in any
order, adjacent or not); every chain of the suite of unseen combinations holds at least one."""

_BYSTANDER_EXTENSIONS = ("txt", "log", "lst", "csv")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One generated task, before it is written as a folder. (No slots: `files` and `checks` are computed once.)"""

    id: str
    goals: tuple[Subgoal, ...]
    bystanders: Mapping[str, str]

    @property
    def size(self) -> int:
        """k: the number of subgoals."""
        return len(self.goals)

    @property
    def family(self) -> str:
        """Tasks that share a reward scale: the leading subgoal's family and k, as in "move-2"."""
        return f"{self.goals[0].family}-{self.size}"

    @property
    def stratum(self) -> Stratum:
        return STRATA[self.size]

    @property
    def max_turns(self) -> int:
        return 2 * self.size + 2

    @property
    def instruction(self) -> str:
        return " then ".join(goal.text for goal in self.goals)

    @cached_property
    def files(self) -> dict[str, str]:
        """The initial workspace, by path."""
        merged = dict(self.bystanders)
        for goal in self.goals:
            merged |= goal.files
        return dict(sorted(merged.items()))

    @property
    def untouched(self) -> tuple[str, ...]:
        """Inputs that must stay as they are."""
        return tuple(sorted({*self.bystanders, *(f for goal in self.goals for f in goal.untouched)}))

    @cached_property
    def checks(self) -> tuple[tuple[str, str], ...]:
        """(id, bash condition) of every check, the gate last."""
        found = [
            (check_id(position, goal.family, check), check.test)
            for position, goal in enumerate(self.goals, 1)
            for check in FAMILIES[goal.family].checks(goal)
        ]
        return (*found, (GATE, gate_test([(f, self.files[f]) for f in self.untouched])))

    @property
    def manifest(self) -> tuple[CheckSpec, ...]:
        return manifest(name for name, _ in self.checks[:-1])

    @property
    def moded(self) -> tuple[str, ...]:
        """Files whose permissions are checked."""
        return tuple(goal.params["f"] for goal in self.goals if "mode" in goal.params)

    @property
    def test_script(self) -> str:
        return test_script(self.checks, self.moded)

    def solution(self, rng: random.Random) -> list[str]:
        """Commands that solve the task."""
        return [command for goal in self.goals for command in FAMILIES[goal.family].right(goal, rng)]

    def runbook(self, rng: random.Random) -> list[str]:
        """Reference runbook."""
        return [line for goal in self.goals for line in FAMILIES[goal.family].runbook(goal, rng)]


def holds_held_pair(families: tuple[str, ...]) -> bool:
    """Whether a chain holds a pair of families that training never sees."""
    return any(frozenset(pair) in HELD_PAIRS for pair in combinations(families, 2))


def draw_chain(rng: random.Random, size: int, *, lead: str | None = None, held_pair: bool = False) -> tuple[str, ...]:
    """Distinct families of a chain, by rejection: with a held pair, or without any. `held_pair` needs `size` ≥ 2."""
    if held_pair and size < 2:
        raise ValueError("a chain of one subgoal holds no pair")
    names = list(FAMILIES)
    while True:
        first = lead or rng.choice(names)
        chain = (first, *rng.sample([n for n in names if n != first], size - 1))
        if holds_held_pair(chain) == held_pair:
            return chain


def draw_task(
    rng: random.Random,
    task_id: str,
    size: int,
    partition: Partition,
    *,
    lead: str | None = None,
    held_pair: bool = False,
) -> TaskSpec:
    """One task of `size` subgoals with names of one partition."""
    names = NameSource(rng, partition)
    goals = tuple(FAMILIES[f].make(rng, names) for f in draw_chain(rng, size, lead=lead, held_pair=held_pair))
    bystanders = {
        f"{names()}.{rng.choice(_BYSTANDER_EXTENSIONS)}": lines(names() for _ in range(rng.randint(1, 2)))
        for _ in range(rng.randint(1, 2))
    }
    return TaskSpec(id=task_id, goals=goals, bystanders=bystanders)
