"""Tables as Markdown, CSV and JSON, and how their numbers look. A missing value is a dash or an empty cell, never 0."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from stages.errors import ConfigError

MISSING = "—"


class Format(StrEnum):
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


def rate(passed: int, of: int) -> str:
    """`121/445 = 27.2 %`; a dash when there is nothing to divide by."""
    return f"{passed}/{of} = {100 * passed / of:.1f} %" if of else f"{passed}/{of} = {MISSING}"


def points(value: float | None) -> str:
    """A difference of rates in percentage points: `+6.1`."""
    return MISSING if value is None else f"{100 * value:+.1f}"


def p_value(value: float | None) -> str:
    if value is None:
        return MISSING
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A pipe table of the rows, whose keys are the columns of the first one."""
    if not rows:
        return "(no rows)\n"
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_cell(row[c]) for c in columns] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """RFC 4180 with a header. A text that a spreadsheet would run as a formula gets a leading quote."""
    if not rows:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: safe_cell(v) for k, v in row.items()})
    return out.getvalue()


def safe_cell(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula, with a leading quote; anything else as it is."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def deliver(text: str, output: Path | None) -> None:
    """Writes to a file and says so, or to standard output. Raises ConfigError when the file cannot be written."""
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    print(f"Written to {output}.", file=sys.stderr)
