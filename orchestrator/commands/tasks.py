"""`rsi tasks check | audit | convert | run`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import terminal
from orchestrator.commands.task_audit import audit

if TYPE_CHECKING:
    from orchestrator.agents import Agent
    from orchestrator.attempt_log import LoggedBackend
    from orchestrator.step_runs import SteppedTask
    from orchestrator.task_runs import Attempt
    from stages.backends.protocols import CommandResult
    from stages.domain import Task

app = typer.Typer(
    name="tasks",
    help="Check and run task folders (Harbor, Terminal-Bench). Pools are written by `rsi suite generate`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
CHECKPOINT = "checkpoint:"
_plain = terminal.plain


@app.command()
def check(
    folder: Annotated[
        Path, typer.Argument(help="A task folder, or a folder of them.", show_default=False, metavar="DIR")
    ],
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Lint task folders strictly, without running them: what is broken, leaks, or will not repeat.

    One line each: `path:line: severity: rule: message`. Exit code 1 when there is an error; warnings and notes alone give 0.

    Examples:

        rsi tasks check ./fix-git

        rsi tasks check ./my-suite --json
    """
    from stages.tasks.check import Severity, check_suite, check_task
    from stages.tasks.terminal_bench import is_terminal_bench

    found = check_task(folder) if is_terminal_bench(folder) else check_suite(folder)
    counts = {severity: sum(p.severity is severity for p in found) for severity in Severity}
    out = terminal.console()
    if json:
        import json as codec

        problems = [
            {
                "severity": p.severity,
                "rule": p.rule,
                "path": _plain(str(p.path)),
                "line": p.line or None,  # none where the whole file is meant, or is missing
                "message": _plain(p.message),
            }
            for p in found
        ]
        print(codec.dumps({"folder": str(folder), **{f"{s}s": n for s, n in counts.items()}, "problems": problems}))
    else:
        for problem in found:
            out.print(_plain(str(problem)))
        out.print(", ".join(f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items()) + ".")
    raise typer.Exit(1 if counts[Severity.ERROR] else 0)


app.command()(audit)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="An original Terminal-Bench task folder.", show_default=False, metavar="SOURCE")
    ],
    folder: Annotated[Path, typer.Argument(help="New folder to write to.", show_default=False, metavar="DIR")],
) -> None:
    """Write an original Terminal-Bench task in Harbor layout. `rsi tasks run` takes both.

    Example:

        rsi tasks convert ./terminal-bench/play-zork ./suite/play-zork
    """
    from stages.tasks.terminal_bench import convert_task

    terminal.console().print(f"Written to {convert_task(source, folder)}.")


@app.command()
def run(
    folder: Annotated[
        Path, typer.Argument(help="Task folder: Harbor, or original Terminal-Bench.", show_default=False, metavar="DIR")
    ],
    agent: Annotated[
        str,
        typer.Option(
            help="oracle, nop, shell, checkpoint:ID, a model folder, or the URL of an OpenAI-compatible endpoint.",
            show_default=False,
        ),
    ],
    harness: Annotated[
        str,
        typer.Option(help="How a model acts: shell (one command a turn) or terminus2 (keystrokes as JSON, in tmux)."),
    ] = "shell",
    attempts: Annotated[int, typer.Option(min=1, max=1000, metavar="K", help="Attempts in fresh sandboxes.")] = 1,
    need: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Attempts that must pass for exit code 0.", show_default="K")
    ] = None,
    backend: Annotated[str, typer.Option(help="bubblewrap or docker.")] = "bubblewrap",
    rootfs: Annotated[
        str | None,
        typer.Option(
            help="Root filesystem for a task that names none (`rsi rootfs`).",
            show_default="$RSI_ROOTFS, else this machine's",
            metavar="NAME|DIR",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name at the URL.", show_default="the only one it lists")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="Of a model's sampling.", show_default="the checkpoint's, or the endpoint's"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="First message to a URL, with `{instruction}` in it.", show_default="the harness's"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of a checkpoint's sampling.")] = 0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Run in bubblewrap even where the task's image holds more.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Only one JSON document on standard output.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            help="New folder for full logs and result.json.", show_default="task-runs/ under --home", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Run one task in a real sandbox and show every check of its verifier.

    `oracle` runs the task's solution, `nop` does nothing, `shell` gives you the sandbox line by line (Ctrl-D or `done`
    ends it and verifies). Models get one command a turn, or with `--harness terminus2` a terminal. A key for a URL is read from OPENAI_API_KEY and never logged.

    A task of several steps runs them one after another in one sandbox (oracle, nop or a URL), each with its own
    verifier, until one misses its min_reward.

    The exit code is the verdict: 0 passed, 1 failed, 3 no verdict (sandbox, model or verifier broke), 2 could not start.

    Examples:

        rsi tasks run ./fix-git --agent oracle

        rsi tasks run ./fix-git --agent checkpoint:3/RPR-2 --attempts 8 --need 4 --json

        OPENAI_API_KEY=… rsi tasks run ./fix-git --agent https://llm.example/v1 --model NAME --temperature 0.6
    """
    from orchestrator import step_runs, task_runs
    from orchestrator.attempt_log import LoggedBackend
    from orchestrator.chat_endpoint import address
    from stages.errors import ConfigError

    needed = attempts if need is None else need
    if needed > attempts:
        raise ConfigError(f"--need {needed} of --attempts {attempts} cannot pass")
    if agent == "shell" and attempts > 1:
        raise ConfigError("--agent shell is one person's one attempt; leave --attempts out")
    with contextlib.ExitStack() as scratch:
        steps = scratch.enter_context(step_runs.loaded_steps(folder))
        loaded = steps.task if steps else scratch.enter_context(task_runs.loaded_task(folder))
        task = task_runs.runnable(loaded, backend, anyway=anyway)
        start = _agent(agent, task, attempts, model, temperature, prompt, seed, harness, steps, quiet=json)
        sandboxes = task_runs.sandbox_backend(backend, terminal.settings(), rootfs)
        place = task_runs.fresh_log_folder(log or _default_log(task.id))
        done = start(LoggedBackend(sandboxes, place))
    shown = address(agent) if "://" in agent else agent
    result = task_runs.document(task, shown, backend, done, needed, place)
    text = _write_result(result, place)
    if json:
        print(text)
    else:
        _print_result(result, done)
    raise typer.Exit(result["exit_code"])


def _agent(
    agent: str,
    task: Task,
    attempts: int,
    model: str | None,
    temperature: float | None,
    prompt: str | None,
    seed: int,
    harness: str,
    steps: SteppedTask | None,
    *,
    quiet: bool,
) -> Callable[[LoggedBackend], Sequence[Attempt]]:
    """What to do with the sandboxes. Everything that can be wrong with the options is found here, before any starts."""
    from orchestrator import task_runs
    from stages.errors import ConfigError

    if harness not in ("shell", "terminus2"):
        raise ConfigError(f"--harness {harness!r} is nothing known: shell or terminus2")
    if harness == "terminus2" and prompt is not None:
        raise ConfigError("--prompt has no meaning for --harness terminus2: its first message states its protocol")
    remote = "://" in agent
    if harness != "shell" and not remote and agent in ("oracle", "nop", "shell"):
        raise ConfigError(f"--harness has no meaning for --agent {agent}; leave it out")
    for option, value, fits in (
        ("--model", model, remote),
        ("--prompt", prompt, remote),
        ("--temperature", temperature, remote or agent not in ("oracle", "nop", "shell")),
    ):
        if value is not None and not fits:
            raise ConfigError(f"{option} has no meaning for --agent {agent}; leave it out")
    if steps is not None and not remote and agent not in ("oracle", "nop"):
        raise ConfigError(
            f"--agent {agent} cannot do tasks of several steps: use oracle, nop, or the URL of a model (`rsi serve` gives a "
            "checkpoint one)"
        )

    def run_with(acts: Agent) -> Callable[[LoggedBackend], Sequence[Attempt]]:
        if steps is not None:
            from orchestrator import step_runs

            return lambda sandboxes: step_runs.run_steps(steps, acts, sandboxes, attempts)
        return lambda sandboxes: task_runs.run_agent(task, acts, sandboxes, attempts)

    if agent in ("oracle", "nop"):
        from orchestrator.agents import Nop, Oracle

        return run_with(Oracle() if agent == "oracle" else Nop())
    if agent == "shell":
        to = sys.stderr if quiet else sys.stdout
        print(f"{_plain(task.instruction)}\n\nCtrl-D or `done` ends the attempt and verifies it.", file=to)
        return lambda sandboxes: [task_runs.run_by_hand(task, sandboxes, read=_read_line, show=_shower(quiet))]
    if remote:
        import os

        from orchestrator.agents import RemoteAgent
        from orchestrator.chat_endpoint import KEY_VARIABLE, ChatEndpoint
        from stages.chat import Prompts
        from stages.config import RolloutConfig

        if prompt is not None and "{instruction}" not in prompt:
            raise ConfigError("--prompt holds no {instruction}: the model would not see the task")
        endpoint = ChatEndpoint(agent, model=model, temperature=temperature, key=os.environ.get(KEY_VARIABLE))
        rollout = RolloutConfig.model_validate({"harness": harness})
        speaks = RemoteAgent(endpoint, config=rollout, prompt=prompt or Prompts().act)
        return run_with(speaks)
    from orchestrator.commands.serve import named_model

    stored = agent.startswith(CHECKPOINT)
    if not stored and not Path(agent).expanduser().is_dir():
        raise ConfigError(
            f"--agent {agent!r} is nothing known: oracle, nop, shell, {CHECKPOINT}ID, a model folder, or http(s)://…"
        )
    found = named_model(agent.removeprefix(CHECKPOINT), folders=not stored)
    config = task_runs.with_harness(found.config(), harness)
    return lambda sandboxes: task_runs.run_model(
        task, found.folder, found.name, config, sandboxes, attempts, seed=seed, temperature=temperature
    )


# --------------------------------------------------------------------------- a person's shell


def _read_line() -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history for input()
    try:
        if sys.stdin.isatty():
            print("sandbox$ ", end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        return None


def _shower(quiet: bool) -> Callable[[CommandResult], None]:
    def show(result: CommandResult) -> None:
        to = sys.stderr if quiet else sys.stdout
        text = _plain(result.output.decode("utf-8", "replace"))
        print(text, end="" if not text or text.endswith("\n") else "\n", file=to)
        if result.truncated_bytes:
            print(f"[{result.truncated_bytes} bytes left out]", file=to)
        if result.timed_out:
            print("[timed out]", file=to)
        elif result.exit_code != 0:
            print(f"[exit {'none: the shell ended' if result.exit_code is None else result.exit_code}]", file=to)
        if result.restarted:
            print("[the shell was started anew; folder and environment were kept]", file=to)
        to.flush()

    return show


# --------------------------------------------------------------------------- output


def _default_log(task_id: str) -> Path:
    import os
    from datetime import datetime

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return terminal.settings().home / "task-runs" / f"{task_id}-{now}-{os.getpid()}"


def _write_result(result: dict[str, object], place: Path) -> str:
    import json as codec

    text = codec.dumps(result, indent=2)
    try:
        (place / "result.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"warning: {place / 'result.json'} was not written: {error.strerror}", file=sys.stderr)
    return text


def _print_result(result: dict[str, object], attempts: Sequence[Attempt]) -> None:
    out = terminal.console()
    rows = terminal.table("Attempt", "Check", "Role", "Status", "Message", right=("Attempt",))
    for attempt in attempts:
        for c in attempt.checks:
            rows.add_row(str(attempt.number), _plain(c.id), c.role, c.status, _plain(c.message).strip()[:200])
    if rows.row_count:
        out.print(rows)
    else:
        out.print("The verifier reports no single checks.")
    out.print()
    for a in attempts:
        score = f", {a.progress}/{a.scenarios} scenario checks" if a.scenarios else ""
        flags = f", flags: {', '.join(a.flags)}" if a.flags else ""
        out.print(
            f"attempt {a.number}: {a.verdict}{score}, ended by {a.end}, {a.turns} turns, {a.duration_s:.1f} s{flags}"
        )
        for step in a.steps:
            rewards = ", ".join(f"{name} {value:g}" for name, value in sorted(step.rewards.items())) or "no reward"
            out.print(_plain(f"  step {step.name}: {step.verdict}, {rewards}, {step.turns} turns"))
        if a.error:
            out.print(_plain(f"  {a.error}"))
    needed = f" ({result['needed']} needed)" if len(attempts) > 1 else ""
    out.print(
        f"{result['task']}: {str(result['verdict']).replace('_', ' ')}, {result['passed']} of {len(attempts)} passed{needed}."
    )
    out.print(f"Log: {result['log']}")
