"""What keeping the first finished attempts does to a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from stages.errors import EvaluationError
from stages.oversampling import Finished, Race, kept_indices, oversampling_report


def attempt(
    n: int, turns: int, *, passed: bool = False, counts: bool = True, family: str = "f", cut: bool = False
) -> Finished:
    return Finished(id=str(n), family=family, turns=turns, tokens=10 * turns, passed=passed, counts=counts, cut=cut)


def test_the_slowest_are_dropped_and_the_shift_is_exact() -> None:
    step = [
        attempt(0, 9, passed=True),
        attempt(1, 1),
        attempt(2, 2),
        attempt(3, 9, family="g"),
        attempt(4, 3, counts=False),
    ]
    found = oversampling_report([step], batch=3)
    assert (found.started, found.masked, found.kept, found.dropped) == (5, 1, 3, ("3",))
    shifts = {s.name: s for s in found.shifts}
    assert shifts["turns"].all_mean == 21 / 4
    assert shifts["turns"].shift == 12 / 3 - 21 / 4
    assert shifts["success"].shift == pytest.approx(1 / 3 - 1 / 4)
    assert shifts["family f"].shift == pytest.approx(1 - 3 / 4)
    assert shifts["family g"].shift == pytest.approx(-1 / 4)
    assert shifts["turns"].interval is None  # one step says nothing about its spread


def test_an_interval_over_steps() -> None:
    rng = np.random.default_rng(0)
    steps = [[attempt(32 * s + i, int(rng.integers(1, 20))) for i in range(32)] for s in range(12)]
    turns = oversampling_report(steps, batch=24).shifts[0]
    assert turns.interval is not None
    assert turns.interval.low < turns.shift < turns.interval.high < 0.0


@given(some.lists(some.tuples(some.integers(1, 9), some.booleans()), min_size=1, max_size=20), some.integers(1, 25))
def test_kept_are_the_first_to_finish(rows: list[tuple[int, bool]], batch: int) -> None:
    turns, counts = [t for t, _ in rows], [c for _, c in rows]
    kept = kept_indices(turns, counts, batch)
    late = [i for i, c in enumerate(counts) if c and i not in kept]
    assert len(kept) == min(batch, sum(counts))
    assert all(counts[i] for i in kept)
    assert all((turns[i], i) < (turns[j], j) for i in kept for j in late)


def test_cut_attempts_are_dropped_and_tell_no_shift() -> None:
    completed = [attempt(0, 1), attempt(1, 2), attempt(2, 6)]
    cut = [attempt(3, 1), attempt(4, 1), attempt(5, 4, counts=False, cut=True), attempt(6, 1, counts=False)]
    both = oversampling_report([completed, cut], batch=2)
    assert (both.steps, both.completed, both.kept, both.masked, both.dropped) == (2, 1, 4, 1, ("2", "5"))
    assert both.shifts == oversampling_report([completed], batch=2).shifts
    alone = oversampling_report([cut], batch=2)
    assert (alone.completed, alone.dropped, alone.shifts) == (0, ("5",), ())


@given(some.lists(some.tuples(some.integers(1, 6), some.booleans()), min_size=1, max_size=14), some.integers(1, 8))
def test_a_race_gives_up_only_what_cannot_be_kept(rows: list[tuple[int, bool]], batch: int) -> None:
    """Turn by turn: whoever is lost at its present number of turns is not among those that a full run keeps."""
    kept = kept_indices([t for t, _ in rows], [c for _, c in rows], batch)
    race = Race(batch)
    for now in range(1, 8):
        lost = {i for i, (turns, _) in enumerate(rows) if turns >= now and race.lost(now - 1, i)}
        assert not lost & set(kept)
        assert all(race.may_be_lost(now - 1, i) for i in lost)
        for i, (turns, counts) in enumerate(rows):
            if turns == now:
                race.ended(turns, i)
                if counts:
                    race.finished(turns, i)
    assert all(race.lost(turns, i) for i, (turns, counts) in enumerate(rows) if counts and i not in kept)


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(EvaluationError):
        oversampling_report([[attempt(0, 1, counts=False)]], batch=1)
    with pytest.raises(ValueError, match="batch"):
        oversampling_report([[attempt(0, 1)]], batch=0)
