"""Notices, inboxes and webhook deliveries. A notice is written with its event, so none is lost and none told too early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import exists, func, insert, literal, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlmodel import Session, col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.notifications import AUDIENCE, notice_kind, notice_text
from orchestrator.store.base import Page, Repository, page

LEASE_S = 60.0  # a delivery that is being tried is left alone for so long by other deliverers


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxEntry:
    id: int  # of the notice
    notice: m.Notice
    read_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryEntry:
    id: int  # of the delivery
    delivery: m.WebhookDelivery
    notice: m.Notice


def tell(session: Session, events: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Write the notices of (id, row) of events that are written in this transaction, into the inboxes of their readers."""
    for event_id, row in events:
        kind = notice_kind(row["kind"], row["payload"])
        if kind is None or row["cycle_id"] is None:
            continue
        cycle = session.get(m.Cycle, row["cycle_id"])
        if cycle is None or (kind is m.NoticeKind.ALARM and _alarmed(session, row["cycle_id"], row["stage_id"])):
            continue
        waiting = 0
        if kind is m.NoticeKind.GATE_OPENED:
            query = select(func.count()).select_from(m.Runbook).where(col(m.Runbook.cycle_id) == cycle.id)
            waiting = session.execute(query.where(col(m.Runbook.state) == m.RunbookState.WAITING)).scalar_one()
        notice = m.Notice(
            event_id=event_id,
            kind=kind.value,
            cycle_id=cycle.id,
            stage_id=row["stage_id"],
            text=notice_text(kind, f"{cycle.name} (cycle {cycle.id})", row["payload"], waiting=waiting),
            payload=dict(row["payload"]) | {"waiting": waiting},
        )
        session.add(notice)
        session.flush()
        readers = _readers(AUDIENCE[kind], cycle.created_by)
        items = select(col(m.User.id), literal(notice.id)).where(readers, col(m.User.disabled_at).is_(None))
        session.execute(insert(m.InboxItem).from_select(["user_id", "notice_id"], items))


def _alarmed(session: Session, cycle_id: int, stage_id: int | None) -> bool:
    """A stage's first alarm is told; its page lists all of them."""
    query = select(col(m.Notice.id)).where(col(m.Notice.cycle_id) == cycle_id, col(m.Notice.stage_id) == stage_id)
    return session.execute(query.where(col(m.Notice.kind) == m.NoticeKind.ALARM.value).limit(1)).first() is not None


def _readers(role: m.Role, launched_by: str) -> Any:
    holds = col(m.User.roles).any(role.value)  # type: ignore[arg-type]
    if role is not m.Role.LEAD:
        return holds
    person = exists().where(
        col(m.User.login) == launched_by, col(m.User.disabled_at).is_(None)
    )  # somebody who can still read it
    return ((col(m.User.login) == launched_by) & person) | (holds & ~person)


class Notices(Repository):
    """Inboxes, and what a webhook is sent."""

    def inbox(
        self, user_id: int, *, unread: bool = False, before: int | None = None, limit: int = 50
    ) -> Page[InboxEntry]:
        """Newest first."""
        query = (
            select(m.Notice, col(m.InboxItem.read_at))
            .join(m.InboxItem, col(m.InboxItem.notice_id) == col(m.Notice.id))
            .where(col(m.InboxItem.user_id) == user_id)
        )
        if unread:
            query = query.where(col(m.InboxItem.read_at).is_(None))
        if before is not None:
            query = query.where(col(m.InboxItem.notice_id) < before)
        with self._session() as session:
            rows = session.execute(query.order_by(col(m.InboxItem.notice_id).desc()).limit(limit + 1)).tuples()
            return page([InboxEntry(id=n.id or 0, notice=n, read_at=read) for n, read in rows], limit, "id")

    def unread(self, user_id: int) -> int:
        """How many a person has not read."""
        query = select(func.count()).select_from(m.InboxItem)
        query = query.where(col(m.InboxItem.user_id) == user_id, col(m.InboxItem.read_at).is_(None))
        with self._session() as session:
            return session.execute(query).scalar_one()

    def mark_read(self, user_id: int, notice_ids: Sequence[int] | None = None) -> int:
        """Mark some, or all with None; returns how many were unread. Other people's inboxes stay as they are."""
        query = update(m.InboxItem).where(col(m.InboxItem.user_id) == user_id, col(m.InboxItem.read_at).is_(None))
        if notice_ids is not None:
            query = query.where(col(m.InboxItem.notice_id).in_(notice_ids))
        with self._session() as session:
            marked = session.execute(query.values(read_at=now()).returning(col(m.InboxItem.notice_id)))
            return len(marked.scalars().all())

    # ------------------------------------------------------------- webhooks

    def enqueue(self, url: str) -> None:
        """A delivery for every notice that `url` has none of. An address that is new gets notices from now on."""
        newest = select(func.coalesce(func.max(col(m.Notice.id)), 0)).scalar_subquery()
        with self._session() as session:
            session.execute(upsert(m.Webhook).values(url=url, after_notice_id=newest).on_conflict_do_nothing())
            hook = session.execute(select(m.Webhook).where(col(m.Webhook.url) == url).with_for_update()).scalar_one()
            query = select(col(m.Notice.id)).where(col(m.Notice.id) > hook.after_notice_id)
            ids = session.execute(query.order_by(col(m.Notice.id))).scalars().all()
            session.add_all([m.WebhookDelivery(url=url, notice_id=i) for i in ids if i is not None])
            if ids:
                hook.after_notice_id = max(i for i in ids if i is not None)

    def claim_due(self, url: str, at: datetime, *, limit: int = 20) -> list[DeliveryEntry]:
        """Deliveries to try now, oldest first. They are nobody else's for `LEASE_S`; a deliverer that dies is followed."""
        due = (
            select(col(m.WebhookDelivery.id))
            .where(
                col(m.WebhookDelivery.state) == m.DeliveryState.WAITING,
                col(m.WebhookDelivery.next_at) <= at,
                col(m.WebhookDelivery.url) == url,
            )
            .order_by(col(m.WebhookDelivery.next_at), col(m.WebhookDelivery.id))
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._session() as session:
            ids = session.execute(due).scalars().all()
            held = update(m.WebhookDelivery).where(col(m.WebhookDelivery.id).in_(ids))
            session.execute(held.values(next_at=at + timedelta(seconds=LEASE_S)))
            return self._entries(session, col(m.WebhookDelivery.id).in_(ids), ascending=True)

    def record_attempt(
        self,
        delivery_id: int,
        *,
        state: m.DeliveryState,
        status: int | None,
        error: str = "",
        next_at: datetime | None = None,
    ) -> None:
        """What came of one attempt."""
        values: dict[str, Any] = {"state": state, "status": status, "error": error[:500]}
        values["attempts"] = col(m.WebhookDelivery.attempts) + 1
        if next_at is not None:
            values["next_at"] = next_at
        if state is not m.DeliveryState.WAITING:
            values["finished_at"] = now()
        with self._session() as session:
            session.execute(update(m.WebhookDelivery).where(col(m.WebhookDelivery.id) == delivery_id).values(values))

    def deliveries(self, *, limit: int = 50) -> list[DeliveryEntry]:
        """The newest deliveries, newest first."""
        with self._session() as session:
            return self._entries(session, literal(True), limit=limit)

    def _entries(
        self, session: Session, where: Any, *, ascending: bool = False, limit: int = 100
    ) -> list[DeliveryEntry]:
        query = select(m.WebhookDelivery, m.Notice).join(m.Notice, col(m.Notice.id) == col(m.WebhookDelivery.notice_id))
        order = col(m.WebhookDelivery.id).asc() if ascending else col(m.WebhookDelivery.id).desc()
        rows = session.execute(query.where(where).order_by(order).limit(limit)).tuples()
        return [DeliveryEntry(id=d.id or 0, delivery=d, notice=n) for d, n in rows]
