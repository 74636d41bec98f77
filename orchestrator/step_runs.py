"""Tasks of several steps in one sandbox: instruction, agent and verifier per step, early stop, and one result, as Harbor does.

Each verifier sees a copy of the state in a sandbox of its own: no step's tests are ever near the agent.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.agents import Agent, Oracle
from orchestrator.attempt_log import LoggedBackend, LoggedSandbox
from orchestrator.task_runs import AT_ONCE, Attempt, StepOutcome, broken, started
from stages.domain import CheckResult, CheckStatus, EndReason, Task, Verdict
from stages.errors import SamplerError, SandboxError, TaskError
from stages.tasks.digests import digest_files, read_folder
from stages.tasks.schema import Healthcheck, parse_task_toml
from stages.tasks.steps import StepTask, step_tasks

CHUNK = 24_000  # bytes per command that writes a file into the work directory
SETUP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTask:
    task: Task  # the first step's, under the whole task's name: what the sandbox is opened with
    steps: tuple[StepTask, ...]
    strategy: str  # "mean" over the steps that have a verdict, or "final"


@contextmanager
def loaded_steps(folder: Path) -> Iterator[SteppedTask | None]:
    """The steps of a task folder, for as long as the context lasts; None when it has none. Raises TaskError."""
    folder = folder.resolve()
    content = read_folder(folder) if (folder / "task.toml").is_file() else {}
    try:
        text = content.get("task.toml", b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{folder / 'task.toml'}: not UTF-8 text: save it as UTF-8") from error
    config = parse_task_toml(text, str(folder / "task.toml"))
    if not config.steps:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rsi-steps-") as place:
        steps = step_tasks(folder, folder.parent.name, content, config, Path(place))
        whole = replace(steps[0].task, id=folder.name, digest=digest_files(content))
        yield SteppedTask(task=whole, steps=steps, strategy=config.multi_step_reward_strategy or "mean")


def run_steps(plan: SteppedTask, agent: Agent, sandboxes: LoggedBackend, attempts: int) -> list[Attempt]:
    """K attempts at all steps. Raises SandboxUnavailable when there can be none, TaskError for a broken task."""

    async def every() -> list[Attempt]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Attempt:
            async with places:
                return await _attempt(plan, agent, sandboxes, number)

        async with agent, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(n + 1)) for n in range(attempts)]
        return [task.result() for task in tasks]

    with started(sandboxes) as run:
        try:
            return run(every())
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from error


async def _attempt(plan: SteppedTask, agent: Agent, sandboxes: LoggedBackend, number: int) -> Attempt:
    began = time.monotonic()
    sandbox: LoggedSandbox | None = None
    outcomes: list[StepOutcome] = []
    try:
        sandbox = await sandboxes.open(plan.task)
        for n, step in enumerate(plan.steps):
            sandbox.log.note(f"step {n + 1} of {len(plan.steps)}: {step.name}")
            outcomes.append(await _step(step, agent, sandbox, first=n == 0))
            if stop := _stop(step, outcomes[-1]):
                sandbox.log.note(f"the steps after {step.name} are not run: {stop}")
                break
        return _judged(plan, outcomes, number, began, sandbox)
    except (SandboxError, SamplerError) as error:
        return replace(broken(number, error, began, sandbox), steps=tuple(outcomes))
    finally:
        if sandbox is not None:
            await sandbox.close()


async def _step(step: StepTask, agent: Agent, sandbox: LoggedSandbox, *, first: bool) -> StepOutcome:
    began = time.monotonic()
    if problem := await _prepare(step, sandbox, first=first):
        if first:
            raise SandboxError(f"{problem} (no agent has acted: the task itself is at fault)")
        return StepOutcome(
            name=step.name,
            verdict=Verdict.FAILED,
            end=EndReason.ERROR,
            error=problem,
            rewards={"reward": 0.0},
            duration_s=time.monotonic() - began,
        )
    if isinstance(agent, Oracle):
        result = await sandbox.run_solution(step.task)
        end, turns = EndReason.TIME_LIMIT if result.timed_out else EndReason.DONE, 0
    else:
        end, turns = await _act(agent, sandbox, step.task, first=first)
    sandbox.log.note(f"the agent ended: {end}")
    report = await sandbox.check(step.task)
    return StepOutcome(
        name=step.name,
        verdict=report.verdict,
        end=end,
        turns=turns,
        checks=report.checks,
        rewards=dict(report.rewards) or ({"reward": 0.0} if report.verdict.counts else {}),
        flags=report.flags,
        error="" if report.verdict.counts else report.log.strip()[-1000:],
        duration_s=time.monotonic() - began,
    )


async def _act(agent: Agent, sandbox: LoggedSandbox, task: Task, *, first: bool) -> tuple[EndReason, int]:
    try:
        return await agent.act(sandbox, task)
    except SandboxError as error:
        if first or (await sandbox.run("(true)", timeout_s=SETUP_S)).exit_code is None:
            raise
        # a sandbox that answers, in which a harness could start before: what the agent did there keeps it from starting now
        sandbox.log.note(f"the agent could not act: {error}")
        return EndReason.DONE, 0


async def _prepare(step: StepTask, sandbox: LoggedSandbox, *, first: bool) -> str:
    """The step's files into the work directory, then its `setup.sh` and its healthcheck. Answers what went wrong there.

    Written by the agent's own shell, in the jail: no link that it laid can lead the writing anywhere else.
    """
    workdir = step.task.workdir
    for name, data in {} if first else step.staged.items():  # the first step's are in the sandbox already
        path = shlex.quote(f"{workdir}/{name}")
        parent = shlex.quote(str(Path(f"{workdir}/{name}").parent))
        mode = "755" if data.startswith(b"#!") else "644"
        script = [f"mkdir -p -- {parent} && : > {path} && chmod {mode} {path}"]
        for at in range(0, len(data), CHUNK):
            script.append(f"printf %s {base64.b64encode(data[at : at + CHUNK]).decode()} | base64 -d >> {path}")
        for command in script:
            result = await sandbox.run(f"({command})", timeout_s=SETUP_S)
            if result.exit_code != 0:
                return f"{name} could not be put into {workdir}: {_tail(result.output)}"
    if "setup.sh" in step.staged:
        result = await sandbox.run(f"(cd {shlex.quote(workdir)} && bash setup.sh)", timeout_s=SETUP_S)
        if result.exit_code != 0:
            return f"setup.sh of step {step.name} ended with {result.exit_code}: {_tail(result.output)}"
    return await _unhealthy(step.healthcheck, step, sandbox) if step.healthcheck else ""


async def _unhealthy(check: Healthcheck, step: StepTask, sandbox: LoggedSandbox) -> str:
    """Tries the command as Docker does: failures in the start period do not count, then so many in a row. Empty: it succeeded."""
    command = f"(cd {shlex.quote(step.task.workdir)} && bash -c {shlex.quote(check.command)})"
    began, failures = time.monotonic(), 0
    while True:
        result = await sandbox.run(command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            return ""
        starting = time.monotonic() - began < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            said = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
            return f"the healthcheck of step {step.name} {said}, {failures} times in a row: {_tail(result.output)}"
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


def _tail(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()[-300:]


def _stop(step: StepTask, outcome: StepOutcome) -> str:
    """Why the next steps are not run; empty when they are."""
    if not outcome.verdict.counts:
        return f"it has no verdict ({outcome.verdict})"
    if outcome.end is EndReason.ERROR:
        return outcome.error
    for name, wanted in step.min_reward.items():
        got = outcome.rewards.get(name, float("-inf"))
        if got < wanted:
            return f"{name} {got:g} is below min_reward {wanted:g}"
    return ""


def _judged(
    plan: SteppedTask, outcomes: Sequence[StepOutcome], number: int, began: float, sandbox: LoggedSandbox
) -> Attempt:
    whole = len(outcomes) == len(plan.steps)
    masked = [o for o in outcomes if not o.verdict.counts]
    deciding = outcomes[-1:] if plan.strategy == "final" else outcomes
    passed = whole and all(o.verdict is Verdict.PASSED for o in deciding)
    checks = [replace(c, id=f"{o.name}/{c.id}") for o in outcomes for c in o.checks]
    for step in plan.steps[len(outcomes) :]:
        checks += [
            CheckResult(
                id=f"{step.name}/{c.id}", role=c.role, status=CheckStatus.NOT_RUN, message="the step was not run"
            )
            for c in step.task.checks
        ]
    return Attempt(
        number=number,
        verdict=masked[0].verdict if masked else Verdict.PASSED if passed else Verdict.FAILED,
        end=outcomes[-1].end,
        checks=tuple(checks),
        flags=tuple(dict.fromkeys(f for o in outcomes for f in o.flags)),
        turns=sum(o.turns for o in outcomes),
        duration_s=time.monotonic() - began,
        error=next((o.error for o in outcomes if o.error), ""),
        log=sandbox.log.path,
        steps=tuple(outcomes),
        rewards=_aggregated(plan.strategy, [o.rewards for o in outcomes if o.verdict.counts]),
    )


def _aggregated(strategy: str, rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`mean`: per name over the steps with a verdict, a missing name counts 0; `final`: the last step's."""
    if not rewards:
        return {}
    if strategy == "final":
        return dict(rewards[-1])
    names = {name for row in rewards for name in row}
    return {name: sum(row.get(name, 0.0) for row in rewards) / len(rewards) for name in sorted(names)}
