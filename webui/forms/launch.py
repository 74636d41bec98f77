"""The launch form: from a recipe or another cycle to fields, and from what was sent to a configuration or to errors. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.recipes import override, parse_overrides
from stages.config import CycleConfig, RPRConfig, RSRConfig
from stages.errors import ConfigError
from webui.forms.fields import Field, Group, kind_of, read, written
from webui.forms.settings import CYCLE, DATA, LEARNER, ROLLOUT, RPR, RSR, Setting

ADVANCED = "set"  # the box of "key = value" lines
BASE = "base"  # which model it starts from, in words; becomes `model`
LONGEST = 20_000  # characters of a field
OF_A_LIST: dict[str, tuple[type[BaseModel], tuple[Setting, ...]]] = {"rsr": (RSRConfig, RSR), "rpr": (RPRConfig, RPR)}


@dataclass(slots=True)
class Draft:
    """What a form holds while it is being filled in. `errors`: control's name -> what is wrong with it."""

    source: CycleConfig  # the recipe's, or the cycle's that is cloned
    values: dict[str, Any]  # of the new configuration, as far as it could be read
    texts: dict[str, str] = field(default_factory=dict)  # as they were typed
    errors: dict[str, str] = field(default_factory=dict)
    model: str | None = None  # the folder that `base` stands for; None: the shipped model
    config: CycleConfig | None = None  # None while something is wrong


def start(source: CycleConfig) -> Draft:
    """The form as it is opened."""
    return Draft(source=source, values=_dump(source), config=source)


def fill(source: CycleConfig, form: Mapping[str, str], model: str | None) -> Draft:
    """The form as it was sent. `model`: the folder that the field `base` names, None for the shipped model."""
    draft = Draft(source=source, values=_dump(source), texts={k: v[:LONGEST] for k, v in form.items()})
    original = _dump(source)
    draft.values["model"] = draft.model = model
    for path, kind_path, owner in _paths(source):
        if path not in form:
            continue
        before = _at(original, path)
        if form[path].strip() == written(before):
            continue  # untouched: the exact value stays, not what its text would give
        try:
            override(draft.values, path, read(kind_of(owner, kind_path), form[path]))
        except ValueError as error:
            draft.errors[path] = str(error)
    _advanced(draft, form.get(ADVANCED, ""))
    _validate(draft)
    return draft


def change(source: CycleConfig, values: Mapping[str, Any], model: str | None, base_error: str = "") -> Draft:
    """As `fill`, from values by path instead of texts: what a program sends."""
    draft = Draft(source=source, values=_dump(source))
    draft.values["model"] = draft.model = model
    if base_error:
        draft.errors[BASE] = base_error
    for path, value in values.items():
        try:
            override(draft.values, path, value)
        except ConfigError as error:
            draft.errors[path] = str(error)
    _validate(draft)
    return draft


def _advanced(draft: Draft, text: str) -> None:
    """Lines as `--set` takes them; empty lines and comments are passed over."""
    lines = [line.strip() for line in text.splitlines()]
    wrong = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        try:
            ((key, value),) = parse_overrides([line]).items()
            override(draft.values, key, value)
        except ConfigError as error:
            wrong.append(str(error).replace("--set ", ""))
    if wrong:
        draft.errors[ADVANCED] = "; ".join(wrong)


def _validate(draft: Draft) -> None:
    try:
        checked = CycleConfig.model_validate(draft.values)
        draft.config = None if draft.errors else checked
    except ValidationError as error:
        known = {path for path, _, _ in _paths(draft.source)}
        for e in error.errors():
            message = e["msg"].removeprefix("Value error, ")
            loc = [str(part) for part in e["loc"]]
            name = _control(loc, message, known)
            if name == ADVANCED and loc:
                message = f"{'.'.join(loc)}: {message}"
            draft.errors[name] = f"{draft.errors[name]}; {message}" if name in draft.errors else message


def _control(loc: Sequence[str], message: str, known: set[str]) -> str:
    """The control that an error belongs to: its own field, one that the message names, a group, or the box of lines."""
    for end in range(len(loc), 0, -1):  # a list's or table's entry belongs to the list's control
        if (path := ".".join(loc[:end])) in known:
            return path
    prefix = ".".join(loc[:2])
    last = {p.rsplit(".", 1)[-1]: p for p in sorted(known) if p.startswith(prefix)}
    for word in re.findall(r"\w+", message):  # a rule about several fields: the first one that it names
        if word in last:
            return last[word]
    if loc[:1] == ["model"]:
        return BASE
    if prefix and any(p.startswith(f"{prefix}.") for p in known):
        return prefix
    return ADVANCED


# ------------------------------------------------------------------------------------------------------------ fields


def groups(draft: Draft) -> list[Group]:
    """Every group of the form, in its order."""
    made = [
        _group(draft, "cycle", "Cycle", "", CYCLE, "", always=True),
        _group(draft, "data", "Tasks and evaluation", "", DATA, ""),
        _group(draft, "rollout", "Attempts", "", ROLLOUT, ""),
    ]
    for key, (_, settings) in OF_A_LIST.items():
        n = len(getattr(draft.source, key))
        for i in range(n):
            later = " and later rounds" if i == n - 1 and draft.source.rounds > n else ""
            made.append(_group(draft, f"{key}.{i}", f"{key.upper()}-{i + 1}{later}", "", settings, f"{key}.{i}."))
    made.append(_group(draft, "learner", "Learner", "", LEARNER, ""))
    order = ["cycle", *(f"{k}.{i}" for i in range(9) for k in OF_A_LIST), "data", "rollout", "learner"]
    return sorted(made, key=lambda g: order.index(g.key))


def _group(
    draft: Draft, key: str, title: str, note: str, settings: Sequence[Setting], prefix: str, *, always: bool = False
) -> Group:
    fields = [_field(draft, s, prefix) for s in settings]
    changed = sum(f.changed for f in fields)
    error = draft.errors.get(key, "")
    return Group(
        key=key,
        title=title,
        note=note or (f"{changed} changed" if changed else ""),
        fields=fields,
        open=always or bool(changed) or bool(error) or any(f.error for f in fields),
        error=error,
    )


def _field(draft: Draft, setting: Setting, prefix: str) -> Field:
    path = prefix + setting.path
    owner: type[BaseModel] = OF_A_LIST[prefix.partition(".")[0]][0] if prefix else CycleConfig
    kind = kind_of(owner, setting.path)
    before = written(_at(_dump(draft.source), path))
    value = draft.texts.get(path, before)
    return Field(
        path=path,
        label=setting.label,
        help=setting.help,
        source=setting.source,
        options=("", *kind.options) if kind.options and kind.optional else kind.options,
        numeric=kind.numeric,
        optional=kind.optional or kind.table or kind.listed,
        default=_default(owner, setting.path),
        value=value,
        changed=value.strip() != before,
        error=draft.errors.get(path, ""),
    )


def _default(owner: type[BaseModel], path: str) -> str:
    """The specification's or our own default; empty for a field that has none."""
    name, _, rest = path.partition(".")
    info = next(f for n, f in owner.model_fields.items() if name in (n, f.alias))
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    for part in rest.split(".") if rest else ():
        value = getattr(value, part)
    return written(getattr(value, "value", value))


def _paths(source: CycleConfig) -> list[tuple[str, str, type[BaseModel]]]:
    """(path, path below its model, model) of every control."""
    found: list[tuple[str, str, type[BaseModel]]] = [
        (s.path, s.path, CycleConfig) for s in (*CYCLE, *DATA, *ROLLOUT, *LEARNER)
    ]
    for key, (model, settings) in OF_A_LIST.items():
        found += [(f"{key}.{i}.{s.path}", s.path, model) for i in range(len(getattr(source, key))) for s in settings]
    return found


def _dump(config: CycleConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part)] if isinstance(values, list) else (values or {}).get(part)
    return values
