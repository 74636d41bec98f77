"""The pre-training corpus: episodes of scripted operators whose commands really ran in bash.

Three kinds: *act* (a task), *plan* (a task and a messy successful transcript → a runbook), *follow* (a task and a runbook).
Training names and training chains only, so the corpus is disjoint from every reported suite by construction. Every episode
is a pure function of (seed, kind, index): the number of workers and the batch size change nothing.

The commands are ours, not a model's, so they run in plain bash, in one fresh directory per transcript; many transcripts
share one bash process, which is what makes it fast. Observations come from the harness's own `tidy`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stages.errors import RsiError
from stages.harness.observation import tidy
from stages.pretrain import operators
from stages.seeds import rng
from stages.tasks.chains import TaskSpec, draw_task
from stages.tasks.families.base import quote
from stages.tasks.names import Partition
from stages.tasks.verifier import FUNCTIONS, inline_script


class EpisodeKind(StrEnum):
    """What an episode teaches."""

    ACT = "act"  # task -> commands
    PLAN = "plan"  # task, transcript -> runbook
    FOLLOW = "follow"  # task, runbook -> commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode. `runbook` is what was written (plan) or followed (follow), empty for act."""

    kind: EpisodeKind
    instruction: str
    runbook: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]  # (command, observation); the last is ("done", "")
    success: bool  # every check passed, the gate included


SIZES = {
    EpisodeKind.ACT: (1, 1, 2, 2, 3, 4),
    EpisodeKind.PLAN: (1, 1, 2, 2, 3, 3, 4),
    EpisodeKind.FOLLOW: (1, 1, 2, 2, 3, 3, 4),
}
"""Numbers of subgoals, in turn."""

_BATCH = 24  # transcripts per bash; the script must stay under the kernel's 128 KiB per argument
_TIMEOUT_S = 120.0
_MAX_TRIES = 200  # a planner's transcript must be a success: about every second one is
_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "HOME": "/nonexistent"}
_FIELD, _RECORD = "\x1f", "\x1e"  # never in scripted output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    index: int
    spec: TaskSpec
    plan: operators.Plan
    runbook: tuple[str, ...]


def build_corpus(*, seed: int, n_act: int, n_plan: int, n_follow: int, workers: int = 2) -> list[Episode]:
    """`n_act` act episodes, then `n_plan` plan, then `n_follow` follow episodes, each group in index order.

    `workers` batches run at a time, each in a bash process of its own. Raises RsiError when bash fails or hangs.
    """
    counts = {EpisodeKind.ACT: n_act, EpisodeKind.PLAN: n_plan, EpisodeKind.FOLLOW: n_follow}
    jobs = [(kind, range(start, min(start + _BATCH, n))) for kind, n in counts.items() for start in range(0, n, _BATCH)]
    with _scratch() as scratch, ThreadPoolExecutor(max(1, workers), thread_name_prefix="corpus") as pool:
        batches = pool.map(lambda job: _build_batch(seed, job[0], job[1], Path(scratch)), jobs)
        return [episode for batch in batches for episode in batch]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")  # a tmpfs where there is one
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    return tempfile.TemporaryDirectory(prefix="rsi-corpus-", dir=memory if usable else None)


def _build_batch(seed: int, kind: EpisodeKind, indices: Sequence[int], scratch: Path) -> list[Episode]:
    done: dict[int, Episode] = {}
    for attempt in range(_MAX_TRIES):
        drafts = [_draft(seed, kind, i, attempt) for i in indices if i not in done]
        if not drafts:
            break
        scripts = [(draft.spec, draft.plan.commands) for draft in drafts]
        for draft, (turns, success) in zip(drafts, run_scripts(scripts, scratch), strict=True):
            if success or kind is not EpisodeKind.PLAN:
                done[draft.index] = Episode(
                    kind=kind,
                    instruction=draft.spec.instruction,
                    runbook=draft.runbook,
                    turns=turns,
                    success=success,
                )
    else:
        raise RsiError(
            f"corpus: no successful {kind} transcript in {_MAX_TRIES} tries: the families' commands are wrong"
        )
    return [done[i] for i in indices]


def _draft(seed: int, kind: EpisodeKind, index: int, attempt: int) -> _Draft:
    random = rng("corpus", seed, kind, index, attempt)
    size = SIZES[kind][index % len(SIZES[kind])]
    spec = draw_task(random, f"corpus-{kind}-{index}", size, Partition.TRAIN)
    runbook: tuple[str, ...] = ()
    if kind is EpisodeKind.ACT:
        plan = operators.act(spec, random)
    elif kind is EpisodeKind.PLAN:
        plan = operators.messy_act(spec, random)
        runbook = operators.runbook_of(spec, plan, random)
    else:
        runbook, plan = operators.follow(spec, random)
    return _Draft(index=index, spec=spec, plan=plan, runbook=runbook)


def run_scripts(
    scripts: Sequence[tuple[TaskSpec, tuple[str, ...]]], scratch: Path
) -> Iterator[tuple[tuple[tuple[str, str], ...], bool]]:
    """Run each (task, commands ending in `done`) in a fresh workspace: (turns, every check passed), in order."""
    root = Path(tempfile.mkdtemp(dir=scratch))
    try:
        for i in range(len(scripts)):
            (root / str(i)).mkdir()
        body = "".join(_transcript(root / str(i), spec, commands) for i, (spec, commands) in enumerate(scripts))
        output = _bash(f"umask 022\n{FUNCTIONS}\n{body}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    records = output.split(_RECORD.encode())
    if len(records) != len(scripts) + 1:
        raise RsiError(f"corpus: bash ran {len(records) - 1} of {len(scripts)} transcripts: {output[-200:]!r}")
    for (_, commands), record in zip(scripts, records, strict=False):
        *parts, verdict = record.split(_FIELD.encode())
        observed = zip(parts[0::2], parts[1::2], strict=True)
        turns = [(c, tidy(out, int(code), False)) for c, (out, code) in zip(commands[:-1], observed, strict=True)]
        yield (*turns, (operators.DONE, "")), b"0" not in verdict


def _transcript(directory: Path, spec: TaskSpec, commands: Sequence[str]) -> str:
    """Bash text: set up, run each command, judge. Prints output, exit status, …, verdict, with separators."""
    rows = [f"cd {quote(str(directory))} || exit 9"]  # never run anything elsewhere
    rows += [f"printf %s {quote(text)} >{quote(path)}" for path, text in spec.files.items()]
    for command in commands[:-1]:
        rows.append(f"{{ {command}\n}} 2>&1 </dev/null")
        rows.append(f"printf '{_FIELD}%d{_FIELD}' $?")
    rows.append(inline_script(spec.checks, spec.moded))
    rows.append(f"printf '%s{_RECORD}' \"$verdict\"\n")
    return "\n".join(rows)


def _bash(script: str) -> bytes:
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            executable="/bin/bash",
            env=_ENV,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RsiError(f"corpus: /bin/bash cannot run the transcripts: {error}") from error
    if done.returncode:
        raise RsiError(f"corpus: bash ended with status {done.returncode}: {done.stdout[-200:]!r}")
    return done.stdout
