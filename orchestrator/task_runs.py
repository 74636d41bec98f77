"""One task folder, one agent, real sandboxes: attempts, their checks and an exit code. What `rsi tasks run` does."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.agents import Agent
from orchestrator.attempt_log import LoggedBackend, LoggedSandbox
from orchestrator.rootfs import for_sandboxes
from orchestrator.settings import Settings
from stages.backends.protocols import Backends, CommandResult, SandboxBackend, VerifierReport
from stages.config import CycleConfig, RolloutConfig
from stages.domain import CheckResult, CheckRole, CheckStatus, EndReason, Task, Trajectory, Verdict
from stages.errors import ConfigError, ModelError, SamplerError, SandboxError, SandboxUnavailable, TaskError
from stages.harness.shell import DONE
from stages.tasks.harbor import load_task
from stages.tasks.terminal_bench import convert_task, is_terminal_bench

R = TypeVar("R")
BACKENDS = ("bubblewrap", "docker")
AT_ONCE = 8  # attempts of an agent behind a URL
PASSED, FAILED, NO_VERDICT = 0, 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step of a task of several came to."""

    name: str
    verdict: Verdict
    end: EndReason
    turns: int = 0
    checks: tuple[CheckResult, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    error: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one attempt came to."""

    number: int  # from 1
    verdict: Verdict
    end: EndReason
    checks: tuple[CheckResult, ...] = ()
    flags: tuple[str, ...] = ()
    turns: int = 0
    duration_s: float = 0.0
    error: str = ""
    log: Path | None = None
    steps: tuple[StepOutcome, ...] = ()  # in the order in which they were run; empty for a task without steps
    rewards: Mapping[str, float] = field(default_factory=dict)  # of all steps together

    @property
    def progress(self) -> int:
        """P: passed scenario checks (spec §1)."""
        return sum(c.status is CheckStatus.PASSED and c.role is CheckRole.SCENARIO for c in self.checks)

    @property
    def scenarios(self) -> int:
        return sum(c.role is CheckRole.SCENARIO for c in self.checks)


# --------------------------------------------------------------------------- before


def sandbox_backend(name: str, settings: Settings | None = None, rootfs: str | None = None) -> SandboxBackend:
    """A backend by name, not started, with this installation's root filesystems; `rootfs`: the one for tasks that name none.

    Raises ConfigError for an unknown name, SandboxUnavailable for an absent one.
    """
    known, default = for_sandboxes(settings or Settings(), rootfs)
    if name == "bubblewrap":
        from stages.backends.sandbox.bubblewrap import BubblewrapBackend

        return BubblewrapBackend(rootfs=known, default_rootfs=default)
    if name != "docker":
        raise ConfigError(f"no sandbox backend {name!r}: use {' or '.join(BACKENDS)}")
    try:
        from stages.backends.sandbox.docker import DockerBackend
    except ImportError as error:
        raise SandboxUnavailable(
            f"the Docker backend is not part of this installation ({error}): use --backend bubblewrap"
        ) from error
    backend: SandboxBackend = DockerBackend(rootfs=known, default_rootfs=default)
    return backend


@contextmanager
def loaded_task(folder: Path) -> Iterator[Task]:
    """A Harbor folder, or an original Terminal-Bench folder converted for as long as the context lasts.

    Raises TaskError naming the file that is missing or broken.
    """
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix="rsi-task-") as scratch:
        if is_terminal_bench(folder):
            folder = convert_task(folder, Path(scratch) / folder.name)
        yield load_task(folder, folder.parent.name)


def runnable(task: Task, backend: str, *, anyway: bool = False) -> Task:
    """Raises TaskError when bubblewrap would run the task in another environment than its author meant; `anyway`: let it."""
    if backend == "bubblewrap" and task.needs_docker and not anyway:
        raise TaskError(
            f"task {task.id} needs what the bubblewrap backend does not have: {'; '.join(task.needs_docker)}. "
            "Use --backend docker, a prepared root filesystem that the task names (`rsi rootfs build --help`), or --anyway to "
            "run it on what is here"
        )
    return replace(task, needs_docker=()) if anyway else task


def fresh_log_folder(folder: Path) -> Path:
    """Make the folder of a run's logs. Raises ConfigError when it holds anything, so that no log is overwritten."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder with --log")
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written; name another folder with --log")
    except OSError as error:
        raise ConfigError(f"{folder}: no folder for logs: {error.strerror}; name another folder with --log") from error
    return folder.resolve()


# --------------------------------------------------------------------------- attempts


def run_agent(task: Task, agent: Agent, sandboxes: LoggedBackend, attempts: int) -> list[Attempt]:
    """K attempts in fresh sandboxes. Raises SandboxUnavailable when there can be none, TaskError for a broken task."""

    async def every() -> list[Attempt]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Attempt:
            async with places:
                return await _attempt(task, agent, sandboxes, number)

        async with agent:
            done = await asyncio.gather(*(one(n + 1) for n in range(attempts)), return_exceptions=True)
        for result in done:  # only now: none is left running
            if isinstance(result, BaseException):
                raise result
        return [result for result in done if isinstance(result, Attempt)]

    with started(sandboxes) as run:
        return run(every())


async def _attempt(task: Task, agent: Agent, sandboxes: LoggedBackend, number: int) -> Attempt:
    began = time.monotonic()
    sandbox: LoggedSandbox | None = None
    try:
        sandbox = await sandboxes.open(task)
        end, turns = await agent.act(sandbox, task)
        sandbox.log.note(f"the agent ended: {end}")
        return _judged(number, await sandbox.verify(), end, turns, began, sandbox)
    except (SandboxError, SamplerError) as error:
        return broken(number, error, began, sandbox)
    finally:
        if sandbox is not None:
            await sandbox.close()


def run_by_hand(
    task: Task,
    sandboxes: LoggedBackend,
    *,
    read: Callable[[], str | None],
    show: Callable[[CommandResult], None],
) -> Attempt:
    """A person is the agent: each line that `read` gives is one command; None or `done` ends it.

    No event loop runs while the person thinks, so that Ctrl-C at the prompt ends the session at once.
    """
    began, turns = time.monotonic(), 0
    sandbox: LoggedSandbox | None = None
    with started(sandboxes) as run:
        try:
            sandbox = run(sandboxes.open(task))
            while (line := read()) is not None and line.strip() != DONE:
                if line.strip():
                    show(run(sandbox.run(line)))
                    turns += 1
            return _judged(1, run(sandbox.verify()), EndReason.DONE, turns, began, sandbox)
        except SandboxError as error:
            return broken(1, error, began, sandbox)
        finally:
            if sandbox is not None:
                run(sandbox.close())


def with_harness(config: CycleConfig, name: str) -> CycleConfig:
    """`config` with another harness, whose observations have the usual length."""
    rollout = config.rollout
    if name == rollout.harness:
        return config
    update = {"harness": name, "observation_chars": RolloutConfig().observation_chars}
    return config.model_copy(update={"rollout": rollout.model_copy(update=update)})


def run_model(
    task: Task,
    model: Path,
    name: str,
    config: CycleConfig,
    sandboxes: LoggedBackend,
    attempts: int,
    *,
    seed: int = 0,
    temperature: float | None = None,
) -> list[Attempt]:
    """K attempts of a model folder in `config.rollout`'s harness, sampled as `config.evaluate` says, reproducible by `seed`.

    Raises ModelError.
    """
    from stages.backends.learner.torch_learner import TorchLearner
    from stages.backends.sampler.embedded import EmbeddedSampler
    from stages.chat import Chat
    from stages.rollout import AttemptSpec, run_attempts

    chat = Chat(model)
    sampler = EmbeddedSampler(model, weight_version=name, num_threads=config.rollout.sampler_threads)
    if chat.vocab_size > sampler.vocab_size:
        raise ModelError(f"{model}: the tokenizer has {chat.vocab_size} ids, the model {sampler.vocab_size}")
    given = config.evaluate.sampling
    sampling = given.model_copy(
        update={
            "temperature": given.temperature if temperature is None else temperature,
            # one reply must leave room for the conversation, whatever the settings of larger models say
            "max_new_tokens": min(given.max_new_tokens, max(1, sampler.context_len // 4)),
        }
    )
    learner = TorchLearner(max_tokens_per_gpu=1)  # holds no model: nothing is trained here
    with Backends(sampler=sampler, learner=learner, sandbox=sandboxes) as backends:
        began = time.monotonic()
        stream = run_attempts(
            [AttemptSpec(task=task, attempt=n, key=(task.id, n)) for n in range(attempts)],
            backends=backends,
            chat=chat,
            # one wave: `open` is then called in the order of attempts, as the logs' numbers assume
            config=config.rollout.model_copy(update={"wave_size": attempts}),
            sampling=sampling,
            seed=(seed, "tasks-run"),
            namespace=name,
        )
        try:
            done = [trajectory for wave in stream for trajectory in wave]
        except SamplerError as error:
            return [broken(n + 1, error, began, None) for n in range(attempts)]
        for log, trajectory in zip(sandboxes.logs, done, strict=True):
            log.note(f"the agent ended: {trajectory.end_reason}")
    return [_of_trajectory(n + 1, t, sandboxes.logs[n].path) for n, t in enumerate(done)]


@contextmanager
def started(sandboxes: SandboxBackend) -> Iterator[Callable[[Coroutine[Any, Any, R]], R]]:
    """A started backend and the way to run coroutines on its event loop."""
    with asyncio.Runner() as runner:
        runner.run(sandboxes.start())
        try:
            yield runner.run
        finally:
            runner.run(sandboxes.aclose())


def _judged(
    number: int, report: VerifierReport, end: EndReason, turns: int, began: float, sandbox: LoggedSandbox
) -> Attempt:
    return Attempt(
        number=number,
        verdict=report.verdict,
        end=end,
        checks=report.checks,
        flags=report.flags,
        turns=turns,
        duration_s=time.monotonic() - began,
        error="" if report.verdict.counts else report.log.strip()[-1000:],
        log=sandbox.log.path,
    )


def broken(number: int, error: Exception, began: float, sandbox: LoggedSandbox | None) -> Attempt:
    if sandbox is not None:
        sandbox.log.note(f"no verdict: {error}")
    return Attempt(
        number=number,
        verdict=Verdict.INFRA_ERROR,
        end=EndReason.ERROR,
        duration_s=time.monotonic() - began,
        error=str(error),
        log=sandbox.log.path if sandbox else None,
    )


def _of_trajectory(number: int, t: Trajectory, log: Path) -> Attempt:
    return Attempt(
        number=number,
        verdict=t.verdict,
        end=t.end_reason,
        checks=t.checks,
        flags=t.flags,
        turns=len(t.turns),
        duration_s=t.duration_s,
        error="" if t.verdict.counts else t.verifier_log.strip()[-1000:],
        log=log,
    )


# --------------------------------------------------------------------------- after


def exit_code(attempts: Sequence[Attempt], need: int) -> int:
    """0: at least `need` attempts passed. 3: they did not, but could have if every attempt had a verdict. 1: else."""
    passed = sum(a.verdict is Verdict.PASSED for a in attempts)
    unknown = sum(not a.verdict.counts for a in attempts)
    if passed >= need:
        return PASSED
    return NO_VERDICT if passed + unknown >= need else FAILED


def document(
    task: Task, agent: str, backend: str, attempts: Sequence[Attempt], need: int, folder: Path
) -> dict[str, Any]:
    """The run as JSON: what `--json` prints and `result.json` holds."""
    code = exit_code(attempts, need)
    return {
        "task": task.id,
        "digest": task.digest,
        "agent": agent,
        "backend": backend,
        "verdict": {PASSED: "passed", FAILED: "failed", NO_VERDICT: "no_verdict"}[code],
        "exit_code": code,
        "passed": sum(a.verdict is Verdict.PASSED for a in attempts),
        "verdicts": sum(a.verdict.counts for a in attempts),
        "needed": need,
        "log": str(folder),
        "attempts": [
            {
                "attempt": a.number,
                "verdict": a.verdict,
                "end_reason": a.end,
                "progress": a.progress,
                "scenario_checks": a.scenarios,
                "turns": a.turns,
                "duration_s": round(a.duration_s, 3),
                "flags": list(a.flags),
                "error": a.error,
                "log": str(a.log) if a.log else None,
                "checks": [{"id": c.id, "role": c.role, "status": c.status, "message": c.message} for c in a.checks],
                **({"rewards": dict(a.rewards), "steps": [_step(s) for s in a.steps]} if a.steps else {}),
            }
            for a in attempts
        ],
    }


def _step(step: StepOutcome) -> dict[str, Any]:
    return {
        "step": step.name,
        "verdict": step.verdict,
        "end_reason": step.end,
        "turns": step.turns,
        "rewards": dict(step.rewards),
        "flags": list(step.flags),
        "error": step.error,
        "duration_s": round(step.duration_s, 3),
    }
