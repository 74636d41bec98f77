"""People, and the log of what they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, select, text, update
from sqlmodel import col

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Page, Repository, page
from orchestrator.store.review_queue import UNREAD
from stages.errors import ConfigError, StoreError

ACTORS = frozenset({"cli", "demo", "experiment", "gate", "oidc", "rules", "unknown"})  # of the log, that are no people
_TOLD = (
    "NOT (audit_log.action IN ('runbook.approve', 'runbook.reject', 'runbook.withdraw') AND audit_log.actor <> :blind_to "
    f"AND {UNREAD.format(id='audit_log.object_id')})"
)


class Users(Repository):
    def add(
        self, login: str, roles: Sequence[m.Role], *, name: str = "", email: str = "", password_hash: str | None = None
    ) -> m.User:
        """Raises ConfigError when the login is taken, in whatever case, or no name for a URL.

        `Ada` beside `ada` would be two reviewers, and a person called `gate` would look like ours in the audit log.
        """
        if not login or not login.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"{login!r} is no login: use letters, digits, '.', '-' and '_'.")
        with self._session() as session:
            same = select(col(m.User.id)).where(func.lower(col(m.User.login)) == login.lower())
            if login.lower() in ACTORS or session.execute(same).first() is not None:
                raise ConfigError(f"The login {login} is taken. Choose another one.")
            user = m.User(
                login=login, name=name or login, email=email, roles=_words(roles), password_hash=password_hash
            )
            session.add(user)
            session.flush()
            return user

    def get(self, user_id: int) -> m.User:
        with self._session() as session:
            if (user := session.get(m.User, user_id, populate_existing=True)) is None:
                raise StoreError(f"There is no user {user_id}.")
            return user

    def named(self, login: str) -> m.User | None:
        with self._session() as session:
            return session.execute(select(m.User).where(col(m.User.login) == login)).scalars().first()

    def with_subject(self, subject: str) -> m.User | None:
        """Who signs in through OIDC as this subject."""
        with self._session() as session:
            return session.execute(select(m.User).where(col(m.User.oidc_subject) == subject)).scalars().first()

    def unclaimed(self, email: str) -> m.User | None:
        """The one account with this address that has no way to sign in of its own yet."""
        query = select(m.User).where(
            col(m.User.email) == email, col(m.User.password_hash).is_(None), col(m.User.oidc_subject).is_(None)
        )
        with self._session() as session:
            found = session.execute(query.limit(2)).scalars().all()
            return found[0] if len(found) == 1 else None

    def list(self, *, role: m.Role | None = None, disabled: bool = False) -> Sequence[m.User]:
        query = select(m.User).order_by(col(m.User.login))
        if role is not None:
            query = query.where(col(m.User.roles).any(role.value))  # type: ignore[arg-type]
        if not disabled:
            query = query.where(col(m.User.disabled_at).is_(None))
        with self._session() as session:
            return session.execute(query).scalars().all()

    def set_roles(self, user_id: int, roles: Sequence[m.Role]) -> None:
        self._change(user_id, roles=_words(roles))

    def set_password_hash(self, user_id: int, password_hash: str | None) -> None:
        self._change(user_id, password_hash=password_hash)

    def set_subject(self, user_id: int, subject: str) -> None:
        self._change(user_id, oidc_subject=subject)

    def set_preferences(self, user_id: int, preferences: Mapping[str, Any]) -> None:
        self._change(user_id, preferences=dict(preferences))

    def set_disabled(self, user_id: int, disabled: bool) -> None:
        self._change(user_id, disabled_at=now() if disabled else None)

    def _change(self, user_id: int, **values: Any) -> None:
        with self._session() as session:
            session.execute(update(m.User).where(col(m.User.id) == user_id).values(**values))


class AuditTrail(Repository):
    """Append-only: who changed what."""

    def add(
        self,
        actor: str,
        action: str,
        *,
        object_kind: str = "",
        object_id: str | int = "",
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        row = {
            "actor": actor,
            "action": action,
            "object_kind": object_kind,
            "object_id": str(object_id),
            "payload": dict(payload or {}),
            "created_at": now(),
        }
        with self._session() as session:
            session.execute(insert(m.AuditLog), [row])

    def list(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        object_kind: str | None = None,
        object_id: str | int | None = None,
        blind_to: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Page[m.AuditLog]:
        """Newest first. `blind_to`: a reviewer, who gets none of the verdicts that are not for them yet."""
        query = select(m.AuditLog).order_by(col(m.AuditLog.id).desc()).limit(limit + 1)
        if actor is not None:
            query = query.where(col(m.AuditLog.actor) == actor)
        if action is not None:
            query = query.where(col(m.AuditLog.action) == action)
        if object_kind is not None:
            query = query.where(col(m.AuditLog.object_kind) == object_kind)
        if object_id is not None:
            query = query.where(col(m.AuditLog.object_id) == str(object_id))
        if blind_to is not None:
            query = query.where(text(_TOLD).bindparams(me=f"person:{blind_to}", blind_to=blind_to))
        if before is not None:
            query = query.where(col(m.AuditLog.id) < before)
        with self._session() as session:
            return page(session.execute(query).scalars().all(), limit, "id")


def _words(roles: Sequence[m.Role]) -> list[str]:
    return sorted({m.Role(role).value for role in roles})
