"""Seeds and ids derive from what a thing is, so that a resumed run repeats them (design: invariant 6)."""

from __future__ import annotations

import hashlib
import random


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the textual form of `parts`."""
    return int.from_bytes(_digest(parts)[:8], "big") >> 1


def derive_id(*parts: object) -> str:
    """A 24-hex-digit id from the textual form of `parts`."""
    return _digest(parts)[:12].hex()


def rng(*parts: object) -> random.Random:
    """An independent generator for one decision."""
    return random.Random(derive_seed(*parts))


def _digest(parts: tuple[object, ...]) -> bytes:
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
