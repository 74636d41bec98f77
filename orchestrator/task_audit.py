"""The audit of one task folder (spec §9) with evidence from real sandboxes: what `rsi tasks audit` does."""

from __future__ import annotations

from typing import cast

from orchestrator.task_runs import started
from stages.backends.protocols import SandboxBackend
from stages.backends.sandbox.task_gate import SolvableBackend, gate_task
from stages.domain import Task
from stages.tasks.audit import Audit, audit_task
from stages.tasks.check import check_task
from stages.tasks.digests import read_folder


def audited(task: Task, sandboxes: SandboxBackend) -> Audit:
    """Three sandboxes: untouched, and twice after the reference solution. Raises SandboxUnavailable where there can be none."""
    with started(sandboxes) as run:
        gate = run(gate_task(cast(SolvableBackend, sandboxes), task))
    return audit_task(task, read_folder(task.root), check_task(task.root), gate)
