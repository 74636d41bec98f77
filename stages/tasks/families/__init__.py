"""The embedded pool's twelve task families."""

from __future__ import annotations

from stages.tasks.families.base import IT, Check, Draw, Family, Subgoal
from stages.tasks.families.extract import Column, Copy, Count, First
from stages.tasks.families.groups import Move, Prune
from stages.tasks.families.modes import MODES, Chmod, Lookup, ModeFile
from stages.tasks.families.text import Append, Create, SetKey

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Create(),
        Append(),
        Move(),
        Count(),
        Chmod(),
        SetKey(),
        Column(),
        Lookup(),
        Copy(),
        Prune(),
        First(),
        ModeFile(),
    )
}
"""Every family by name, in a fixed order."""

__all__ = ["FAMILIES", "IT", "MODES", "Check", "Draw", "Family", "Subgoal"]
