"""Names, families, chains and pools: disjoint by construction, deterministic, in the promised proportions."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.domain import CheckRole, Stratum
from stages.errors import ConfigError
from stages.seeds import rng
from stages.tasks.chains import HELD_PAIRS, draw_chain, draw_task, holds_held_pair
from stages.tasks.families import FAMILIES
from stages.tasks.families.base import quote
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.names import NAMES, STOP_WORDS, SYLLABLES, NameSource, Partition, partition_of

NAME = re.compile(r"\b(?:[bdfgklmnprstvz][aeiou]){2}\b")


def names_in(spec) -> set[str]:
    """Every name that a task shows or hides."""
    text = " ".join([spec.instruction, *spec.files, *spec.files.values(), *spec.solution(random.Random(0))])
    return set(NAME.findall(text)) - STOP_WORDS


def test_partitions_are_disjoint_complete_and_about_70_10_20():
    sets = {p: set(names) for p, names in NAMES.items()}
    assert all(not sets[a] & sets[b] for a, b in combinations(Partition, 2))
    total = sum(map(len, sets.values()))
    shares = {p: len(s) / total for p, s in sets.items()}
    assert abs(shares[Partition.TRAIN] - 0.7) < 0.03
    assert abs(shares[Partition.VALIDATION] - 0.1) < 0.02
    assert abs(shares[Partition.HELDOUT] - 0.2) < 0.03
    for partition, names in NAMES.items():
        assert all(partition_of(name) is partition for name in names)
        assert all(name[:2] in SYLLABLES and name[2:] in SYLLABLES for name in names)


class Recording(NameSource):
    """Remembers what it handed out."""

    def __init__(self, rng: random.Random, partition: Partition) -> None:
        super().__init__(rng, partition)
        self.given: set[str] = set()

    def __call__(self) -> str:
        self.given.add(name := super().__call__())
        return name


def test_no_name_is_a_word_of_an_instruction_or_a_command():
    words: set[str] = {"then", "done"}
    for family in FAMILIES.values():
        for i in range(40):
            names = Recording(rng("names", family.name, i), Partition.TRAIN)
            goal = family.make(rng("words", family.name, i), names)
            commands = [*family.right(goal, rng(i)), *family.wrong(goal, rng(i)), *family.runbook(goal, rng(i))]
            words |= set(re.findall(r"[a-z]+", " ".join([goal.text, *commands]))) - names.given
    assert {"make", "name", "line"} <= words
    assert not words & {n for names in NAMES.values() for n in names}


def test_a_source_never_repeats_a_name_or_an_extension():
    source = NameSource(random.Random(1), Partition.VALIDATION)
    names = [source() for _ in range(200)]
    assert len(set(names)) == 200
    assert len({source.extension() for _ in range(4)}) == 4


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_family_shape(family):
    assert len(set(family.wordings)) == 3
    assert 0.34 <= family.skill <= 0.62
    for i in range(30):
        goal = family.make(rng(family.name, i), NameSource(rng(family.name, i, "n"), Partition.TRAIN))
        assert 2 <= len(family.checks(goal)) <= 4
        assert len({c.id for c in family.checks(goal)}) == len(family.checks(goal))
        assert len(goal.text) <= 60
        assert "\n" not in goal.text
        assert set(goal.untouched) <= set(goal.files)
        assert len(family.runbook(goal, random.Random(0))) == len(family.right(goal, random.Random(0)))
        assert all("\n" not in c and len(c) <= 60 for c in family.right(goal, random.Random(0)))


@pytest.mark.parametrize("name", ["lookup", "modefile"])
def test_a_value_that_must_be_read_is_in_no_instruction_and_no_runbook(name):
    family = FAMILIES[name]
    for i in range(30):
        goal = family.make(rng(name, i), NameSource(rng(name, i, "n"), Partition.TRAIN))
        secret = goal.params["x"] if name == "lookup" else goal.params["mode"]
        book = " ".join(family.runbook(goal, random.Random(0)))
        assert " it" in book
        assert secret not in book
        assert secret not in goal.text
        assert any(secret in command for command in family.right(goal, random.Random(0)))


def test_held_pairs_are_a_sixth_of_all_and_touch_every_family():
    assert len(HELD_PAIRS) == 11
    assert all(len(pair) == 2 and pair <= set(FAMILIES) for pair in HELD_PAIRS)
    assert {f for pair in HELD_PAIRS for f in pair} == set(FAMILIES)


@given(st.integers(0, 10**9), st.integers(2, 4), st.booleans())
def test_chains(seed, size, held):
    chain = draw_chain(random.Random(seed), size, held_pair=held)
    assert len(set(chain)) == size
    assert holds_held_pair(chain) is held
    assert holds_held_pair(tuple(reversed(chain))) is held


def test_a_single_subgoal_is_no_combination():
    with pytest.raises(ValueError, match="no pair"):
        draw_chain(random.Random(0), 1, held_pair=True)


@given(st.integers(0, 10**9), st.integers(1, 4), st.sampled_from(Partition))
@settings(max_examples=60, deadline=None)
def test_task_shape(seed, size, partition):
    spec = draw_task(random.Random(seed), "t", size, partition)
    assert spec.size == size
    assert spec.stratum is list(Stratum)[size - 1]
    assert spec.max_turns == 2 * size + 2
    assert spec.family == f"{spec.goals[0].family}-{size}"
    assert spec.instruction.count(" then ") == size - 1
    assert 1 <= len(spec.bystanders) <= 2
    assert set(spec.bystanders) <= set(spec.untouched) <= set(spec.files)
    roles = [c.role for c in spec.manifest]
    assert roles.count(CheckRole.GATE) == 1
    assert 2 * size <= roles.count(CheckRole.SCENARIO) <= 4 * size
    assert len({c.id for c in spec.manifest}) == len(spec.manifest)
    assert {partition_of(n) for n in names_in(spec)} == {partition}
    assert not any(name.split(".")[0] in spec.instruction.split() for name in spec.bystanders)


@pytest.mark.parametrize("kind", PoolKind)
def test_pool_is_a_function_of_its_arguments(kind):
    once, again = generate_pool(kind, 60, 5), generate_pool(kind, 60, 5)
    assert [(s.id, s.instruction, s.files, s.test_script) for s in once] == [
        (s.id, s.instruction, s.files, s.test_script) for s in again
    ]
    other = generate_pool(kind, 60, 6)
    assert not {s.instruction for s in once} & {s.instruction for s in other}
    assert len({s.id for s in once}) == 60
    assert len({(s.instruction, tuple(s.files.items())) for s in once}) == 60


@pytest.mark.parametrize("kind", PoolKind)
def test_pool_obeys_its_kind(kind):
    partition = {
        PoolKind.TRAIN: Partition.TRAIN,
        PoolKind.VALIDATION: Partition.VALIDATION,
        PoolKind.HELDOUT_NAMES: Partition.HELDOUT,
        PoolKind.HELDOUT_COMBINATIONS: Partition.TRAIN,
    }[kind]
    for spec in generate_pool(kind, 200, 1):
        assert {partition_of(n) for n in names_in(spec)} == {partition}
        held = holds_held_pair(tuple(g.family for g in spec.goals))
        assert held is (kind is PoolKind.HELDOUT_COMBINATIONS)


def test_pool_is_balanced():
    specs = generate_pool(PoolKind.TRAIN, 480, 0)
    assert set(Counter(s.family for s in specs).values()) == {10}
    assert set(Counter(s.stratum for s in specs[:40]).values()) == {10}, "and so is a prefix"
    mixed = Counter(s.size for s in generate_pool(PoolKind.TRAIN, 100, 0, {1: 3, 4: 1}))
    assert mixed == {1: 75, 4: 25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense", 5, 0), "unknown"),
        (("train", 0, 0), "at least 1"),
        (("train", 5, 0, {5: 1}), "chain lengths"),
        (("train", 5, 0, {1: -1, 2: 2}), "shares"),
        (("train", 5, 0, {1: 0}), "shares"),
        (("train", 5, 0, {1: float("nan")}), "shares"),
        (("heldout-combinations", 5, 0, {1: 1, 2: 1}), "no combination"),
    ],
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate_pool(*arguments)


def test_seven_hundred_of_one_kind_exist_without_duplicates():
    specs = generate_pool(PoolKind.VALIDATION, 700, 3, {1: 1})
    assert len({s.instruction for s in specs}) > 600
    assert len({(s.instruction, tuple(s.files.items())) for s in specs}) == 700


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=40))
@settings(max_examples=40, deadline=None)
def test_quote_survives_bash(text):
    import subprocess

    shown = subprocess.run(
        ["/bin/bash", "-c", f"printf %s {quote(text)}"], capture_output=True, env={"LC_ALL": "C"}, check=True
    )
    assert shown.stdout == text.encode()
