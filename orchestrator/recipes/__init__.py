"""Recipes: named TOML files that become a `CycleConfig`. Unknown keys and impossible sizes are errors that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.config import CycleConfig
from stages.errors import ConfigError

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(recipe: str, *, name: str | None = None, overrides: Mapping[str, Any] | None = None) -> CycleConfig:
    """A shipped recipe by name, or a TOML file by path, with top-level or dotted overrides ("rollout.lanes": 1).

    Raises ConfigError that names the file, the key and what is allowed.
    """
    path = FOLDER / f"{recipe}.toml"
    if not path.exists():
        path = Path(recipe)
        if path.suffix != ".toml" or not path.is_file():
            missing = (
                f"{path}: no such file" if path.suffix == ".toml" and not path.exists() else f"no recipe {recipe!r}"
            )
            raise ConfigError(f"{missing}: use one of {', '.join(recipe_names())}, or the path of a .toml file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for key, value in (overrides or {}).items():
        override(values, key, value)
    values["name"] = name or values.get("name") or str(values.get("recipe", path.stem))
    changed = f" with {', '.join(overrides)} changed" if overrides else ""
    return parse_config(values, f"{path}{changed}")


def parse_config(values: Mapping[str, Any], source: str) -> CycleConfig:
    """Raises ConfigError with one line per wrong field."""
    try:
        return CycleConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, e['loc'])) or '(recipe)'}: "
            + ("there is no such key" if e["type"] == "extra_forbidden" else e["msg"])
            for e in error.errors()
        ]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from error


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`["rounds=1", "name=x"]` as {"rounds": 1, "name": "x"}: TOML values, and plain words as text.

    Raises:
        ConfigError: no `=`, or no key.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {pair!r} is no KEY=VALUE. Example: --set rounds=1")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value.strip()
    return found


def override(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one key of a recipe's values; `*` in place of an index means every entry of the list.

    Raises ConfigError when the path leads nowhere.
    """
    head, star, tail = dotted.partition(".*.")
    if star:
        entries = values.setdefault(head, [{}])  # a recipe without the list has one entry of defaults
        if not isinstance(entries, list):
            raise ConfigError(f"override {dotted}: {head!r} is no list, so it has no .*.")
        for i in range(len(entries)):
            override(values, f"{head}.{i}.{tail}", value)
        return
    *parents, last = dotted.split(".")
    at: Any = values
    for part in parents:
        if isinstance(at, dict) and at.get(part) is None:
            at[part] = {}
        at = _entry(at, part, dotted)
    if isinstance(at, dict):
        at[last] = value
    else:
        _entry(at, last, dotted)
        at[int(last)] = value


def _entry(at: Any, part: str, dotted: str) -> Any:
    if isinstance(at, dict):
        return at[part]
    if not isinstance(at, list):
        raise ConfigError(f"override {dotted}: {part!r} stands below a single value")
    if not part.isdecimal() or int(part) >= len(at):
        raise ConfigError(f"override {dotted}: {part!r} is not an index of a list of {len(at)}")
    return at[int(part)]
