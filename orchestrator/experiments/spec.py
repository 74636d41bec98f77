"""What an experiment asks: arms or factors, seeds and contrasts, read from TOML and checked before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from orchestrator.recipes import FOLDER, load_recipe
from stages.config import CycleConfig, Strict
from stages.errors import ConfigError

SPECS = FOLDER / "experiments"
JOIN = "+"  # between the levels that name an arm of a factorial


class ArmSpec(Strict):
    """One way to run the cycle."""

    name: str = Field(min_length=1, max_length=60)
    title: str = ""  # a line for tables and charts
    set: dict[str, Any] = {}  # dotted overrides of the recipe; `rpr.*.x` means every round
    match: str | None = None  # spend as many tokens and updates as this arm really did (spec §2.4); needs direct_ppo


class LevelSpec(Strict):
    name: str = Field(min_length=1, max_length=30, pattern=r"^[^+]+$")
    set: dict[str, Any] = {}


class FactorSpec(Strict):
    """Two levels. Effects are second − first, so the first is what the factor is compared with."""

    name: str = Field(min_length=1, max_length=30)
    levels: tuple[LevelSpec, LevelSpec]


class ContrastSpec(Strict):
    """Mean of the arms in `plus` minus mean of those in `minus`."""

    name: str = Field(min_length=1)
    plus: tuple[str, ...] = Field(min_length=1)
    minus: tuple[str, ...] = Field(min_length=1)


class ExperimentSpec(Strict):
    """One file. Give `arm`s, or `factor`s for the full factorial."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    question: str = Field(min_length=1)
    recipe: str
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    set: dict[str, Any] = {}  # for every arm
    arm: tuple[ArmSpec, ...] = ()
    factor: tuple[FactorSpec, ...] = ()
    contrast: tuple[
        ContrastSpec, ...
    ] = ()  # default: every arm against the first; of factors: effects and interactions
    notes: tuple[str, ...] = ()  # what a reader of the report must know

    @model_validator(mode="after")
    def _arms(self) -> ExperimentSpec:
        if not self.arm and not self.factor:
            raise ValueError("it has no arm and no factor; an experiment compares at least two arms")
        if self.arm and self.factor:
            raise ValueError("give arms or factors, not both; the arms of a factorial follow from its factors")
        names = [a.name for a in self.arms()]
        if len(names) < 2:
            raise ValueError(f"it has one arm ({names[0]}); an experiment compares at least two")
        _once(names, "arm")
        _once([f.name for f in self.factor], "factor")
        _once(list(map(str, self.seeds)), "seed")
        for f in self.factor:
            _once([level.name for level in f.levels], f"level of {f.name}")
        if any(s < 0 for s in self.seeds):
            raise ValueError("seeds are numbers from 0 on")
        for c in self.contrast:
            for name in (*c.plus, *c.minus):
                if name not in names:
                    raise ValueError(f"contrast {c.name!r} names an unknown arm {name!r}; there are {', '.join(names)}")
            if set(c.plus) & set(c.minus):
                raise ValueError(f"contrast {c.name!r} has {sorted(set(c.plus) & set(c.minus))[0]!r} on both sides")
        free = [a.name for a in self.arm if a.match is None]
        for a in self.arm:
            if a.match is not None and a.match not in free:
                raise ValueError(f"arm {a.name!r} matches {a.match!r}, which is no arm with settings of its own")
        return self

    def arms(self) -> tuple[ArmSpec, ...]:
        """Given, or every combination of the factors' levels, the last factor changing fastest."""
        if self.arm:
            return self.arm
        return tuple(
            ArmSpec(
                name=JOIN.join(level.name for level in combination), set=_merged(level.set for level in combination)
            )
            for combination in itertools.product(*(f.levels for f in self.factor))
        )

    def arm_named(self, name: str) -> ArmSpec:
        return next(a for a in self.arms() if a.name == name)

    def config(self, arm: ArmSpec, seed: int, extra: Mapping[str, Any] | None = None) -> CycleConfig:
        """The whole cycle of one arm with one seed. Raises ConfigError for an override that the recipe refuses."""
        overrides = {**self.set, **arm.set, **(extra or {}), "seed": seed, "experiment": f"{self.name}/{arm.name}"}
        if arm.match is not None:
            overrides.setdefault("direct_ppo", True)
        try:
            return load_recipe(self.recipe, name=f"{self.name}: {arm.name}, seed {seed}"[:120], overrides=overrides)
        except ConfigError as error:
            raise ConfigError(f"experiment {self.name}, arm {arm.name!r}: {error}") from error

    def values(self) -> dict[str, Any]:
        """As stored: without seeds, which may be added later."""
        return self.model_dump(mode="json", exclude={"seeds"})

    @property
    def digest(self) -> str:
        canonical = json.dumps(self.values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def spec_names() -> list[str]:
    return sorted(path.stem for path in SPECS.glob("*.toml"))


def load_spec(name: str, *, seeds: Sequence[int] = ()) -> ExperimentSpec:
    """A shipped specification by name, or a TOML file by path; `seeds` replace its own.

    Raises ConfigError that names the file and the key.
    """
    path = SPECS / f"{name}.toml"
    if not path.exists():
        path = Path(name)
        if path.suffix != ".toml" or not path.exists():
            raise ConfigError(
                f"no experiment {name!r}: use one of {', '.join(spec_names())}, or the path of a .toml file"
            )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if not values:
        raise ConfigError(f"{path} is empty. A shipped one shows the form: {SPECS / f'{spec_names()[0]}.toml'}")
    return parse_spec(values | ({"seeds": list(seeds)} if seeds else {}), str(path))


def parse_spec(values: Mapping[str, Any], source: str) -> ExperimentSpec:
    """Raises ConfigError with one line per wrong field."""
    try:
        return ExperimentSpec.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or '(experiment)'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(lines)) from error


def _merged(parts: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def _once(names: Sequence[str], what: str) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ValueError(f"{what} {twice[0]!r} is given twice")
