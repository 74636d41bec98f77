"""The five fixed colours (Okabe-Ito) of Base, RSR-1, RPR-1, RSR-2, RPR-2; the CSS has the same as `--c0 … --c4`.

Round 1 is warm, round 2 is cool; the lighter of each pair is the self-rewrite.
"""

from __future__ import annotations

COLOURS = ("#cc79a7", "#e69f00", "#d55e00", "#56b4e9", "#0072b2")


def colour_index(stage_index: int) -> int:
    """Colour of the n-th stage of a cycle; longer loops repeat the two rounds' colours."""
    return stage_index if stage_index < len(COLOURS) else 1 + (stage_index - 1) % (len(COLOURS) - 1)
