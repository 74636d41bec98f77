"""Two configurations, only where they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key. None stands for a setting that is absent or explicitly nothing."""

    key: str  # "rsr.0.explore.attempts_per_task"
    before: Any
    after: Any


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> single value. A list of tables has its index in the key; a list of values is one value."""
    return dict(_walk(values, ""))


def difference(
    before: Mapping[str, Any], after: Mapping[str, Any], *, leave_out: Sequence[str] = ()
) -> list[Difference]:
    """Keys whose values differ, in the order of `after`, then those that only `before` has."""
    old, new = flat(before), flat(after)
    keys = [*new, *(k for k in old if k not in new)]
    return [
        Difference(key=k, before=old.get(k), after=new.get(k))
        for k in keys
        if k not in leave_out and old.get(k, ABSENT) != new.get(k, ABSENT)
    ]


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _walk(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{key}.{index}")
    else:
        yield key, list(value) if isinstance(value, tuple) else value
