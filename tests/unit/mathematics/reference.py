"""Slow, independent statements of the specification, in exact rational arithmetic or plain loops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[3].parent / "shared"
OWN = Path(__file__).with_name("cases")


def shared_case(name: str) -> Any:
    """A reference case that lies beside the checkout; the test skips where it is absent."""
    path = SHARED / "cases" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return json.loads(path.read_text())


def tb_gae(
    values: Sequence[float],
    rewards: Sequence[float],
    turns: Sequence[int],
    gamma: float,
    lam: float,
    next_value: float = 0.0,
    next_advantage: float = 0.0,
    next_turn: int | None = None,
) -> tuple[list[Fraction], list[Fraction]]:
    """A_j and G_j straight from spec §3.2 and §3.5, node by node. G starts from `next_value`."""
    v, a, g = Fraction(next_value), Fraction(next_advantage), Fraction(next_value)
    advantages, returns = [], []
    for j in reversed(range(len(values))):
        same = (turns[j + 1] if j + 1 < len(turns) else next_turn) == turns[j]
        big_gamma = Fraction(1) if same else Fraction(gamma)
        big_lambda = Fraction(1) if same else Fraction(lam)
        delta = Fraction(rewards[j]) + big_gamma * v - Fraction(values[j])
        a = delta + big_gamma * big_lambda * a
        g = Fraction(rewards[j]) + big_gamma * g
        v = Fraction(values[j])
        advantages.append(a)
        returns.append(g)
    return advantages[::-1], returns[::-1]
