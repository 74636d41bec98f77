"""Original Terminal-Bench folders (`task.yaml`, `run-tests.sh`, `tests/`, `solution.sh`) → Harbor layout.

The converted verifier runs the original `run-tests.sh` unchanged and pays by its exit status. (The original parser counted
skipped tests as passed and an empty report as solved; pytest's exit status does neither for an empty one.)
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.errors import TaskError
from stages.tasks.digests import read_folder

_TEST_SH = """#!/bin/bash
export TEST_DIR=/tests
bash /tests/run-tests.sh
status=$?
if [ $status -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
exit $status
"""
_NOT_ENVIRONMENT = ("task.yaml", "run-tests.sh", "solution.sh", "solution.yaml")
_PLAIN_SERVICE = frozenset({"build", "image", "container_name", "command", "volumes", "environment"})


class _Description(BaseModel):
    key: str
    description: str


class _TaskYaml(BaseModel):
    model_config = ConfigDict(extra="allow")
    instruction: str | None = None
    descriptions: list[_Description] = []  # the oldest form; "base" is the instruction
    difficulty: str = "medium"
    category: str = "software_engineering"
    tags: list[str] = []
    max_agent_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 360.0
    max_test_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0

    @property
    def text(self) -> str:
        base = next((d.description for d in self.descriptions if d.key == "base"), "")
        return (self.instruction or base).strip()


def is_terminal_bench(folder: Path) -> bool:
    """Whether a folder is an original Terminal-Bench task."""
    return (folder / "task.yaml").is_file() and not (folder / "task.toml").exists()


def convert_task(source: Path, target: Path) -> Path:
    """Write `source` in Harbor layout as `target` (whole or not at all). Raises TaskError naming what is broken."""
    if target.exists():
        raise TaskError(f"{target}: exists already: remove it, or choose another folder")
    files = harbor_files(source, read_folder(source))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix="tmp_task_", dir=target.parent))
        try:
            for name, data in files.items():
                path = staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o755 if data.startswith(b"#!") else 0o644)
            staging.chmod(0o755)
            staging.rename(target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise TaskError(f"{error.filename or target}: cannot be written: {error.strerror}") from error
    return target


def harbor_files(source: Path, content: Mapping[str, bytes]) -> dict[str, bytes]:
    """The Harbor folder of an original one: relative path → content."""
    config = _read_yaml(source, content)
    for name, why in (("run-tests.sh", "the verifier"), ("docker-compose.yaml", "the environment")):
        if name not in content:
            raise TaskError(f"{source / name}: missing: {why} of an original Terminal-Bench task")
    if "solution.yaml" in content and "solution.sh" not in content:
        raise TaskError(f"{source / 'solution.yaml'}: recorded keystrokes cannot be converted: write a solution.sh")
    context, compose = _compose(source, content)
    out = {"instruction.md": (config.text + "\n").encode(), "task.toml": _task_toml(config).encode()}
    if "solution.sh" in content:
        out["solution/solve.sh"] = content["solution.sh"]
    for name, data in content.items():
        if name.startswith("tests/"):
            out[name] = data
        elif name.startswith(context) and name not in _NOT_ENVIRONMENT and name != "docker-compose.yaml":
            out[f"environment/{name.removeprefix(context)}"] = data
    out |= {"tests/test.sh": _TEST_SH.encode(), "tests/run-tests.sh": content["run-tests.sh"]}
    if compose is not None:
        out["environment/docker-compose.yaml"] = compose
    elif "environment/Dockerfile" not in out:
        raise TaskError(f"{source / context / 'Dockerfile'}: missing: docker-compose.yaml builds it")
    return dict(sorted(out.items()))


def _read_yaml(source: Path, content: Mapping[str, bytes]) -> _TaskYaml:
    where = source / "task.yaml"
    if "task.yaml" not in content:
        raise TaskError(f"{where}: missing: no original Terminal-Bench task")
    try:
        config = _TaskYaml.model_validate(yaml.safe_load(content["task.yaml"]))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise TaskError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise TaskError(f"{where}: nested too deep to be read") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskError(f"{where}: {'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}") from error
    if not config.text:
        raise TaskError(f"{where}: no instruction, and no description with the key 'base'")
    return config


def _compose(source: Path, content: Mapping[str, bytes]) -> tuple[str, bytes | None]:
    """(prefix of the build context, the compose file if the task needs more than its main service's Dockerfile)."""
    where = source / "docker-compose.yaml"
    try:
        data: Any = yaml.safe_load(content["docker-compose.yaml"])
        services: dict[str, Any] = data["services"]
        name = "client" if "client" in services else next(iter(services))
        main = services[name] or {}
        build = main.get("build", {})
        context = build.get("context", ".") if isinstance(build, dict) else str(build)
        alone = len(services) == 1 and set(data) <= {"services", "version"} and set(main) <= _PLAIN_SERVICE
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise TaskError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error
    prefix = "" if context in (".", "./", "") else context.removeprefix("./").rstrip("/") + "/"
    return prefix, None if alone else content["docker-compose.yaml"]


def _task_toml(config: _TaskYaml) -> str:
    rows = {"difficulty": config.difficulty, "category": config.category, "tags": config.tags}
    # JSON strings and lists of strings are TOML as well.
    metadata = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in rows.items())
    return (
        'schema_version = "1.4"\n'
        f"\n[metadata]\n{metadata}"
        f"\n[agent]\ntimeout_sec = {config.max_agent_timeout_sec}\n"
        f"\n[verifier]\ntimeout_sec = {config.max_test_timeout_sec}\n"
    )
