"""Multi-step Harbor tasks: `[[steps]]` in task.toml, one folder below `steps/` each, one environment for all.

They are read and linted whole. No harness of ours runs them yet: a sandbox here is verified once, after its agent is dead,
while a step's verifier runs between two agents in the same environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.errors import TaskError
from stages.tasks.digests import digest_files, read_folder
from stages.tasks.schema import TaskToml, key_line, parse_task_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, in the order in which steps run."""

    name: str
    instruction: str
    tests: Mapping[str, bytes]  # the shared `tests/` overlaid by the step's own
    solution: Mapping[str, bytes]
    workdir: Mapping[str, bytes]  # staged into the work directory before the step
    min_reward: float | Mapping[str, float] | None  # below it the remaining steps are not run
    agent_timeout_s: float | None
    verifier_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStepTask:
    """A whole multi-step task."""

    id: str
    digest: str
    reward: str  # "mean" over steps, or "final"
    steps: tuple[Step, ...]
    root: Path = field(repr=False)


def load_multi_step(folder: Path) -> MultiStepTask:
    """Read a multi-step task folder. Raises TaskError naming what is missing or broken."""
    content = read_folder(folder)
    if "task.toml" not in content:
        raise TaskError(f"{folder / 'task.toml'}: missing")
    config = parse_task_toml(_text(folder, content, "task.toml"), str(folder / "task.toml"))
    if not config.steps:
        raise TaskError(f"{folder / 'task.toml'}: has no [[steps]]: load it as a task of one step")
    return MultiStepTask(
        id=folder.name,
        digest=digest_files(content),
        reward=config.multi_step_reward_strategy or "mean",
        steps=read_steps(folder, content, config),
        root=folder,
    )


def read_steps(folder: Path, content: Mapping[str, bytes], config: TaskToml) -> tuple[Step, ...]:
    """The steps of a folder whose files were read already. Raises TaskError."""
    steps: list[Step] = []
    seen: set[str] = set()
    for row in config.steps or ():
        if row.name.casefold() in seen:
            line = key_line(_text(folder, content, "task.toml"), ("steps", str(len(steps)), "name"))
            raise TaskError(f"{folder / 'task.toml'}:{line}: step {row.name!r} occurs twice")
        seen.add(row.name.casefold())
        prefix = f"steps/{row.name}/"
        if f"{prefix}instruction.md" not in content:
            raise TaskError(f"{folder / prefix / 'instruction.md'}: missing: every step has its own instruction")
        tests = _tree(content, "tests/") | _tree(content, f"{prefix}tests/")
        if "test.sh" not in tests:
            raise TaskError(f"{folder / prefix / 'tests/test.sh'}: missing, and there is no shared tests/test.sh")
        steps.append(
            Step(
                name=row.name,
                instruction=_text(folder, content, f"{prefix}instruction.md").strip(),
                tests=tests,
                solution=_tree(content, f"{prefix}solution/"),
                workdir=_tree(content, f"{prefix}workdir/"),
                min_reward=row.min_reward,
                agent_timeout_s=row.agent.timeout_sec or config.agent.timeout_sec,
                verifier_timeout_s=row.verifier.timeout_sec,
            )
        )
    return tuple(steps)


def _tree(content: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(prefix): data for name, data in content.items() if name.startswith(prefix)}


def _text(folder: Path, content: Mapping[str, bytes], name: str) -> str:
    try:
        return content[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{folder / name}: not UTF-8 text: save it as UTF-8") from error
