"""Verdicts and findings. Append-only: the database itself refuses a change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import col

from orchestrator import models as m
from orchestrator.store.base import Repository
from orchestrator.store.connection import canonical, clean_text
from stages import domain


class Reviews(Repository):
    def add(self, review: domain.Review, *, key: str | None = None) -> bool:
        """Store a verdict and its findings; False when the same one is there already.

        `key` names the act (a form's token for a person). Without it two verdicts are the same when the reviewer,
        revision, decision, reason and findings are, so a repeated automatic review is stored once.
        """
        return self._add(review, m.ReviewDecision(review.decision.value), key)

    def withdraw(self, runbook_id: str, revision: int, reviewer: str, *, key: str, reason: str = "") -> bool:
        """A person takes the own verdict back; both rows stay."""
        review = domain.Review(
            runbook_id=runbook_id,
            revision=revision,
            reviewer=reviewer,
            decision=domain.Decision.REJECT,  # not stored: the row says `withdraw`
            reason=reason,
        )
        return self._add(review, m.ReviewDecision.WITHDRAW, key)

    def _add(self, review: domain.Review, decision: m.ReviewDecision, key: str | None) -> bool:
        findings = [
            {
                "runbook_id": review.runbook_id,
                "revision": review.revision,
                "part": finding.part,
                "severity": finding.severity,
                "rule": finding.rule,
                "message": clean_text(finding.message),
                "line": finding.line,
                "start": finding.start,
                "end": finding.end,
                "evidence": clean_text(finding.evidence),
                "evidence_source": clean_text(finding.evidence_source),
            }
            for finding in review.findings
        ]
        values = {
            "runbook_id": review.runbook_id,
            "revision": review.revision,
            "reviewer": review.reviewer,
            "decision": decision,
            "reason": clean_text(review.reason),
        }
        same = hashlib.sha256(canonical([values, findings]).encode()).hexdigest()
        query = pg.insert(m.Review).values(values | {"key": key or same}).on_conflict_do_nothing(index_elements=["key"])
        with self._session() as session:
            review_id = session.execute(query.returning(col(m.Review.id))).scalar()
            if review_id is None:
                return False
            if findings:
                session.execute(insert(m.Finding), [row | {"review_id": review_id} for row in findings])
            return True

    def of(self, runbook_id: str, revision: int) -> Sequence[m.Review]:
        """All verdicts on a revision, withdrawn ones included, oldest first."""
        query = select(m.Review).where(col(m.Review.runbook_id) == runbook_id, col(m.Review.revision) == revision)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Review.id))).scalars().all()

    def standing(self, runbook_id: str, revision: int) -> dict[str, m.Review]:
        """Reviewer -> the verdict that counts: the last one, unless it was withdrawn."""
        last = {review.reviewer: review for review in self.of(runbook_id, revision)}
        return {who: review for who, review in last.items() if review.decision is not m.ReviewDecision.WITHDRAW}

    def findings(self, runbook_id: str, revision: int) -> Sequence[m.Finding]:
        query = select(m.Finding).where(col(m.Finding.runbook_id) == runbook_id, col(m.Finding.revision) == revision)
        with self._session() as session:
            return session.execute(query.order_by(col(m.Finding.id))).scalars().all()

    def load(self, stage_id: int) -> Sequence[domain.Review]:
        """Every standing verdict on the newest revisions of a stage, with its findings, oldest first."""
        query = (
            select(m.Review)
            .join(
                m.Runbook,
                (col(m.Runbook.id) == col(m.Review.runbook_id)) & (col(m.Runbook.revision) == col(m.Review.revision)),
            )
            .where(col(m.Runbook.stage_id) == stage_id, col(m.Runbook.state) != m.RunbookState.SUPERSEDED)
            .order_by(col(m.Review.id))
        )
        return self._standing(query)

    def of_revision(self, runbook_id: str, revision: int) -> Sequence[domain.Review]:
        """Every standing verdict on one revision, with its findings, oldest first."""
        query = select(m.Review).where(col(m.Review.runbook_id) == runbook_id, col(m.Review.revision) == revision)
        return self._standing(query.order_by(col(m.Review.id)))

    def _standing(self, query: Any) -> Sequence[domain.Review]:
        with self._session() as session:
            rows = session.execute(query).scalars().all()
            found = select(m.Finding).where(col(m.Finding.review_id).in_([row.id for row in rows]))
            findings: dict[int, list[domain.Finding]] = {}
            for row in session.execute(found.order_by(col(m.Finding.id))).scalars():
                findings.setdefault(row.review_id, []).append(_finding(row))
        last = {(row.runbook_id, row.reviewer): row for row in rows}
        return [
            domain.Review(
                runbook_id=row.runbook_id,
                revision=row.revision,
                reviewer=row.reviewer,
                decision=domain.Decision(row.decision.value),
                reason=row.reason,
                findings=tuple(findings.get(row.id or 0, ())),
            )
            for row in rows
            if last[row.runbook_id, row.reviewer] is row and row.decision is not m.ReviewDecision.WITHDRAW
        ]


def _finding(row: m.Finding) -> domain.Finding:
    return domain.Finding(
        part=row.part,
        severity=row.severity,
        rule=row.rule,
        message=row.message,
        line=row.line,
        start=row.start,
        end=row.end,
        evidence=row.evidence,
        evidence_source=row.evidence_source,
    )
