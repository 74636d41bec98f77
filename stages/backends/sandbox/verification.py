"""What both backends do with a verifier's word: who is at fault when there is none, and what is said in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from stages.backends.protocols import CommandResult, VerifierReport
from stages.backends.sandbox.bundle import TaskBundle
from stages.backends.sandbox.verdict import Judgement
from stages.domain import CheckResult, CheckStatus, Task, Verdict

_PATIENCE = 3  # time limits of a verifier that a pristine image gets


class JudgedSandbox(Protocol):
    """A sandbox that can run the reference solution and give the verifier's bare word."""

    async def run_solution(self) -> CommandResult: ...

    async def judge_state(self) -> Judgement: ...

    async def close(self) -> None: ...


class PristineImages:
    """Whether a task's verifier gives a verdict on a fresh image after the reference solution; asked once per task."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def give_verdict(
        self, task: Task, bundle: TaskBundle, open_sandbox: Callable[[Task], Awaitable[JudgedSandbox]]
    ) -> bool:
        key = bundle.key
        if key not in self._known:
            async with self._asking.setdefault(key, asyncio.Lock()):
                if key not in self._known:
                    # patiently and twice: what a machine was too busy for would else be masked for ever
                    patient = replace(task, verifier_timeout_s=_PATIENCE * task.verifier_timeout_s)
                    solved = bundle.has_solution
                    first = await self._ask(patient, solved, open_sandbox)
                    self._known[key] = first or await self._ask(patient, solved, open_sandbox)
            self._asking.pop(key, None)
        return self._known[key]

    async def _ask(
        self, task: Task, has_solution: bool, open_sandbox: Callable[[Task], Awaitable[JudgedSandbox]]
    ) -> bool:
        sandbox = await open_sandbox(task)
        try:
            if has_solution:
                await sandbox.run_solution()
            return (await sandbox.judge_state()).verdict.counts
        finally:
            await sandbox.close()


async def report(
    judgement: Judgement, log: str, began: float, pristine_gives_verdict: Callable[[], Awaitable[bool]]
) -> VerifierReport:
    """Breaking the verifier does not pay: no verdict here but one on a pristine image is a failure with `broke_verifier`.

    None there either: `verifier_error`, to be masked. `began` is a `time.monotonic()`.
    """
    verdict, flags = judgement.verdict, judgement.flags
    if verdict is Verdict.NONE:
        log = f"{log}\n[no verdict: {judgement.reason}]"
        if await pristine_gives_verdict():
            verdict, flags = Verdict.FAILED, (*flags, "broke_verifier")
        else:
            verdict = Verdict.VERIFIER_ERROR
    return VerifierReport(
        verdict=verdict,
        checks=judgement.checks,
        flags=flags,
        log=log,
        duration_s=time.monotonic() - began,
        rewards=judgement.rewards,
    )


def evidence_log(planted: list[str], links: list[str]) -> str:
    """Lines for the log about what the workspace holds against the verifier; empty when nothing."""
    out = ""
    if planted:
        out += f"\n[the workspace holds files made for a test runner: {', '.join(map(_printable, planted))}]"
    if links:
        out += f"\n[links into the verifier's folders: {', '.join(map(_printable, links))}]"
    return out


def unverifiable(task: Task, why: str) -> VerifierReport:
    """What an agent made so that no verifier can look at it is its own failure, and no missing verdict."""
    checks = tuple(CheckResult(id=c.id, role=c.role, status=CheckStatus.NOT_RUN) for c in task.checks)
    return VerifierReport(
        verdict=Verdict.FAILED,
        checks=checks,
        flags=("broke_verifier",),
        log=f"[no verifier can look at this sandbox: {_printable(why)}]",
        rewards={"reward": 0.0},
    )


def _printable(name: str) -> str:
    """A name that an agent chose, for a log: no line breaks, no control characters, no bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
