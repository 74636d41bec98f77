"""What a task must show before anybody trains on it: doing nothing fails, the reference solution passes, twice.

`nop_progress` is the number of scenario checks that pass when nothing is done: easy checks to farm. It is measured, shown, and
what `progress: net_of_nop` subtracts (spec §1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stages.backends.protocols import CommandResult, Sandbox, VerifierReport
from stages.domain import CheckRole, CheckStatus, Task, Verdict


class SolvableSandbox(Sandbox, Protocol):
    async def run_solution(self) -> CommandResult: ...


class SolvableBackend(Protocol):
    """Both of our backends."""

    async def open(self, task: Task) -> SolvableSandbox: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGate:
    """`problems` is empty for a task that may be used; each says what to change."""

    task_id: str
    nop: VerifierReport
    reference: tuple[VerifierReport, ...]
    problems: tuple[str, ...]

    @property
    def nop_progress(self) -> int:
        """Scenario checks that pass when nothing is done."""
        return sum(c.role is CheckRole.SCENARIO and c.status is CheckStatus.PASSED for c in self.nop.checks)


async def gate_task(backend: SolvableBackend, task: Task, *, repeats: int = 2) -> TaskGate:
    """Runs the verifier without a network on the untouched image and, `repeats` times, after the reference solution."""
    sandbox = await backend.open(task)
    try:
        nop = await sandbox.verify()
    finally:
        await sandbox.close()
    problems = []
    if nop.verdict is not Verdict.FAILED:
        problems.append(f"doing nothing gives {nop.verdict}, not failed: the verifier must tell the two apart")
    reference = []
    if (task.root / "solution" / "solve.sh").is_file():
        for number in range(repeats):
            sandbox = await backend.open(task)
            try:
                solved = await sandbox.run_solution()
                reference.append(await sandbox.verify())
            finally:
                await sandbox.close()
            problems += _of_reference(number + 1, solved, reference[-1])
    else:
        problems.append(f"{task.root / 'solution' / 'solve.sh'} is missing: nothing shows that the task can be solved")
    return TaskGate(task_id=task.id, nop=nop, reference=tuple(reference), problems=tuple(problems))


def _of_reference(number: int, solved: CommandResult, report: VerifierReport) -> list[str]:
    if report.verdict is Verdict.PASSED:
        return []
    missing = [f"{c.id} {c.status}" for c in report.checks if c.status is not CheckStatus.PASSED]
    why = f"flags {', '.join(report.flags)}; " if report.flags else ""
    if "result_rewritten" in report.flags:
        why += "the verifier must write each result file once, at its end, or as often whatever it finds; "
    why += f"not passed: {', '.join(missing[:8])}; " if missing else ""
    tail = (report.log or solved.output.decode("utf-8", "replace"))[-400:].strip()
    return [
        f"run {number} of the reference solution gives {report.verdict} (solve.sh exit {solved.exit_code}): {why}{tail}"
    ]
