"""Task audit: eight dimensions in four groups, and hard rejects whatever the score (spec §9).

Executable evidence comes first: what the verifier says of an untouched workspace and of the reference solution's (`task_gate`). Lints
and the text of the folder add what running cannot show. No model judges here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.backends.protocols import VerifierReport
from stages.backends.sandbox.task_gate import TaskGate
from stages.domain import CheckRole, CheckStatus, Task, Verdict
from stages.tasks.check import Problem, Severity

WEIGHTS = {"verifier": 45, "solution": 25, "instruction": 20, "task value": 10}
_SHORTCUT = re.compile(r"/logs/verifier|reward\.(?:txt|json)|ctrf\.json|/tests\b")
_NAMED_FILE = re.compile(r"[\w.-]+\.[A-Za-z]\w{0,5}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """`value` in [0, 1]; two dimensions share their group's weight equally."""

    group: str
    name: str
    value: float
    why: str  # what speaks against it; empty at 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """`score` in [0, 100]; `rejects` make a task unusable at any score."""

    task_id: str
    dimensions: tuple[Dimension, ...]
    rejects: tuple[str, ...]

    @property
    def score(self) -> float:
        return sum(WEIGHTS[d.group] / 2 * d.value for d in self.dimensions)


def audit_task(task: Task, content: Mapping[str, bytes], problems: Sequence[Problem], gate: TaskGate) -> Audit:
    """`content`: the folder's files; `problems`: of `check_task`; `gate`: of `gate_task`, two runs of the reference at least."""
    passed = [r.verdict is Verdict.PASSED for r in gate.reference]
    tells = gate.nop.verdict is Verdict.FAILED and any(passed)
    steady = len({_outcome(r) for r in gate.reference}) == 1 and gate.reference[0].verdict.counts
    installs = _lines(problems, "runtime-install")
    shortcut = _where(content, "solution/", _SHORTCUT)
    hidden = _unannounced(task, content)
    leaks = _lines(problems, "test-leak")
    tempting = _lines(problems, "hidden-path", "test-leak")
    scenarios = sum(c.role is CheckRole.SCENARIO for c in gate.nop.checks)
    work = 1 - gate.nop_progress / scenarios if scenarios else float(tells)
    loose = _lines(problems, "unpinned-image", "network") + [
        str(p) for p in problems if p.severity is Severity.ERROR and p.rule in ("unknown-key", "broken")
    ]
    said = (
        ("verifier", "tells failure from success", float(tells), "; ".join(gate.problems) or "it does not"),
        (
            "verifier",
            "says the same again, offline",
            float(steady and not installs),
            _or(installs, "the reference runs differ"),
        ),
        (
            "solution",
            "solves the task",
            sum(passed) / len(passed) if passed else 0.0,
            "no passing run of the reference",
        ),
        ("solution", "does the work itself", float(bool(passed) and not shortcut), _or(shortcut, "there is none")),
        ("instruction", "names what is checked", float(not hidden), "; ".join(hidden)),
        ("instruction", "shows nothing that agents must not have", float(not tempting), "; ".join(tempting)),
        ("task value", "leaves work to do", work, f"{gate.nop_progress} of {scenarios} checks pass for nothing"),
        ("task value", "will run the same next year", float(not loose), "; ".join(loose)),
    )
    rejects = [f"hidden requirement: {place}" for place in hidden]
    rejects += [f"test leak: {place}" for place in leaks]
    rejects += [f"solution shortcut: {place}" for place in shortcut]
    if gate.nop.verdict is Verdict.PASSED or (scenarios and gate.nop_progress == scenarios):
        rejects.append("verifier too weak: doing nothing passes every scenario check")
    dimensions = tuple(
        Dimension(group=group, name=name, value=value, why="" if value == 1 else why)
        for group, name, value, why in said
    )
    return Audit(task_id=task.id, dimensions=dimensions, rejects=tuple(rejects))


def _outcome(report: VerifierReport) -> tuple[Verdict, frozenset[tuple[str, CheckStatus]]]:
    return report.verdict, frozenset((c.id, c.status) for c in report.checks)


def _lines(problems: Sequence[Problem], *rules: str) -> list[str]:
    return [str(p) for p in problems if p.rule in rules]


def _or(found: Sequence[str], otherwise: str) -> str:
    return "; ".join(found) or otherwise


def _where(content: Mapping[str, bytes], prefix: str, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{line}: {match[0]}"
        for name, data in content.items()
        if name.startswith(prefix)
        for line, row in enumerate(data.decode("utf-8", "replace").splitlines(), 1)
        if not row.lstrip().startswith("#") and (match := pattern.search(row))
    ]


def _unannounced(task: Task, content: Mapping[str, bytes]) -> list[str]:
    """Files below the workspace that the tests name in full, and that neither the instruction nor the workspace knows."""
    known = {Path(p).name for p in task.files} | set(_NAMED_FILE.findall(task.instruction))
    found: dict[str, str] = {}
    pattern = re.compile(re.escape(task.workdir.rstrip("/")) + r"/(?:[\w.-]+/)*([\w-]+\.[A-Za-z]\w{0,5})\b")
    for name, data in content.items():
        if name.startswith("tests/"):
            for line, row in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
                for file in pattern.findall(row):
                    if file not in known and not row.lstrip().startswith("#"):
                        found.setdefault(file, f"{name}:{line}: {file} is checked and the instruction does not name it")
    return list(found.values())
