"""The embedded pool and suites on disk: generated once per home folder, found again by what they are."""

from __future__ import annotations

from pathlib import Path

from stages.errors import TaskError
from stages.tasks.generate import PoolKind, generate_pool
from stages.tasks.harbor import Suite, load_suite
from stages.tasks.write import write_pool

SEEDS = {  # fixed: the splits are the same for everybody, and only reported suites may grow
    PoolKind.TRAIN: 101,
    PoolKind.VALIDATION: 202,
    PoolKind.HELDOUT_NAMES: 303,
    PoolKind.HELDOUT_COMBINATIONS: 404,
}


def embedded_suite(kind: PoolKind | str, n: int, folder: Path, *, seed: int | None = None) -> Suite:
    """The embedded suite of this kind and size below `folder`, generated when it is not there."""
    kind = PoolKind(kind)
    seed = SEEDS[kind] if seed is None else seed
    path = folder / f"{kind.value}-{n}-{seed}"
    if not (path / "suite.toml").exists():
        try:
            write_pool(generate_pool(kind, n, seed), path, name=f"embedded:{kind.value}", kind=kind.value, seed=seed)
        except TaskError:
            if not (path / "suite.toml").exists():  # otherwise another process was quicker with the same tasks
                raise
    return load_suite(path)
