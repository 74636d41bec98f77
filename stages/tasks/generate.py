"""The embedded pool and suites: drawn from a seed, disjoint by construction, written in Harbor layout.

| kind | names | chains | use |
|---|---|---|---|
| `train` | train | without held pairs | training pool |
| `validation` | validation | without held pairs | protected: selects steps and distillations |
| `heldout-names` | heldout | without held pairs | reported suite |
| `heldout-combinations` | train | with a held pair, k ≥ 2 | reported suite |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from stages.errors import ConfigError
from stages.seeds import rng
from stages.tasks.chains import STRATA, TaskSpec, draw_task
from stages.tasks.families import FAMILIES
from stages.tasks.names import Partition


class PoolKind(StrEnum):
    """What a generated pool is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT_NAMES = "heldout-names"
    HELDOUT_COMBINATIONS = "heldout-combinations"


_PARTITION = {
    PoolKind.TRAIN: Partition.TRAIN,
    PoolKind.VALIDATION: Partition.VALIDATION,
    PoolKind.HELDOUT_NAMES: Partition.HELDOUT,
    PoolKind.HELDOUT_COMBINATIONS: Partition.TRAIN,
}

_DRAWS_PER_TASK = 200  # before a pool is called exhausted


def default_mix(kind: PoolKind) -> dict[int, float]:
    """Equal shares of every number of subgoals; unseen combinations start at two."""
    return {k: 1.0 for k in STRATA if k > 1 or kind is not PoolKind.HELDOUT_COMBINATIONS}


def generate_pool(kind: PoolKind | str, n: int, seed: int, mix: Mapping[int, float] | None = None) -> list[TaskSpec]:
    """`n` tasks, a pure function of the arguments; no two share instruction and files.

    `mix`: relative shares of chain lengths 1…4. Leading families alternate so that every family-k has about the same
    number of tasks, and any prefix of the pool has about the same mixture. Raises ConfigError on an impossible request.
    """
    try:
        kind = PoolKind(kind)
    except ValueError:
        raise ConfigError(f"pool kind {kind!r} is unknown: use one of {', '.join(PoolKind)}") from None
    shares = dict(default_mix(kind) if mix is None else mix)
    held_pair = kind is PoolKind.HELDOUT_COMBINATIONS
    _check_request(kind, n, shares, held_pair)

    order = rng(kind, seed, "order")
    leads = {k: order.sample(list(FAMILIES), len(FAMILIES)) for k in shares}
    drawn: dict[int, int] = dict.fromkeys(shares, 0)
    seen: set[object] = set()
    specs: list[TaskSpec] = []
    for index, size in enumerate(_sizes(shares, n)):
        lead = leads[size][drawn[size] % len(FAMILIES)]
        drawn[size] += 1
        for attempt in range(_DRAWS_PER_TASK):
            spec = draw_task(
                rng(kind, seed, index, attempt),
                f"{kind}-{index:04d}-{lead}-{size}",
                size,
                _PARTITION[kind],
                lead=lead,
                held_pair=held_pair,
            )
            key = (spec.instruction, tuple(spec.files.items()))
            if key not in seen:
                break
        else:
            raise ConfigError(
                f"pool {kind} has no further {lead}-{size} task after {index}: ask for fewer than {n} tasks"
            )
        seen.add(key)
        specs.append(spec)
    return specs


def _check_request(kind: PoolKind, n: int, shares: Mapping[int, float], held_pair: bool) -> None:
    if n < 1:
        raise ConfigError(f"pool {kind}: {n} tasks asked for, at least 1 is needed")
    bad = sorted(set(shares) - set(STRATA))
    if bad:
        raise ConfigError(f"pool {kind}: mix names chain lengths {bad}, possible are 1 to {max(STRATA)}")
    if any(not 0 <= share < float("inf") for share in shares.values()) or not any(shares.values()):
        raise ConfigError(f"pool {kind}: shares of the mix must be finite, not negative, and not all 0")
    if held_pair and shares.get(1):
        raise ConfigError(f"pool {kind}: a task of one subgoal is no combination: leave 1 out of the mix")


def _sizes(shares: Mapping[int, float], n: int) -> list[int]:
    """Chain lengths of n tasks: each prefix is as close to the shares as whole tasks allow."""
    total = sum(shares.values())
    given = dict.fromkeys(shares, 0)
    out: list[int] = []
    for i in range(1, n + 1):
        size = max(sorted(shares), key=lambda k: i * shares[k] / total - given[k])
        given[size] += 1
        out.append(size)
    return out
