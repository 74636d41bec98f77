"""Folders that a configuration names, and which of them people may name from afar: those below the installation's roots.

A form and the API run with the console's rights. Without roots anybody who may launch could have any folder of the
machine read as a pool or a model. The command line knows no roots: who uses it can read the machine anyway.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.inputs import EMBEDDED
from orchestrator.settings import Settings
from stages.config import CycleConfig


def named_folders(config: CycleConfig) -> list[tuple[str, Path]]:
    """(dotted path of the setting, folder) of everything that is read from a folder."""
    found: list[tuple[str, Path | str | None]] = [
        ("model", config.model),
        ("pool", config.pool),
        ("validation_suite", config.validation_suite),
        *(("reported_suites", name) for name in config.reported_suites if not name.startswith(EMBEDDED)),
    ]
    for i, rsr in enumerate(config.rsr):
        found += [(f"rsr.{i}.rewrite.planner", rsr.rewrite.planner), (f"rsr.{i}.review.model", rsr.review.model)]
    return [(name, Path(value)) for name, value in found if value not in (None, "", "embedded", "actor")]


def outside(folder: Path, settings: Settings) -> str:
    """Why a folder may not be named from afar; empty when it may. Links are followed first."""
    real = folder.expanduser().resolve()
    if any(real.is_relative_to(root) for root in settings.roots):
        return ""
    roots = ", ".join(map(str, settings.roots))
    return (
        f"{folder} lies outside of the folders that may be named here ({roots}). Name one below them, add its folder to "
        "RSI_FOLDER_ROOTS, or launch on the machine itself with `rsi cycle launch`"
    )
