"""The source reports' figures as reference data (spec §8): loaded from `reference_rows.toml`, typo corrected and noted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

FOUR_SUITES = ("TB-2.1", "TB-3.0", "TB-4.0", "TB-Hard")


class Zone(StrEnum):
    """The two zones of a comparison table (spec §8), as the report that printed the row had them.

    Beside one's own evaluations every row is reference only, unless the harness is the same as well.
    """

    SAME_HARNESS = "same_harness"  # measured under the report's own harness
    REFERENCE = "reference"  # other harness or unknown: for orientation only


class Origin(StrEnum):
    PRINTED = "printed"
    DERIVED = "derived"  # computed from other printed figures
    CORRECTED = "corrected"  # a misprint that other figures rule out; the note says so


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """One printed figure."""

    report: str  # "Terminal-RSI" or "T1"
    system: str  # who was measured
    suite: str
    checkpoint: str  # "" for a finished model
    value: float  # as printed
    metric: str  # success_pct, process_reward, process_reward_pct, strict_completions or turns
    passed: int | None  # numerator and denominator that fit the printed value, if the source or arithmetic gives them
    of: int | None
    stratum: str
    zone: Zone
    origin: Origin
    note: str


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files("stages").joinpath("reference_rows.toml").read_text(encoding="utf-8"))


def reference_rows() -> tuple[ReferenceRow, ...]:
    """Every row, in the order of the file."""
    document = _document()
    out = []
    for row in document["row"]:
        for cell in row["values"]:
            notes = [n for n in (row.get("note"), cell.get("note")) if n]
            out.append(
                ReferenceRow(
                    report=row["report"],
                    system=row["system"],
                    suite=row["suite"],
                    checkpoint=cell.get("checkpoint", ""),
                    value=float(cell["value"]),
                    metric=row.get("metric") or document["suites"].get(row["suite"], {}).get("metric", "success_pct"),
                    passed=cell.get("passed"),
                    of=cell.get("of"),
                    stratum=row.get("stratum", ""),
                    zone=Zone(row.get("zone", "same_harness")),
                    origin=Origin(cell.get("origin", "printed")),
                    note="; ".join(notes),
                )
            )
    return tuple(out)


def reference_facts() -> Mapping[str, Any]:
    """EV curves, audit figures and other single facts of the reports."""
    return dict(_document()["facts"])


def four_suite_mean(rates_pct: Mapping[str, float]) -> float | None:
    """Equal weights over the four suites (spec §8). None unless all four are there: a mean of three is another figure."""
    if any(suite not in rates_pct for suite in FOUR_SUITES):
        return None
    return sum(rates_pct[suite] for suite in FOUR_SUITES) / len(FOUR_SUITES)
