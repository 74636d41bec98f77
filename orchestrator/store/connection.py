"""Engines: one place that knows how we talk to Postgres, and what may stand in its text and JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from stages.errors import ConfigError, StoreError

_REFUSED = re.compile("[\x00\ud800-\udfff]")


def connect(url: str, *, pool_size: int = 5, max_overflow: int = 10) -> Engine:
    """Engine on psycopg 3 for `postgresql://…` (or `postgres://…`); opens no connection yet.

    Raises:
        ConfigError: no Postgres URL.
        StoreError: by what connects, when the database is not encoded in UTF-8.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(
            f"The database URL cannot be read: {error}. Expected postgresql://user@host/database."
        ) from error
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "postgresql+psycopg":
        raise ConfigError(f"The database URL names {parsed.drivername}; only postgresql:// works.")
    engine = create_engine(
        parsed,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_pre_ping=True,
        json_serializer=dumps,
        connect_args={"connect_timeout": 10, "application_name": "rsi"},
    )
    event.listen(engine, "connect", _require_utf8, insert=True)  # before SQLAlchemy reads its first text
    return engine


def _require_utf8(connection: psycopg.Connection, _: object) -> None:
    info = connection.info
    if (encoding := info.parameter_status("server_encoding")) != "UTF8":
        raise StoreError(
            f"The database {info.dbname} on {info.host or 'this machine'} is encoded in {encoding}, and texts of models need "
            f"UTF-8. Create it anew: CREATE DATABASE \"{info.dbname}\" ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE "
            "template0; (or another name, in DATABASE_URL)."
        )


def clean_text(text: str) -> str:
    """Text as Postgres can hold it: NUL becomes ␀, a lone surrogate �. The artifact store keeps the original."""
    return _REFUSED.sub(lambda found: "␀" if found[0] == "\x00" else "�", text)


def clean_json(value: Any) -> Any:
    """JSON value that Postgres can hold. Not-a-number and infinities become words, so that they are seen and not lost."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bool | None):
        return value
    if isinstance(value, np.generic):
        return clean_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # "nan", "inf", "-inf"
    if isinstance(value, int):
        return value
    if isinstance(value, Path):
        return clean_text(str(value))
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [clean_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def dumps(value: Any) -> str:
    """The JSON text that goes into a JSONB column."""
    return json.dumps(clean_json(value), allow_nan=False, ensure_ascii=False)


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces. Digests are taken of it."""
    return json.dumps(clean_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
