"""Reads task folders (Harbor layout) and suites into our `Task`."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stages.backends.sandbox.environment import is_reserved
from stages.domain import CheckRole, CheckSpec, Limits, Stratum, Task
from stages.errors import TaskError
from stages.tasks.digests import digest_files, folder_digest, read_folder, suite_digest
from stages.tasks.dockerfile import Workspace
from stages.tasks.needs import image_of, needs
from stages.tasks.schema import LEGACY_KEYS, Environment, TaskToml, key_line, megabytes, parse_task_toml, unknown_keys
from stages.tasks.write import MANIFEST

__all__ = ["Suite", "folder_digest", "load_suite", "load_task", "read_task"]

_MOST_ENV = 30_000  # characters of one variable: a kernel takes 128 KiB
_DEFAULT: dict[str, Any] = {f.name: f.default for f in fields(Task)}
_FROM_HOST = re.compile(r"\$\{\w+(?::-(?P<default>[^}]*))?\}")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A folder of tasks, read and digested."""

    name: str
    version: str
    digest: str  # over task ids and digests, recomputed from the bytes
    tasks: tuple[Task, ...]
    path: Path
    kind: str = ""
    warnings: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()  # messages of tasks left out (only with `skip_broken`)
    by_id: Mapping[str, Task] = field(default_factory=dict, repr=False)


def load_task(folder: Path, suite: str, *, strict: bool = False, warnings: list[str] | None = None) -> Task:
    """Read one task folder.

    Unknown keys raise TaskError in strict mode and are else appended to `warnings`. Raises TaskError naming the file, and
    the line where there is one, for anything broken.
    """
    return read_task(folder, suite, read_folder(folder), strict=strict, warnings=warnings)


def read_task(
    folder: Path, suite: str, content: Mapping[str, bytes], *, strict: bool = False, warnings: list[str] | None = None
) -> Task:
    """`load_task` on a folder whose files were read already (`read_folder`)."""
    notes: list[str] = [] if warnings is None else warnings
    config_path = folder / "task.toml"
    if "task.toml" not in content:
        if "task.yaml" in content:
            raise TaskError(
                f"{folder / 'task.yaml'}: an original Terminal-Bench folder: convert it to Harbor layout first"
            )
        raise TaskError(f"{config_path}: missing: a task folder needs task.toml, instruction.md and tests/test.sh")
    text = _text(folder, content, "task.toml")
    config = parse_task_toml(text, str(config_path))
    for path in unknown_keys(config):
        message = f"{config_path}:{key_line(text, path)}: unknown key {'.'.join(path)}"
        if strict:
            raise TaskError(f"{message}: remove it, or put it under [metadata]")
        notes.append(message)
    if config.steps:
        line = key_line(text, ("steps",))
        raise TaskError(
            f"{config_path}:{line}: a task of {len(config.steps)} steps in one environment: `rsi tasks run` runs it, a suite "
            "cannot hold it"
        )
    return build_task(folder, suite, content, config)


def build_task(folder: Path, suite: str, content: Mapping[str, bytes], config: TaskToml) -> Task:
    """A task of files and a configuration that were read already. Raises TaskError."""
    config_path, text = folder / "task.toml", _text(folder, content, "task.toml")
    own = config.metadata.terminal_rsi

    def env(table: str, values: Mapping[str, str], *, verifier: bool = False) -> dict[str, str]:
        return _env(str(config_path), text, table, values, verifier=verifier)

    if "environment/Dockerfile" in content:
        _text(folder, content, "environment/Dockerfile")
    built = image_of(content, config)
    files, workdir = _workspace(folder, content, config.environment, built)
    if "tests/test.sh" not in content:
        raise TaskError(f"{folder / 'tests/test.sh'}: missing: a task without a verifier cannot be scored")
    ids = [row.id for row in own.manifest]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        line = key_line(text, ("metadata", "terminal_rsi", "checks"))
        raise TaskError(f"{config_path}:{line}: check id {twice!r} occurs twice")
    return Task(
        id=folder.name,
        suite=suite,
        family=own.family or str(_metadata(config, "category", suite)),
        stratum=Stratum(own.stratum) if own.stratum else _stratum(config),
        instruction=_instruction(folder, content),
        root=folder,
        digest=digest_files(content),
        files=files,
        workdir=workdir,
        checks=tuple(CheckSpec(id=row.id, role=CheckRole(row.role)) for row in own.manifest),
        max_turns=own.max_turns or _DEFAULT["max_turns"],
        limits=_limits(config),
        agent_timeout_s=config.agent.timeout_sec or _DEFAULT["agent_timeout_s"],
        verifier_timeout_s=config.verifier.timeout_sec,
        nop_progress=own.nop_progress,
        categories=tuple(own.categories) or _categories(config),
        env=dict(built.env if built else {}) | env("environment", config.environment.env),
        verifier_env=env("verifier", config.verifier.env, verifier=True),
        solution_env=env("solution", config.solution.env),
        rootfs=own.rootfs or "",
        needs_docker=tuple(str(need) for need in needs(content, config, built)),
    )


def load_suite(folder: Path, *, name: str | None = None, strict: bool = False, skip_broken: bool = False) -> Suite:
    """Read every task folder under `folder`, in name order, and `suite.toml` if there is one.

    `folder` may be a manifest of any name instead (`*.toml`): its `folders` name task folders relative to it, in any place.
    Raises TaskError that names every broken task (the first five in full), or, with `skip_broken`, leaves them out and
    lists them. A digest in `suite.toml` that differs from the bytes is an error: a changed suite is another suite.
    """
    path = folder if folder.suffix == ".toml" else folder / MANIFEST
    if folder != path and not folder.is_dir():
        raise TaskError(f"{folder}: no such suite folder")
    if folder == path and not path.is_file():
        raise TaskError(f"{path}: no such manifest of a suite")
    manifest = _manifest(path)
    suite_name = name or str(manifest.get("name") or (path.parent.name if path.name == MANIFEST else path.stem))
    tasks: list[Task] = []
    broken: list[str] = []
    warnings: list[str] = []
    for entry in _task_folders(path, manifest):
        try:
            tasks.append(load_task(entry, suite_name, strict=strict, warnings=warnings))
        except TaskError as error:
            broken.append(str(error))
    if broken and not skip_broken:
        more = f"\n… and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise TaskError("\n".join(broken[:5]) + more)
    if not tasks:
        raise TaskError(f"{folder}: holds no task folder (a task folder has a task.toml)")
    twice = [task for task, n in Counter(t.id for t in tasks).items() if n > 1]
    if twice:
        raise TaskError(f"{path}: {len(twice)} task ids occur twice, first {twice[0]}: each task counts once")
    digest = suite_digest((task.id, task.digest) for task in tasks)
    stated = manifest.get("digest")
    if stated is not None and stated != digest and not broken:
        raise TaskError(
            f"{path}: digest {str(stated)[:12]}… does not match the tasks ({digest[:12]}…): "
            "the suite was changed: restore it, or give it a new version and delete the digest line"
        )
    return Suite(
        name=suite_name,
        version=str(manifest.get("version", "0")),
        digest=digest,
        tasks=tuple(tasks),
        path=folder,
        kind=str(manifest.get("kind", "")),
        warnings=tuple(warnings),
        broken=tuple(broken),
        by_id={task.id: task for task in tasks},
    )


def _manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error


def _task_folders(path: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """The task folders that a manifest lists, else all beside it."""
    listed = manifest.get("folders")
    if listed is None:
        return sorted(p for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not isinstance(listed, list) or not all(isinstance(x, str) for x in listed):
        raise TaskError(f'{path}: `folders` must be a list of task folders, e.g. folders = ["one", "../pool/two"]')
    return [path.parent / x for x in listed]


def _text(folder: Path, content: Mapping[str, bytes], name: str) -> str:
    try:
        return content[name].decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[name].count(b"\n", 0, error.start) + 1
        raise TaskError(f"{folder / name}:{line}: not UTF-8 text: save it as UTF-8") from error


def _instruction(folder: Path, content: Mapping[str, bytes]) -> str:
    if "instruction.md" not in content:
        raise TaskError(f"{folder / 'instruction.md'}: missing: write the public task text there")
    rows = _text(folder, content, "instruction.md").split("\n")
    while rows and (_CANARY.match(rows[0].strip()) or not rows[0].strip()):
        rows.pop(0)  # canary strings are for crawlers, not for agents
    text = "\n".join(rows).strip()
    if not text:
        raise TaskError(f"{folder / 'instruction.md'}: empty: write the public task text there")
    return text


def _workspace(
    folder: Path, content: Mapping[str, bytes], environment: Environment, built: Workspace | None
) -> tuple[dict[str, bytes], str]:
    if built is not None:
        workdir = environment.workdir or built.workdir
        return (dict(built.files) if workdir == built.workdir else {}), workdir
    if not environment.docker_image and "environment/docker-compose.yaml" not in content:
        raise TaskError(f"{folder / 'environment/Dockerfile'}: missing: write one, or set docker_image in task.toml")
    return {}, environment.workdir or str(_DEFAULT["workdir"])


def _env(where: str, text: str, table: str, values: Mapping[str, str], *, verifier: bool) -> dict[str, str]:
    """Values as they stand; `${NAME:-default}` becomes the default. Raises TaskError for what no sandbox could be given."""
    out: dict[str, str] = {}
    for name, value in values.items():
        place = f"{where}:{key_line(text, (table, 'env', name))}: {table}.env.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in value or len(name + value) > _MOST_ENV:
            raise TaskError(f"{place}: no environment variable can be called so, or hold that")
        if verifier and is_reserved(name):
            raise TaskError(
                f"{place}: steers which code the verifier runs, so the sandbox sets it: choose another name"
            )
        found = _FROM_HOST.fullmatch(value)
        if found and found["default"] is None:
            raise TaskError(
                f"{place}: takes {value} from the machine that runs it; a sandbox is given nothing of that: write the value "
                "here, or a default as ${NAME:-default}"
            )
        out[name] = found["default"] if found else value
    return out


def _limits(config: TaskToml) -> Limits:
    environment, own, default = config.environment, config.metadata.terminal_rsi.limits, Limits()
    memory = environment.memory_mb or (megabytes(environment.memory) if environment.memory else None)
    storage = environment.storage_mb or (megabytes(environment.storage) if environment.storage else None)
    return Limits(
        memory_mb=memory or default.memory_mb,
        storage_mb=storage or default.storage_mb,
        inodes=own.inodes or default.inodes,
        pids=own.pids or default.pids,
        cpus=environment.cpus or default.cpus,
        command_timeout_s=own.command_timeout_s or default.command_timeout_s,
        output_bytes=own.output_bytes or default.output_bytes,
    )


def _metadata(config: TaskToml, key: str, default: object) -> object:
    return (config.metadata.model_extra or {}).get(key, default)


def _stratum(config: TaskToml) -> Stratum:
    difficulty = str(_metadata(config, "difficulty", "")).lower()
    return Stratum(difficulty) if difficulty in set(Stratum) else Stratum.MEDIUM


def _categories(config: TaskToml) -> tuple[str, ...]:
    tags = _metadata(config, "tags", [])
    category = _metadata(config, "category", None)
    words = [category, *tags] if isinstance(tags, list) else [category]
    return tuple(str(word) for word in words if isinstance(word, str))


def legacy_keys(config: TaskToml) -> tuple[str, ...]:
    """Legacy keys that a `task.toml` uses."""
    present = {"version": config.version}
    present |= {f"environment.{k}": getattr(config.environment, k) for k in ("allow_internet", "memory", "storage")}
    return tuple(key for key in LEGACY_KEYS if present[key] is not None)
