"""Multi-step Harbor tasks: `[[steps]]` in task.toml, one folder below `steps/` each, one environment for all.

`step_tasks` makes a task of each step; `orchestrator.step_runs` runs them one after another in one sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stages.domain import Task
from stages.errors import TaskError
from stages.tasks.harbor import build_task
from stages.tasks.schema import Healthcheck, TaskToml, Verifier, key_line
from stages.tasks.schema import Step as StepToml


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
                verifier_timeout_s=_verifier(config, row).timeout_sec,
            )
        )
    return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """One step as a task of its own, for a sandbox that all steps share."""

    name: str
    task: Task  # its files are those of the image and of every step so far
    staged: Mapping[str, bytes]  # put into the work directory before the step
    min_reward: Mapping[str, float]  # reward name → what it must reach for the next step to run; empty: no condition
    healthcheck: Healthcheck | None  # what must succeed before the step's agent begins


def step_tasks(
    folder: Path, suite: str, content: Mapping[str, bytes], config: TaskToml, place: Path
) -> tuple[StepTask, ...]:
    """Each step as a task whose folder lies below `place`. Raises TaskError for what cannot be run."""
    out: list[StepTask] = []
    files: dict[str, bytes] = {}
    for number, (step, row) in enumerate(zip(read_steps(folder, content, config), config.steps or (), strict=True)):
        root = place / str(number)
        own = {
            **{name: data for name, data in content.items() if name == "task.toml" or name.startswith("environment/")},
            "instruction.md": content[f"steps/{step.name}/instruction.md"],
            **{f"tests/{name}": data for name, data in step.tests.items()},
            **{f"solution/{name}": data for name, data in step.solution.items()},
        }
        _lay_out(root, own)
        agent = config.agent.model_copy(update={"timeout_sec": step.agent_timeout_s})
        update = {"steps": None, "agent": agent, "verifier": _verifier(config, row)}
        task = build_task(folder, suite, own, config.model_copy(update=update))
        files = {**(files or task.files), **step.workdir}
        prefix = f"{step.name}/"  # a manifest names the checks of all steps, STEP/CHECK
        checks = [replace(c, id=c.id.removeprefix(prefix)) for c in task.checks if c.id.startswith(prefix)]
        condition = step.min_reward if isinstance(step.min_reward, Mapping) else {"reward": step.min_reward}
        out.append(
            StepTask(
                name=step.name,
                task=replace(task, id=f"{folder.name}/{step.name}", root=root, files=files, checks=tuple(checks)),
                staged=step.workdir,
                min_reward={k: v for k, v in condition.items() if v is not None},
                healthcheck=row.healthcheck,
            )
        )
    return tuple(out)


def _verifier(config: TaskToml, row: StepToml) -> Verifier:
    """A step's verifier: what it does not say is the task's."""
    said = {name: getattr(row.verifier, name) for name in row.verifier.model_fields_set}
    env = {"env": {**config.verifier.env, **row.verifier.env}}
    return config.verifier.model_copy(update=said | env)


def _lay_out(root: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if data.startswith(b"#!") else 0o644)


def _tree(content: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(prefix): data for name, data in content.items() if name.startswith(prefix)}


def _text(folder: Path, content: Mapping[str, bytes], name: str) -> str:
    try:
        return content[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{folder / name}: not UTF-8 text: save it as UTF-8") from error
