"""Writes generated tasks as Harbor folders, with a suite manifest beside them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.domain import CheckRole, Limits
from stages.errors import TaskError
from stages.seeds import rng
from stages.tasks.chains import TaskSpec
from stages.tasks.digests import digest_files, suite_digest

MANIFEST = "suite.toml"
GENERATOR_VERSION = "1"
"""Raised whenever the same seed gives other tasks."""

_DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ /app/\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteManifest:
    """What `suite.toml` says of a folder of tasks."""

    name: str
    version: str
    digest: str  # over task ids and task digests
    tasks: int
    path: Path
    kind: str = ""  # of a generated pool
    seed: int | None = None


def write_pool(
    specs: Sequence[TaskSpec], folder: Path, *, name: str = "", kind: str = "", seed: int | None = None
) -> SuiteManifest:
    """Write every task as `folder/<task id>/` and `folder/suite.toml`.

    The folder appears whole or not at all (written beside it, then renamed); it must not exist or be empty. Raises
    TaskError otherwise, or when the disk refuses.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TaskError(f"{folder}: exists already: remove it, or choose another folder for the pool")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix="tmp_pool_", dir=folder.parent))
        try:
            manifest = _write_all(specs, staging, folder, name or folder.name, kind, seed)
            staging.chmod(0o755)
            if folder.is_dir():
                folder.rmdir()
            staging.rename(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise TaskError(f"{error.filename or folder}: pool cannot be written: {error.strerror}") from error
    return manifest


def _write_all(
    specs: Sequence[TaskSpec], staging: Path, folder: Path, name: str, kind: str, seed: int | None
) -> SuiteManifest:
    digests = []
    for spec in specs:
        files = task_files(spec)
        _write_files(staging / spec.id, files)
        digests.append((spec.id, digest_files(files)))
    manifest = SuiteManifest(
        name=name,
        version=GENERATOR_VERSION,
        digest=suite_digest(digests),
        tasks=len(specs),
        path=folder,
        kind=kind,
        seed=seed,
    )
    (staging / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    return manifest


def manifest_text(manifest: SuiteManifest) -> str:
    """`suite.toml`."""
    rows: dict[str, object] = {
        "name": manifest.name,
        "version": manifest.version,
        "digest": manifest.digest,
        "tasks": manifest.tasks,
    }
    if manifest.kind:
        rows["kind"] = manifest.kind
    if manifest.seed is not None:
        rows["seed"] = manifest.seed
    return _table(rows)


def task_files(spec: TaskSpec) -> dict[str, bytes]:
    """The whole Harbor folder of one task: relative path → content."""
    solution = "".join(f"{command}\n" for command in spec.solution(rng(spec.id, "solution")))
    texts = {
        "instruction.md": spec.instruction + "\n",
        "task.toml": task_toml(spec),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": spec.test_script,
        "solution/solve.sh": f"#!/bin/bash\nset -e\ncd /app\n{solution}",
        **{f"environment/files/{path}": text for path, text in spec.files.items()},
    }
    return {path: text.encode() for path, text in texts.items()}


def task_toml(spec: TaskSpec) -> str:
    """`task.toml`, Harbor schema 1.4; what Harbor has no key for stands under `[metadata.terminal_rsi]`."""
    limits = Limits()
    families = list(dict.fromkeys(goal.family for goal in spec.goals))
    ours: dict[str, object] = {
        "family": spec.family,
        "stratum": spec.stratum.value,
        "max_turns": spec.max_turns,
        "nop_progress": 0,
        "categories": families,
    }
    checks = ",\n".join(
        f'  "{c.id}"' if c.role is CheckRole.SCENARIO else f'  {{ id = "{c.id}", role = "{c.role.value}" }}'
        for c in spec.manifest
    )
    environment: dict[str, object] = {
        "network_mode": "no-network",
        "workdir": "/app",
        "cpus": limits.cpus,
        "memory_mb": limits.memory_mb,
        "storage_mb": limits.storage_mb,
    }
    return (
        'schema_version = "1.4"\n'
        f"\n[metadata]\n{_table({'difficulty': spec.stratum.value, 'category': 'files'})}"
        f"\n[metadata.terminal_rsi]\n{_table(ours)}checks = [\n{checks},\n]\n"
        f"\n[environment]\n{_table(environment)}"
        f"\n[agent]\n{_table({'timeout_sec': 600.0})}"
        f"\n[verifier]\n{_table({'timeout_sec': 60.0})}"
    )


def _table(rows: Mapping[str, object]) -> str:
    # JSON strings, numbers and lists of strings are TOML as well.
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in rows.items())


def _write_files(root: Path, files: Mapping[str, bytes]) -> None:
    # Plain os calls: thousands of small files, and the mode must not depend on the umask (checks read permissions).
    base = os.fspath(root)
    for directory in sorted({os.path.dirname(path) for path in files} | {"environment/files"}):
        os.makedirs(os.path.join(base, directory), exist_ok=True)
    for path, content in files.items():
        mode = 0o755 if path.endswith(".sh") and not path.startswith("environment/") else 0o644
        descriptor = os.open(os.path.join(base, path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            os.fchmod(descriptor, mode)
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
