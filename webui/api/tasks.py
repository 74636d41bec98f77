"""Suites and their tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fastapi import Depends, Request

from orchestrator import models as m
from orchestrator.store.task_queries import TaskQueries
from stages.domain import Stratum
from webui.access import Action, needs
from webui.api.listing import Cursor, Found, Limit, Reader, Shape, Slice, at_once, listing, noun_router
from webui.pages.parts import RowId, missing, store_of

router = noun_router("tasks")
See = Depends(needs(Action.SEE))


class Suite(Shape):
    id: int
    name: str
    version: str
    digest: str
    split: m.Split
    n_tasks: int
    created_at: datetime


class Task(Shape):
    task_id: str
    family: str
    stratum: Stratum
    instruction: str
    digest: str
    categories: list[str]
    checks: list[dict[str, Any]]
    max_turns: int
    nop_progress: int


class TaskOutcome(Shape):
    evaluation_id: int
    checkpoint_id: int | None
    checkpoint: str
    k: int
    passed: int
    attempts: int
    verdicts: list[str]
    checks_passed: list[int]
    checks_total: int


class TaskDetail(Shape):
    """One task across checkpoints. `task`: as the newest stored version of its suite has it."""

    task: Task | None
    outcomes: list[TaskOutcome]


def suites(request: Request) -> Reader:
    return at_once(store_of(request).suites.list())


listing(router, "/suites", Suite, suites, says="Stored suite versions, by name")


@router.get("/suites/{suite_id:int}/tasks", response_model=Slice[Task], dependencies=[See])
def list_tasks(request: Request, suite_id: RowId, cursor: Cursor = None, limit: Limit = 100) -> Found:
    """By task id. The cursor is the last task's id."""
    store = store_of(request)
    if not any(s.id == suite_id for s in store.suites.list()):
        raise missing(f"suite {suite_id}")
    found = store.suites.tasks(suite_id, after=cursor or "", limit=limit)
    return Found(items=found.items, next=found.items[-1].task_id if found.next else None)


@router.get("/tasks/{pool}/{task_id:path}", response_model=TaskDetail, dependencies=[See])
def get_task(request: Request, pool: str, task_id: str) -> TaskDetail:
    store = store_of(request)
    versions: Sequence[tuple[m.Suite, m.Task]] = TaskQueries(store).versions(pool, task_id)
    measured = [(e, t) for e, t in store.evaluations.of_task(task_id) if e.suite == pool]
    if not versions and not measured:
        raise missing(f"task {task_id[:80]} in {pool[:80]}")
    return TaskDetail(
        task=Task.model_validate(versions[0][1]) if versions else None,
        outcomes=[
            TaskOutcome(
                evaluation_id=e.id or 0,
                checkpoint_id=e.checkpoint_id,
                checkpoint=e.checkpoint,
                k=e.k,
                **{n: getattr(t, n) for n in ("passed", "attempts", "verdicts", "checks_passed", "checks_total")},
            )
            for e, t in measured
        ],
    )
