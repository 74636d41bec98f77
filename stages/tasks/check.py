"""Strict lint of task folders, without running them: what is broken, what leaks, what will not repeat.

for problem in check_task(Path("tasks/fix-git")):
    print(problem)          # tasks/fix-git/tests/test.sh:4: error: runtime-install: …
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stages.errors import TaskError
from stages.tasks.digests import read_folder
from stages.tasks.dockerfile import base_images, copies, is_pinned, parse
from stages.tasks.harbor import legacy_keys, read_task
from stages.tasks.needs import image_of, needs
from stages.tasks.schema import TaskToml, key_line, parse_task_toml, unknown_keys
from stages.tasks.steps import read_steps


class Severity(StrEnum):
    ERROR = "error"  # the task must not be used as it is
    WARNING = "warning"  # it works, but not for ever or not everywhere
    NOTE = "note"  # what the daemonless sandbox cannot do with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. `str()` is an editor-clickable line."""

    severity: Severity
    rule: str
    path: Path
    line: int  # 1-based; 0 when the file as a whole is meant
    message: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{where}: {self.severity}: {self.rule}: {self.message}"


_Make = Callable[[Severity, str, str, int, str], Problem]

_INSTALL = re.compile(
    r"(?:\b(?:apt|apt-get|aptitude|yum|dnf|microdnf|apk|zypper|brew)\s+(?:-\S+\s+)*(?:install|add|update|upgrade)\b"
    r"|\b(?:pip|pip3|pipx|uv\s+pip)\s+(?:-\S+\s+)*install\b|\bpython3?\s+-m\s+(?:pip|ensurepip)\b"
    r"|\buvx\b|\buv\s+(?:run|add|sync|tool|python|venv|init)\b"
    r"|\b(?:npm|pnpm|yarn|bun)\s+(?:i|ci|install|add)\b|\bnpx\b"
    r"|\b(?:cargo|gem|go|conda|mamba|opam|cpanm?)\s+(?:-\S+\s+)*(?:install|get)\b"
    r"|\b(?:curl|wget)\b|\bgit\s+(?:clone|fetch|pull)\b)"
)
_HIDDEN_PATHS = re.compile(r"(?<![\w/])/(?:tests|solution|logs/verifier)\b|\bsolve\.sh\b|\btest_outputs\.py\b")
_SECRET_TREES = ("tests/", "solution/")
_TELLING_BYTES = 24  # shorter files may be equal by chance
_SCRIPTS = (".sh", ".py", ".bash", ".toml", ".txt", "")

_NO_NETWORK = "no sandbox has a network"
_ONE_USER = "a sandbox has one user, who owns the workspace and has no rights beyond it"
_UNSUPPORTED = {  # keys of schema 1.4 that are read and have no effect here, and why
    "environment.gpus": "no device of this machine reaches a sandbox",
    "environment.gpu_types": "no device of this machine reaches a sandbox",
    "environment.tpu": "no device of this machine reaches a sandbox",
    "environment.mcp_servers": "agents act through one shell; no server runs beside it",
    "environment.skills_dir": "agents act through one shell; what they may read stands in the instruction",
    "environment.healthcheck": "a sandbox starts a shell and no service that could become healthy",
    "environment.allowed_hosts": _NO_NETWORK,
    "agent.allowed_hosts": _NO_NETWORK,
    "agent.user": _ONE_USER,
    "verifier.allowed_hosts": _NO_NETWORK,
    "verifier.user": _ONE_USER,
    "verifier.environment": "the verifier always runs in a fresh sandbox of the task's own environment",
    "verifier.environment_mode": "the verifier always runs in a fresh sandbox, on the agent's last state",
    "verifier.collect": "the verifier sees the agent's last state itself; nothing has to be carried to it",
    "artifacts": "nothing but the verifier's result leaves a sandbox",
}


def check_task(folder: Path) -> list[Problem]:
    """Every problem of one task folder, worst first. Reads, never runs and never raises for a broken task."""
    try:
        content = read_folder(folder)
    except TaskError as error:
        return [Problem(severity=Severity.ERROR, rule="unreadable", path=folder, line=0, message=str(error))]
    order = list(Severity)
    found = list(_problems(folder, content))
    return sorted(found, key=lambda p: (order.index(p.severity), str(p.path), p.line, p.rule))


def check_suite(folder: Path) -> list[Problem]:
    """Problems of every task folder below `folder`, or of `folder` itself when it is one."""
    if (folder / "task.toml").exists() or (folder / "instruction.md").exists():
        return check_task(folder)
    if not folder.is_dir():
        return [Problem(severity=Severity.ERROR, rule="missing", path=folder, line=0, message="no such folder")]
    tasks = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not tasks:
        return [Problem(severity=Severity.ERROR, rule="missing", path=folder, line=0, message="holds no task folder")]
    return [problem for task in tasks for problem in check_task(task)]


def _problems(folder: Path, content: Mapping[str, bytes]) -> Iterator[Problem]:
    def problem(severity: Severity, rule: str, name: str, line: int, message: str) -> Problem:
        return Problem(severity=severity, rule=rule, path=folder / name if name else folder, line=line, message=message)

    config: TaskToml | None = None
    if "task.toml" in content:
        text = _decode(content["task.toml"])
        with contextlib.suppress(TaskError):  # reported by `_loads`, with its line
            config = parse_task_toml(text, "task.toml")
    yield from _loads(folder, content, config, problem)
    if config is not None:
        text = _decode(content["task.toml"])
        for path in unknown_keys(config):
            yield problem(
                Severity.ERROR,
                "unknown-key",
                "task.toml",
                key_line(text, path),
                f"{'.'.join(path)} is no key of schema 1.4",
            )
        for key in legacy_keys(config):
            line = key_line(text, tuple(key.split(".")))
            yield problem(Severity.WARNING, "legacy-key", "task.toml", line, f"{key} was renamed in schema 1.4")
        yield from _configuration(config, text, problem)
        yield from _sandbox(content, config, problem)
    if not any(name.startswith("solution/") or "/solution/" in name for name in content):
        yield problem(
            Severity.WARNING,
            "no-solution",
            "solution/solve.sh",
            0,
            "missing: nobody can show that the task is solvable",
        )
    yield from _leaks(content, problem)
    yield from _installs(content, problem)
    yield from _images(content, problem)


def _loads(folder: Path, content: Mapping[str, bytes], config: TaskToml | None, problem: _Make) -> Iterator[Problem]:
    try:
        if config is not None and config.steps:
            read_steps(folder, content, config)
        else:
            read_task(folder, folder.parent.name, content)
    except TaskError as error:
        match = re.match(r"(.+?):(\d+)?:? ?(.*)", str(error).removeprefix(f"{folder}/"), re.DOTALL)
        name, line, message = (match[1], int(match[2] or 0), match[3]) if match else ("", 0, str(error))
        yield problem(Severity.ERROR, "broken", name, line, message)


def _configuration(config: TaskToml, text: str, problem: _Make) -> Iterator[Problem]:
    environment = config.environment
    if environment.docker_image and not is_pinned(environment.docker_image):
        line = key_line(text, ("environment", "docker_image"))
        yield problem(
            Severity.WARNING, "unpinned-image", "task.toml", line, f"{environment.docker_image}: name a tag or digest"
        )
    network = environment.network_mode or ("no-network" if environment.allow_internet is False else "public")
    for table, mode in (
        ("environment", network),
        ("agent", config.agent.network_mode),
        ("verifier", config.verifier.network_mode),
    ):
        if mode not in (None, "no-network"):
            line = key_line(text, (table, "network_mode"))
            message = f"{table} asks for network {mode!r}: sandboxes have none"
            yield problem(Severity.NOTE, "network", "task.toml", line, message)
    for key, why in _UNSUPPORTED.items():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if value not in (None, [], 0, "shared"):
            line = key_line(text, tuple(key.split(".")))
            yield problem(Severity.NOTE, "unsupported-key", "task.toml", line, f"{key} has no effect, because {why}")
    if environment.os == "windows":
        line = key_line(text, ("environment", "os"))
        yield problem(Severity.ERROR, "windows", "task.toml", line, "Windows containers cannot be run")


def _leaks(content: Mapping[str, bytes], problem: _Make) -> Iterator[Problem]:
    secrets = {
        hashlib.sha256(data).digest(): name
        for name, data in content.items()
        if _is_secret(name) and len(data.strip()) >= _TELLING_BYTES
    }
    for name, data in content.items():
        if name.startswith("environment/"):
            inside = name.removeprefix("environment/")
            if original := secrets.get(hashlib.sha256(data).digest()):
                yield problem(
                    Severity.ERROR, "test-leak", name, 1, f"the same bytes as {original}: agents would see it"
                )
            elif inside.startswith(_SECRET_TREES) or inside.rpartition("/")[2] in (
                "solve.sh",
                "solution.sh",
                "test_outputs.py",
            ):
                yield problem(Severity.ERROR, "test-leak", name, 1, "a test or solution in the build context")
    for name in ("instruction.md", *(n for n in content if re.fullmatch(r"steps/[^/]+/instruction\.md", n))):
        for line, row in enumerate(_decode(content.get(name, b"")).splitlines(), 1):
            if match := _HIDDEN_PATHS.search(row):
                yield problem(
                    Severity.WARNING, "hidden-path", name, line, f"names {match[0]!r}, which agents never have"
                )
    dockerfile = _decode(content.get("environment/Dockerfile", b""))
    for instruction in parse(dockerfile):
        if instruction.name in ("COPY", "ADD") and (pair := copies(instruction)) is not None:
            for source in pair[0]:
                if re.match(r"(?:\./|\.\./|/)*(?:tests|solution)(?:/|$|\.sh)", source):
                    message = f"copies {source} into the image"
                    yield problem(Severity.ERROR, "test-leak", "environment/Dockerfile", instruction.line, message)


def _is_secret(name: str) -> bool:
    return name.startswith(_SECRET_TREES) or bool(re.match(r"steps/[^/]+/(tests|solution)/", name))


def _installs(content: Mapping[str, bytes], problem: _Make) -> Iterator[Problem]:
    for name, data in content.items():
        in_tests = name.startswith("tests/") or re.match(r"steps/[^/]+/tests/", name)
        if not in_tests or Path(name).suffix not in _SCRIPTS:
            continue
        for line, row in enumerate(_decode(data).splitlines(), 1):
            code = row.strip()
            if code.startswith("#"):
                continue
            if match := _INSTALL.search(code):
                message = f"{match[0]!r} at verification: it needs a network and may change; install it in the image"
                yield problem(Severity.ERROR, "runtime-install", name, line, message)


def _images(content: Mapping[str, bytes], problem: _Make) -> Iterator[Problem]:
    for name, data in content.items():
        if name.startswith("environment/") and name.rpartition("/")[2].startswith("Dockerfile"):
            for line, image in base_images(_decode(data)):
                if not is_pinned(image):
                    yield problem(Severity.WARNING, "unpinned-image", name, line, f"{image}: name a tag or digest")
        elif name.startswith("environment/") and re.search(r"compose\.ya?ml$", name):
            for line, row in enumerate(_decode(data).splitlines(), 1):
                match = re.match(r"\s*image:\s*[\"']?([^\s\"'#]+)", row)
                if match and "$" not in match[1] and not is_pinned(match[1]):
                    yield problem(Severity.WARNING, "unpinned-image", name, line, f"{match[1]}: name a tag or digest")


def _sandbox(content: Mapping[str, bytes], config: TaskToml, problem: _Make) -> Iterator[Problem]:
    for need in needs(content, config, image_of(content, config)):
        yield problem(
            Severity.NOTE, "needs-docker", need.path, need.line, f"{need.reason}: not in the bubblewrap backend"
        )
    if config.steps:
        line = key_line(_decode(content["task.toml"]), ("steps",))
        yield problem(
            Severity.NOTE,
            "several-steps",
            "task.toml",
            line,
            "`rsi tasks run` runs it; a suite cannot hold it",
        )


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")
