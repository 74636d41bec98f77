"""What both backends do with a verifier's word: who is at fault when there is none, and what is said in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
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
    """What a task's verifier says on a fresh image, untouched or after the reference solution; asked once per task."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], Judgement] = {}
        self._asking: dict[tuple[str, bool], asyncio.Lock] = {}

    async def judgement(
        self,
        task: Task,
        bundle: TaskBundle,
        open_sandbox: Callable[[Task], Awaitable[JudgedSandbox]],
        *,
        solved: bool,
    ) -> Judgement:
        """`solved` where there is a solution."""
        solved = solved and bundle.has_solution
        key = (bundle.key, solved)
        if key not in self._known:
            async with self._asking.setdefault(key, asyncio.Lock()):
                if key not in self._known:
                    # patiently and twice: what a machine was too busy for would else be masked for ever
                    patient = replace(task, verifier_timeout_s=_PATIENCE * task.verifier_timeout_s)
                    said = await self._ask(patient, solved, open_sandbox)
                    if not said.verdict.counts:
                        said = await self._ask(patient, solved, open_sandbox)
                    self._known[key] = said
            self._asking.pop(key, None)
        return self._known[key]

    async def _ask(
        self, task: Task, solved: bool, open_sandbox: Callable[[Task], Awaitable[JudgedSandbox]]
    ) -> Judgement:
        sandbox = await open_sandbox(task)
        try:
            if solved:
                await sandbox.run_solution()
            return await sandbox.judge_state()
        finally:
            await sandbox.close()


class OnPristineImage(Protocol):
    """`PristineImages.judgement` of one task."""

    async def __call__(self, *, solved: bool) -> Judgement: ...


async def report(
    judgement: Judgement, log: str, began: float, pristine: OnPristineImage, *, solvable: bool
) -> VerifierReport:
    """Breaking the verifier does not pay: no verdict here but one on a pristine image is a failure with `broke_verifier`.

    None there either: `verifier_error`, to be masked. `began` is a `time.monotonic()`; `solvable`: a pristine
    image can be solved.
    """
    if judgement.written_so is not None and solvable and await _writes_so(judgement.rewritten, pristine):
        judgement = judgement.written_so
    verdict, flags = judgement.verdict, judgement.flags
    if verdict is Verdict.NONE:
        log = f"{log}\n[no verdict: {judgement.reason}]"
        if (await pristine(solved=True)).verdict.counts:
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


async def _writes_so(rewritten: Mapping[str, int], pristine: OnPristineImage) -> bool:
    """Whether the verifier itself writes its result files so often, whatever it finds.

    One that writes once more for a success does not: there a program of the agent's could add what is missing.
    """
    usual = [(await pristine(solved=solved)).rewritten for solved in (True, False)]
    return all(usual[0].get(n, 1) == usual[1].get(n, 1) >= times for n, times in rewritten.items())


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
