"""The reviewers' queue: what waits for whom, claims, seen findings, skips, comments, planted leaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from orchestrator.store.connection import canonical, clean_text

CLAIM_FOR = timedelta(minutes=30)
COUNT_CAP = 1000
STATES = {"open": "waiting", "approved": "approved", "rejected": "rejected", "consumed": "consumed", "all": ""}

# A planted leak stands in the queue of the stage that it names while that stage still waits for people, and for a
# reviewer's eyes only (`:decider`). The order (gate, id) says nothing about when a row was written: ids are digests.
# Real and planted ones are read apart and merged: so each comes in order from an index, and a page of a long queue reads
# a page of rows.
_COLUMNS = "b.id, b.revision, b.task_id, b.state, b.author, b.lines, b.created_at"
# Nor do a planted one and its original ever stand there together, for the pair would tell: the original comes after the
# own verdict on the copy.
_REAL = f"""SELECT {_COLUMNS}, b.stage_id AS gate, false AS planted FROM runbook b WHERE b.stage_id IS NOT NULL
AND NOT (:decider AND EXISTS (SELECT 1 FROM runbook o WHERE o.stage_id = b.stage_id AND o.state = 'waiting')
  AND EXISTS (SELECT 1 FROM known_leak k WHERE k.copy_of = b.id AND NOT EXISTS (
    SELECT 1 FROM review w WHERE w.runbook_id = k.runbook_id AND w.reviewer = :me)))"""
_PLANTED = (
    f"SELECT {_COLUMNS}, k.stage_id AS gate, true AS planted FROM known_leak k JOIN runbook b ON b.id = k.runbook_id "
    "WHERE :decider"
)
_FROM = """
FROM ({source} AND {states}) r
JOIN stage s ON s.id = r.gate
JOIN cycle c ON c.id = s.cycle_id
LEFT JOIN LATERAL (
  SELECT count(*) AS people, count(*) FILTER (WHERE v.reviewer = :me) AS mine,
         max(v.decision) FILTER (WHERE v.reviewer = :me) AS my_verdict
  FROM (
    SELECT DISTINCT ON (w.reviewer) w.reviewer, w.decision FROM review w
    WHERE w.runbook_id = r.id AND w.revision = r.revision AND w.reviewer LIKE 'person:%'
    ORDER BY w.reviewer, w.id DESC
  ) v WHERE v.decision <> 'withdraw'
) verdicts ON true
LEFT JOIN LATERAL (
  SELECT count(*) FILTER (WHERE q.login <> :login AND q.expires_at > now()) AS others,
         count(*) FILTER (WHERE q.login = :login AND (q.expires_at IS NULL OR q.expires_at > now())) AS own
  FROM review_claim q WHERE q.runbook_id = r.id
) claims ON true
LEFT JOIN review_skip z ON z.runbook_id = r.id AND z.login = :login
WHERE (NOT r.planted OR verdicts.mine > 0
       OR EXISTS (SELECT 1 FROM runbook o WHERE o.stage_id = r.gate AND o.state = 'waiting'))
"""
# What waits for this person: open, without the own verdict, written by somebody else, a place left. `needs` maps a
# stage to its recipe's number of reviewers.
_MINE = """
AND r.author <> :login AND verdicts.mine = 0
AND claims.others < greatest(1, coalesce((CAST(:needs AS jsonb) ->> s.id::text)::int, 1) - verdicts.people)
"""

# Other people's verdicts on a runbook are not for the reviewer `:me` yet: the own one is missing and the gate is open.
UNREAD = """EXISTS (
  SELECT 1 FROM runbook b LEFT JOIN known_leak l ON l.runbook_id = b.id
  WHERE b.id = {id} AND b.state NOT IN ('superseded', 'consumed') AND coalesce(l.stage_id, b.stage_id) IS NOT NULL
    AND NOT EXISTS (
      SELECT 1 FROM stage_phase p WHERE p.stage_id = coalesce(l.stage_id, b.stage_id) AND p.phase = 'replay')
    AND coalesce((
      SELECT o.decision FROM review o WHERE o.runbook_id = b.id AND o.revision = b.revision AND o.reviewer = :me
      ORDER BY o.id DESC LIMIT 1), 'withdraw') = 'withdraw')"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One runbook in the queue, without what others decided."""

    id: str
    revision: int
    task_id: str
    state: m.RunbookState
    author: str
    n_lines: int
    since: datetime
    stage_id: int
    stage: str
    cycle_id: int
    cycle: str
    people: int  # standing verdicts of people
    my_verdict: str | None
    claimed: bool  # by the person who asks, or assigned to that person
    claimed_by_others: int
    skipped: bool
    planted: bool  # a known leak; never shown before the own verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFilter:
    state: str = "open"  # a key of STATES
    mine: bool = False  # only what waits for the person who asks
    claimed: bool = False  # only what that person has claimed or was assigned
    skipped: bool | None = None  # only what that person has put off, or only what not
    cycle_id: int | None = None
    stage_id: int | None = None
    task_id: str = ""


class ReviewQueue(Repository):
    # ------------------------------------------------------------------------------------------------- the queue

    def rows(
        self,
        where: QueueFilter,
        login: str,
        *,
        decider: bool,
        needs: Mapping[int, int],
        after: tuple[int, str] | None = None,
        limit: int = 50,
    ) -> Sequence[QueueRow]:
        """Oldest gate first. `after`: (stage id, runbook id) of the last row shown."""
        joins, clauses, values = _parts(where)
        if after is not None:
            clauses += " AND (r.gate, r.id) > (:after_stage, :after_id)"
            values |= {"after_stage": after[0], "after_id": after[1]}
        columns = (
            "r.id, r.revision, r.task_id, r.state, r.author, jsonb_array_length(r.lines), r.created_at, s.id, s.name, "
            "c.id, c.name, verdicts.people, verdicts.my_verdict, claims.own > 0, claims.others, z.login IS NOT NULL, "
            "r.planted"
        )
        values |= _person(login, decider, needs) | {"limit": limit}
        rows: list[Any] = []
        with self._session() as session:
            for source in (_REAL, _PLANTED):
                half = (
                    f"SELECT {columns} {joins.replace('{source}', source)} {clauses} ORDER BY r.gate, r.id LIMIT :limit"
                )
                rows += session.execute(text(half), values).tuples().all()
        rows = sorted(rows, key=lambda row: (row[7], row[0]))[:limit]
        names = [f.name for f in fields(QueueRow)]
        found = [QueueRow(**dict(zip(names, row, strict=True))) for row in rows]
        return [
            replace(
                row,
                state=m.RunbookState(row.state),
                # a real one with as many verdicts as it needs would wait no longer
                people=min(row.people, needs.get(row.stage_id, 1) - 1) if _hidden(row) else row.people,
            )
            for row in found
        ]

    def count(
        self, where: QueueFilter, login: str, *, decider: bool, needs: Mapping[int, int], cap: int = COUNT_CAP
    ) -> int:
        """How many `rows` pages through, up to `cap`."""
        joins, clauses, values = _parts(where)
        values |= _person(login, decider, needs) | {"cap": cap}
        found = 0
        with self._session() as session:
            for source in (_REAL, _PLANTED):
                half = f"SELECT count(*) FROM (SELECT 1 {joins.replace('{source}', source)} {clauses} LIMIT :cap) found"
                found += int(session.execute(text(half), values).scalar_one())
        return min(found, cap)

    def any(self) -> bool:
        """Has anything ever come to people?"""
        asked = (m.RunbookState.WAITING, m.RunbookState.APPROVED, m.RunbookState.REJECTED, m.RunbookState.CONSUMED)
        query = select(col(m.Runbook.id)).where(col(m.Runbook.state).in_(asked)).limit(1)
        with self._session() as session:
            return session.execute(query).first() is not None

    def waiting_gates(self) -> Sequence[tuple[int, int, int, dict[str, Any]]]:
        """Stages with runbooks that wait for people: (stage id, its round, its cycle, the cycle's stored settings)."""
        waiting = select(col(m.Runbook.stage_id)).where(
            col(m.Runbook.state) == m.RunbookState.WAITING, col(m.Runbook.stage_id).is_not(None)
        )
        query = (
            select(col(m.Stage.id), col(m.Stage.round), col(m.Stage.cycle_id), col(m.Cycle.config))
            .join(m.Cycle, col(m.Cycle.id) == col(m.Stage.cycle_id))
            .where(col(m.Stage.id).in_(waiting))
            .order_by(col(m.Stage.id))
        )
        with self._session() as session:
            return [(i, n, cycle, config) for i, n, cycle, config in session.execute(query).tuples() if i is not None]

    def finding_counts(self, keys: Sequence[tuple[str, int]]) -> dict[str, list[tuple[str, str, int]]]:
        """Runbook id -> (part, severity, how many) of its revision's findings."""
        f = m.Finding
        query = select(col(f.runbook_id), col(f.revision), col(f.part), col(f.severity), func.count()).where(
            col(f.runbook_id).in_([i for i, _ in keys])
        )
        query = query.group_by(col(f.runbook_id), col(f.revision), col(f.part), col(f.severity))
        wanted = set(keys)
        found: dict[str, list[tuple[str, str, int]]] = {}
        with self._session() as session:
            for i, revision, part, severity, n in session.execute(query).tuples():
                if (i, revision) in wanted:
                    found.setdefault(i, []).append((str(part), str(severity), n))
        return {i: sorted(counts) for i, counts in found.items()}

    # ------------------------------------------------------------------------------------ claims, skips, seen, comments

    def claim(self, runbook_id: str, login: str) -> datetime:
        """Take or renew a claim; returns when it ends."""
        until = now() + CLAIM_FOR
        values = {"runbook_id": runbook_id, "login": login, "expires_at": until, "assigned_by": ""}
        query = insert(m.ReviewClaim).values(values)
        with self._session() as session:
            session.execute(
                query.on_conflict_do_update(index_elements=["runbook_id", "login"], set_={"expires_at": until})
            )
        return until

    def assign(self, runbook_id: str, login: str, by: str) -> None:
        values = {"runbook_id": runbook_id, "login": login, "assigned_by": by, "expires_at": None}
        query = insert(m.ReviewClaim).values(values)
        with self._session() as session:
            session.execute(
                query.on_conflict_do_update(index_elements=["runbook_id", "login"], set_={"assigned_by": by})
            )

    def release(self, runbook_id: str, login: str) -> bool:
        """End a claim or an assignment; False when there was none."""
        mine = delete(m.ReviewClaim).where(
            col(m.ReviewClaim.runbook_id) == runbook_id, col(m.ReviewClaim.login) == login
        )
        with self._session() as session:
            return session.execute(mine.returning(col(m.ReviewClaim.login))).first() is not None

    def claims(self, runbook_ids: Sequence[str]) -> dict[str, list[m.ReviewClaim]]:
        """Assignments and claims that have not ended, by runbook."""
        c = m.ReviewClaim
        live = select(c).where(
            col(c.runbook_id).in_(runbook_ids), (col(c.expires_at).is_(None)) | (col(c.expires_at) > now())
        )
        found: dict[str, list[m.ReviewClaim]] = {}
        with self._session() as session:
            for row in session.execute(live.order_by(col(c.created_at))).scalars():
                found.setdefault(row.runbook_id, []).append(row)
        return found

    def skip(self, runbook_id: str, login: str) -> None:
        values = {"runbook_id": runbook_id, "login": login}
        with self._session() as session:
            session.execute(insert(m.ReviewSkip).values(values).on_conflict_do_nothing())

    def unskip(self, runbook_id: str, login: str) -> None:
        mine = delete(m.ReviewSkip).where(col(m.ReviewSkip.runbook_id) == runbook_id, col(m.ReviewSkip.login) == login)
        with self._session() as session:
            session.execute(mine)

    def see(self, finding_ids: Sequence[int], login: str) -> None:
        if not finding_ids:
            return
        rows = [{"finding_id": i, "login": login} for i in sorted(set(finding_ids))]
        with self._session() as session:
            session.execute(insert(m.ReviewSeen).on_conflict_do_nothing(), rows)

    def seen(self, runbook_id: str, revision: int, login: str) -> set[int]:
        """Ids of the revision's findings that the person has seen."""
        query = (
            select(col(m.ReviewSeen.finding_id))
            .join(m.Finding, col(m.Finding.id) == col(m.ReviewSeen.finding_id))
            .where(
                col(m.Finding.runbook_id) == runbook_id,
                col(m.Finding.revision) == revision,
                col(m.ReviewSeen.login) == login,
            )
        )
        with self._session() as session:
            return set(session.execute(query).scalars())

    def comment(self, runbook_id: str, revision: int, login: str, words: str) -> None:
        with self._session() as session:
            session.add(m.ReviewComment(runbook_id=runbook_id, revision=revision, login=login, text=clean_text(words)))

    def comments(self, runbook_id: str) -> Sequence[m.ReviewComment]:
        query = select(m.ReviewComment).where(col(m.ReviewComment.runbook_id) == runbook_id)
        with self._session() as session:
            return session.execute(query.order_by(col(m.ReviewComment.id))).scalars().all()

    # ------------------------------------------------------------------------------------------------- planted leaks

    def plant(self, leak: m.KnownLeak) -> None:
        with self._session() as session:
            session.add(leak)

    def planted(self, runbook_id: str) -> m.KnownLeak | None:
        with self._session() as session:
            return session.get(m.KnownLeak, runbook_id)

    def planted_in(self, stage_id: int) -> Sequence[m.KnownLeak]:
        with self._session() as session:
            return session.execute(select(m.KnownLeak).where(col(m.KnownLeak.stage_id) == stage_id)).scalars().all()

    # -------------------------------------------------------------------------------------------------- what was done

    def verdicts(self, *, limit: int, blind_to: str | None = None) -> Sequence[Any]:
        """The newest verdicts of people, oldest first: (runbook_id, revision, reviewer, decision, created_at, since,
        planted). `since`: when the revision began to wait. `blind_to`: without those that this reviewer may not read yet."""
        told = "" if blind_to is None else f"WHERE w.reviewer = :me OR NOT {UNREAD.format(id='w.runbook_id')}"
        query = (
            "SELECT w.runbook_id, w.revision, w.reviewer, w.decision, w.created_at, r.created_at AS since, "
            "k.runbook_id IS NOT NULL AS planted "
            "FROM (SELECT * FROM review WHERE reviewer LIKE 'person:%' ORDER BY id DESC LIMIT :limit) w "
            "JOIN runbook r ON r.id = w.runbook_id AND r.revision = w.revision "
            f"LEFT JOIN known_leak k ON k.runbook_id = w.runbook_id {told} ORDER BY w.id"
        )
        values = {"limit": limit} | ({} if blind_to is None else {"me": f"person:{blind_to}"})
        with self._session() as session:
            return session.execute(text(query), values).all()


def _hidden(row: QueueRow) -> bool:
    return row.planted and row.my_verdict is None


def _person(login: str, decider: bool, needs: Mapping[int, int]) -> dict[str, Any]:
    return {
        "login": login,
        "me": f"person:{login}",
        "decider": decider,
        "needs": canonical({str(k): v for k, v in needs.items()}),
    }


def _parts(where: QueueFilter) -> tuple[str, str, dict[str, Any]]:
    """SQL from FROM to WHERE, further clauses, and their values."""
    values: dict[str, Any] = {}
    state = STATES["open"] if where.mine else STATES[where.state]
    joins = _FROM.replace("{states}", f"b.state = '{state}'" if state else "b.state <> 'superseded'")
    clauses = ""
    if where.mine:
        clauses += _MINE
    elif where.state == "open":
        clauses += " AND (NOT r.planted OR verdicts.mine = 0)"
    if where.skipped is not None:
        clauses += f" AND z.login IS {'NOT ' if where.skipped else ''}NULL"
    if where.claimed:
        clauses += " AND claims.own > 0"
    for column, value in (("c.id", where.cycle_id), ("s.id", where.stage_id), ("r.task_id", where.task_id or None)):
        if value is not None:
            name = column.replace(".", "_")
            clauses += f" AND {column} = :{name}"
            values[name] = value
    return joins, clauses, values
