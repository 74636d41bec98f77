"""Estimates and actuals in words, for the launch form and a cycle's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.usage import Usage
from webui import formats
from webui.contexts import Cost


def cost_rows(expected: Mapping[str, Any], used: Usage | None, wall_s: float | None = None) -> list[Cost]:
    """`expected`: as in `cycle.estimate`, where older cycles lack some keys. `used`: None before anything ran."""

    def row(label: str, said: str, done: str) -> Cost:
        return Cost(label=label, expected=said, actual=done if used else "")

    return [
        row("Wall time", _range(expected.get("wall_s"), formats.duration), formats.duration(wall_s)),
        row("Attempts", formats.number(expected.get("attempts")), formats.number(used.attempts if used else None)),
        row("Updates", _most(expected.get("updates")), formats.number(used.updates if used else None)),
        row("Sampled tokens", _range(expected.get("tokens"), _tokens), formats.tokens(used.tokens if used else None)),
        row(
            "Sandbox time",
            _range(expected.get("sandbox_s"), formats.duration),
            formats.duration(used.sandbox_s if used else None),
        ),
        row(
            "Sampler time",
            _range(expected.get("sampler_s"), formats.duration),
            formats.duration(used.sampler_s if used else None),
        ),
    ]


def costs_from(expected: Mapping[str, Any]) -> str:
    """Where the ranges come from."""
    plan = "Attempts and updates are counted from the plan; wall time is for the embedded model on two cores."
    like = expected.get("like")
    if not like:
        return f"{plan} Tokens, sandbox and sampler time need a measured cycle of this recipe: there was none."
    return f"{plan} Tokens, sandbox and sampler time: the middle half of the attempts of cycle {like}, times attempts."


def _most(value: int | None) -> str:
    return formats.MISSING if value is None else f"≤ {formats.number(value)}"


def _tokens(value: float) -> str:
    return formats.tokens(round(value))


def _range(value: Sequence[float] | None, write: Any) -> str:
    if not value:
        return formats.MISSING
    low, high = write(value[0]), write(value[1])
    return low if low == high else f"{low} – {high}"
