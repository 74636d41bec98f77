"""Suites, pools and their tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Page, Repository
from orchestrator.store.connection import clean_text
from stages.domain import Task


class Suites(Repository):
    def register(
        self, name: str, digest: str, split: m.Split, tasks: Sequence[Task], *, version: str = "1", path: str = ""
    ) -> m.Suite:
        """Store a suite version and its tasks, unless this digest is known. A changed suite becomes a new row."""
        values = {
            "name": name,
            "version": version,
            "digest": digest,
            "split": split,
            "n_tasks": len(tasks),
            "path": path,
        }
        rows = [
            {
                "task_id": task.id,
                "family": task.family,
                "stratum": task.stratum,
                "instruction": clean_text(task.instruction),
                "digest": task.digest,
                "categories": list(task.categories),
                "checks": [asdict(check) for check in task.checks],
                "max_turns": task.max_turns,
                "nop_progress": task.nop_progress,
                "path": str(task.root),
            }
            for task in tasks
        ]
        with self._session() as session:
            session.execute(insert(m.Suite).values(values).on_conflict_do_nothing())
            suite = (
                session.execute(select(m.Suite).where(col(m.Suite.name) == name, col(m.Suite.digest) == digest))
                .scalars()
                .one()
            )
            if rows:
                add = insert(m.Task).on_conflict_do_nothing()
                session.execute(add, [row | {"suite_id": suite.id} for row in rows])
            return suite

    def named(self, name: str, digest: str | None = None) -> m.Suite | None:
        """The suite with this digest, or its newest version."""
        query = select(m.Suite).where(col(m.Suite.name) == name).order_by(col(m.Suite.id).desc())
        if digest is not None:
            query = query.where(col(m.Suite.digest) == digest)
        with self._session() as session:
            return session.execute(query).scalars().first()

    def list(self) -> Sequence[m.Suite]:
        with self._session() as session:
            return session.execute(select(m.Suite).order_by(col(m.Suite.name), col(m.Suite.id))).scalars().all()

    def task(self, suite: str, task_id: str) -> m.Task | None:
        """The task as its suite's newest version has it."""
        query = (
            select(m.Task)
            .join(m.Suite, col(m.Suite.id) == col(m.Task.suite_id))
            .where(col(m.Suite.name) == suite, col(m.Task.task_id) == task_id)
            .order_by(col(m.Suite.id).desc())
        )
        with self._session() as session:
            return session.execute(query).scalars().first()

    def tasks(self, suite_id: int, *, after: str = "", limit: int = 1000) -> Page[m.Task]:
        """Tasks in order of id, those after `after`. `next` only says that there are more."""
        query = select(m.Task).where(col(m.Task.suite_id) == suite_id, col(m.Task.task_id) > after)
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.Task.task_id)).limit(limit + 1)).scalars().all()
        return Page(items=rows[:limit], next=limit if len(rows) > limit else None)

    def suite_of(self, task_ids: Sequence[str]) -> dict[str, str]:
        """Task id -> name of the suite that holds it, the newest where several do; unknown tasks are left out."""
        query = (
            select(col(m.Task.task_id), func.max(col(m.Suite.id)))
            .join(m.Suite, col(m.Suite.id) == col(m.Task.suite_id))
            .where(col(m.Task.task_id).in_(task_ids))
            .group_by(col(m.Task.task_id))
        )
        with self._session() as session:
            newest = dict(session.execute(query).tuples().all())
            query_names = select(col(m.Suite.id), col(m.Suite.name)).where(col(m.Suite.id).in_(set(newest.values())))
            names = dict(session.execute(query_names).tuples().all())
        return {task_id: names[suite_id] for task_id, suite_id in newest.items()}
