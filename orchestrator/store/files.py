"""The index of artifacts."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.artifacts import Stored
from orchestrator.store.base import Repository


class Files(Repository):
    def register(self, files: Iterable[Stored]) -> None:
        """Note files of the artifact store; one that is known stays as it is."""
        rows = [{"sha256": f.sha256, "kind": f.kind, "size": f.size} for f in files]
        if rows:
            with self._session() as session:
                session.execute(insert(m.Artifact).on_conflict_do_nothing(), rows)

    def get(self, sha256: str) -> m.Artifact | None:
        with self._session() as session:
            return session.get(m.Artifact, sha256)

    def total_bytes(self) -> int:
        with self._session() as session:
            return int(session.execute(select(func.coalesce(func.sum(col(m.Artifact.size)), 0))).scalar_one())
