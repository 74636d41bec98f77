"""Which tasks a phase works on: a seeded draw, weighted by stratum."""

from __future__ import annotations

from collections.abc import Sequence

from stages.config import TaskDraw
from stages.domain import Task
from stages.errors import ConfigError
from stages.seeds import rng


def draw_tasks(pool: Sequence[Task], draw: TaskDraw, *, n: int | None = None, seed: tuple[object, ...]) -> list[Task]:
    """`n` (else `draw.n_tasks`, else all) tasks, without repetition while the pool lasts.

    With `stratum_weights`, strata are first given their share of `n` by largest remainder, then tasks are drawn within
    each. A stratum that is smaller than its share is used repeatedly. Raises ConfigError when nothing can be drawn.
    """
    wanted = n or draw.n_tasks or len(pool)
    random = rng(*seed, "draw")
    if draw.stratum_weights is None:
        groups, shares = [list(pool)], [wanted]
    else:
        weights = {s: w for s, w in draw.stratum_weights.items() if w > 0}
        groups = [[t for t in pool if t.stratum == s] for s in weights]
        weights = {s: w for (s, w), g in zip(weights.items(), groups, strict=True) if g}
        groups = [g for g in groups if g]
        shares = _largest_remainder(wanted, list(weights.values()))
    if not any(groups):
        raise ConfigError(
            f"the pool ({len(pool)} tasks) has no task in the strata {draw.stratum_weights}; change the draw or the pool"
        )
    chosen: list[Task] = []
    for group, share in zip(groups, shares, strict=True):
        whole, part = divmod(share, len(group))
        for _ in range(whole):
            chosen += random.sample(group, len(group))
        chosen += random.sample(group, part)
    random.shuffle(chosen)
    return chosen


def _largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    exact = [total * w / sum(weights) for w in weights]
    shares = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares
