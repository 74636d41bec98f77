"""Recipes: named TOML files that become a `CycleConfig`. Unknown keys and impossible sizes are errors that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
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
        if path.suffix != ".toml" or not path.exists():
            raise ConfigError(
                f"no recipe {recipe!r}: use one of {', '.join(recipe_names())}, or the path of a .toml file"
            )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for key, value in (overrides or {}).items():
        _set(values, key, value)
    values["name"] = name or values.get("name") or str(values.get("recipe", path.stem))
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, Any], source: str) -> CycleConfig:
    """Raises ConfigError with one line per wrong field."""
    try:
        return CycleConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or '(recipe)'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from error


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    at: Any = values
    for part in parents:
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise ConfigError(f"override {dotted}: {part!r} is not an index of a list of {len(at)}")
            at = at[int(part)]
        else:
            at = at.setdefault(part, {})
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
