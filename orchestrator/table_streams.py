"""Tables that are too long to be held: batches of rows to CSV, JSON or Parquet, piece by piece.

A column's type decides how it is written: words, numbers, times and truth values as such, anything else as JSON.
"""

from __future__ import annotations

import csv as _csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from orchestrator.exports import safe_cell

if TYPE_CHECKING:
    import pyarrow as pa

Columns = dict[str, Any]  # name -> type of its values, perhaps `| None`
Rows = Iterable[Sequence[Mapping[str, Any]]]  # batches


def csv(columns: Columns, batches: Rows) -> Iterator[str]:
    """RFC 4180 with a header. A text that a spreadsheet would run as a formula gets a leading quote."""
    out = io.StringIO()
    writer = _csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for rows in batches:
        for row in rows:
            writer.writerow([safe_cell(_plain(row.get(name))) for name in columns])
        yield out.getvalue()
        out.seek(0)
        out.truncate()


def json_array(columns: Columns, batches: Rows) -> Iterator[str]:
    """One array of objects, a line each."""
    lead = "["
    for rows in batches:
        lines = [json.dumps({n: row.get(n) for n in columns}, ensure_ascii=False, default=_word) for row in rows]
        if lines:
            yield lead + "\n" + ",\n".join(lines)
            lead = ","
    yield "[]\n" if lead == "[" else "\n]\n"


def parquet(columns: Columns, batches: Rows) -> Iterator[bytes]:
    """One row group per batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {name: _arrow(kind) for name, kind in columns.items()}
    schema = pa.schema([pa.field(name, kind or pa.string()) for name, kind in types.items()])
    sink = _Pieces()
    with pq.ParquetWriter(sink, schema) as writer:
        for rows in batches:
            values = {
                name: [_typed(row.get(name), kind is None or pa.types.is_string(kind)) for row in rows]
                for name, kind in types.items()
            }
            if rows:
                writer.write_table(pa.table(values, schema=schema))
            yield sink.taken()
    yield sink.taken()


class _Pieces(io.RawIOBase):
    """A file that is read while it is written."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._held += data
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def taken(self) -> bytes:
        piece = bytes(self._held)
        self._held.clear()
        return piece


def _arrow(kind: Any) -> pa.DataType | None:
    """None: its values are written as JSON."""
    import pyarrow as pa

    if get_origin(kind) in (Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        return _arrow(parts[0]) if len(parts) == 1 else None
    simple = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), datetime: pa.timestamp("us", tz="UTC")}
    if kind in simple:
        return simple[kind]
    return pa.string() if isinstance(kind, type) and issubclass(kind, str) else None


def _typed(value: Any, as_text: bool) -> Any:
    return _plain(value) if as_text and value is not None else value


def _plain(value: Any) -> Any:
    """A cell: words and numbers as they are, nothing as nothing, anything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False, default=_word)


def _word(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if not isinstance(value, tuple) else list(value)
    return str(value)
