"""Contrasts of experiments: their algebra, their intervals, and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from stages.effects import ContrastKind, against_first, difference, effect, effects, factorial

NUMBERS = some.floats(-1, 1, allow_nan=False)


def cube(k: int) -> dict[str, tuple[bool, ...]]:
    return {"".join("hl"[not x] for x in at): at for at in itertools.product((False, True), repeat=k)}


@given(some.integers(1, 3), some.data())
@settings(max_examples=20, deadline=None)
def test_a_factorial_recovers_the_effects_that_made_its_arms(k: int, data: some.DataObject) -> None:
    """y = mean + Σ effect/2 · ±1 over all subsets of factors: every contrast gives back its own effect and no other."""
    names = [f"f{i}" for i in range(k)]
    arms = cube(k)
    made = {c: data.draw(NUMBERS) for size in range(1, k + 1) for c in itertools.combinations(range(k), size)}
    runs = {
        (arm, 0): 0.3 + sum(e / 2 * math.prod(1 if at[i] else -1 for i in c) for c, e in made.items())
        for arm, at in arms.items()
    }
    found = factorial(names, arms)
    assert [c.name for c in found] == [" × ".join(names[i] for i in c) for c in made]
    for contrast, (chosen, true) in zip(found, made.items(), strict=True):
        assert contrast.kind is (ContrastKind.MAIN if len(chosen) == 1 else ContrastKind.INTERACTION)
        assert effect(contrast, runs, [0]).mean == pytest.approx(true, abs=1e-12)
        assert sum(w for w in contrast.weights.values() if w > 0) == pytest.approx(1.0)
    for a, b in itertools.combinations(found, 2):  # orthogonal: no effect leaks into another
        assert sum(a.weights[x] * b.weights[x] for x in arms) == pytest.approx(0.0, abs=1e-12)


@given(some.lists(some.tuples(NUMBERS, NUMBERS), min_size=2, max_size=6), NUMBERS)
@settings(max_examples=40, deadline=None)
def test_what_all_arms_of_a_seed_share_cancels(pairs: list[tuple[float, float]], shift: float) -> None:
    contrast = difference("b − a", ["b"], ["a"])
    seeds = list(range(len(pairs)))
    runs = {(arm, s): pairs[s][i] for s in seeds for i, arm in enumerate("ab")}
    moved = {(arm, s): v + shift * (s + 1) for (arm, s), v in runs.items()}
    a, b = effect(contrast, runs, seeds), effect(contrast, moved, seeds)
    assert a.mean == pytest.approx(b.mean, abs=1e-9)
    back = effect(difference("a − b", ["a"], ["b"]), runs, seeds)
    assert back.mean == pytest.approx(-(a.mean or 0.0), abs=1e-12)
    if a.over_seeds is not None and back.over_seeds is not None:
        assert a.over_seeds.low == pytest.approx(-back.over_seeds.high, abs=1e-9)
        assert a.over_seeds.low <= (a.mean or 0.0) <= a.over_seeds.high


def test_two_seeds_give_the_t_interval_of_one_degree_of_freedom() -> None:
    runs = {("a", 0): 0.5, ("a", 1): 0.5, ("b", 0): 0.6, ("b", 1): 0.62}
    found = effect(difference("b − a", ["b"], ["a"]), runs, [0, 1])
    assert found.mean == pytest.approx(0.11)
    assert found.over_seeds is not None
    assert found.over_seeds.high - 0.11 == pytest.approx(12.7062 * 0.01, rel=1e-4)  # t_.975 with 1 degree · s/√2
    assert found.p_value == pytest.approx(2 * math.atan(1 / 11) / math.pi, rel=1e-9)  # Cauchy


def test_one_seed_has_no_interval_and_no_p_value() -> None:
    found = effect(difference("b − a", ["b"], ["a"]), {("a", 3): 0.5, ("b", 3): 0.6}, [3])
    assert found.mean == pytest.approx(0.1)
    assert (found.over_seeds, found.p_value, found.seeds_needed) == (None, None, None)


def test_a_seed_that_lacks_an_arm_is_left_out_and_named() -> None:
    runs = {("a", 0): 0.5, ("b", 0): 0.6, ("a", 1): 0.5, ("a", 2): 0.1, ("b", 2): math.nan}
    found = effect(difference("b − a", ["b"], ["a"]), runs, [0, 1, 2])
    assert dict(found.by_seed) == {0: pytest.approx(0.1)}
    assert found.missing == (1, 2)
    assert effect(difference("b − a", ["b"], ["a"]), {}, [0]).mean is None


def test_tasks_are_paired_over_arms_and_seeds() -> None:
    """The difference is the same on every task, however different the tasks: no variance, so no interval."""
    tasks = {(arm, s): {"x": 0.0 + d, "y": 0.5 + d} for s in (0, 1) for arm, d in (("a", 0.0), ("b", 0.25))}
    runs = {cell: sum(r.values()) / 2 for cell, r in tasks.items()}
    contrast = difference("b − a", ["b"], ["a"])
    assert effect(contrast, runs, [0, 1], tasks=tasks).over_tasks is None
    tasks["b", 1] = {"x": 0.0, "y": 1.0, "z": 1.0}  # z is nowhere else: left out
    found = effect(contrast, runs, [0, 1], tasks=tasks, resamples=500).over_tasks
    assert found is not None
    assert 0.0 < found.low < found.high <= 0.5


def test_two_seeds_that_agree_by_chance_show_nothing() -> None:
    """Equal effects have no deviation over seeds, yet each is known only as well as its tasks tell."""
    rng = np.random.default_rng(1)
    tasks = {(arm, s): {str(t): float(x) for t, x in enumerate(rng.random(60) < 0.8)} for arm in "ab" for s in (0, 1)}
    runs = {cell: sum(r.values()) / 60 for cell, r in tasks.items()}
    runs["b", 0], runs["b", 1] = runs["a", 0] + 0.0361, runs["a", 1] + 0.0361
    bare = effect(difference("b − a", ["b"], ["a"]), runs, [0, 1])
    assert (bare.over_seeds, bare.p_value) == (None, None)  # nothing is known of how far they scatter
    found = effect(difference("b − a", ["b"], ["a"]), runs, [0, 1], tasks=tasks, resamples=200)
    noise = math.sqrt(
        sum(np.var([tasks["b", s][t] - tasks["a", s][t] for t in tasks["a", s]], ddof=1) for s in (0, 1)) / 2 / 60
    )
    assert found.over_seeds is not None
    assert found.over_seeds.high - 0.0361 == pytest.approx(12.7062 * noise / math.sqrt(2), rel=1e-4)
    assert found.over_seeds.low < 0 < found.over_seeds.high


def test_holm_is_over_the_contrasts_of_one_outcome() -> None:
    arms = ["a", "b", "c"]
    runs = {(arm, s): i + 0.01 * ((s * (i + 1)) % 3) for i, arm in enumerate(arms) for s in range(4)}
    found = effects(against_first(arms), runs, range(4))
    assert [e.contrast.name for e in found] == ["b − a", "c − a"]
    for e in found:
        assert e.p_holm is not None
        assert e.p_value is not None
        assert e.p_value <= e.p_holm <= 1.0


def test_contrasts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="both sides"):
        difference("x", ["a"], [])
    with pytest.raises(ValueError, match="both sides"):
        difference("x", ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="exactly once"):
        factorial(["f", "g"], {"a": (False, False), "b": (True, True), "c": (True, False), "d": (True, False)})
