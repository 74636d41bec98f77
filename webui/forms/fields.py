"""One field of a form over a configuration: how a value is written, read back, and which control shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """`path` is also the name of the control and the dotted key that `--set` takes."""

    path: str
    label: str
    help: str
    source: str  # where the default comes from: "spec §2.3" or "ours"
    options: Sequence[str]  # empty: typed in
    numeric: bool
    optional: bool  # empty means "not set"
    default: str  # the specification's or ours; what a recipe changes stands in `value`
    value: str
    changed: bool = False  # differs from the source that the form started from
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Fields that stand together; folded unless something in it is wrong or changed."""

    key: str
    title: str
    note: str
    fields: Sequence[Field]
    open: bool
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a configuration's field holds."""

    options: tuple[str, ...] = ()
    numeric: bool = False
    optional: bool = False
    listed: bool = False
    table: bool = False


def kind_of(model: type[BaseModel], path: str) -> Kind:
    """Of a dotted path below a model, e.g. `explore.draw.n_tasks`."""
    name, _, rest = path.partition(".")
    annotation: Any = next(
        f.annotation for n, f in model.model_fields.items() if name in (n, f.alias)
    )  # a path that no model has is a mistake in the table of fields
    if rest:
        return kind_of(annotation, rest)
    return _kind(annotation)


def _kind(annotation: Any) -> Kind:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        members = [a for a in get_args(annotation) if a is not type(None)]
        inner = [_kind(a) for a in members]
        single = inner[0] if len(inner) == 1 else Kind()  # e.g. a folder or the word "embedded": typed in
        return Kind(
            options=single.options,
            numeric=single.numeric,
            optional=len(members) < len(get_args(annotation)),
            listed=single.listed,
            table=single.table,
        )
    if origin is Literal:
        return Kind(options=tuple(map(str, get_args(annotation))))
    if origin is tuple:
        return Kind(listed=True)
    if origin is dict:
        return Kind(table=True)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Kind(options=tuple(str(m.value) for m in annotation))
    if annotation is bool:
        return Kind(options=("true", "false"))
    return Kind(numeric=annotation in (int, float))


def written(value: Any) -> str:
    """A configuration's value as the text of a control; nothing is the empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {written(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value))
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e-0", "e-") if "e" in text else text.removesuffix(".0")
    return str(value)


def read(kind: Kind, text: str) -> Any:
    """What pydantic is given for a control's text. Raises ValueError that says what was expected."""
    text = text.strip()
    if not text:
        return [] if kind.listed else None if kind.optional or kind.table else ""
    if kind.table:
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        if not all(equals and k.strip() for k, equals, _ in pairs):
            raise ValueError("Write words with their numbers, like: easy = 2, medium = 1")
        return {k.strip(): v.strip() for k, _, v in pairs}
    if kind.listed:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text
