"""infra/compose.yaml as compose reads it: variables filled in from infra/example.env, anchors and merges resolved."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

INFRA = Path(__file__).resolve().parents[1] / "infra"
VERSION = str(
    tomllib.loads((INFRA.parent / "pyproject.toml").read_text())["project"]["version"]
)  # and tag of our images
_VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def example_env() -> dict[str, str]:
    lines = (INFRA / "example.env").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: value.strip('"') for name, value in pairs}


def compose() -> dict[str, Any]:
    environment = example_env()

    def value(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        assert default is not None or name in environment, f"{name} has no default and is not in example.env"
        return environment.get(name) or default or ""

    return dict(yaml.safe_load(_VARIABLE.sub(value, (INFRA / "compose.yaml").read_text())))
