"""How people get in: sign-ins, one-time links, API tokens, and the pauses after failed sign-ins.

Callers keep the secrets; here are only their digests (`orchestrator.credentials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col

from orchestrator import credentials
from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.store.base import Repository
from stages.errors import ConfigError

SIGN_IN_DAYS = 7
LINK_MINUTES = 15
AGENT_LENGTH = 200


class SignIns(Repository):
    """Who is signed in on which browser."""

    def open(self, user_id: int, how: str, *, address: str = "", agent: str = "", days: int = SIGN_IN_DAYS) -> str:
        """Sign a person in; returns the id for the cookie. Always a fresh one, so none can be foisted on them."""
        secret, moment = credentials.fresh(), now()
        row = m.SignIn(
            digest=credentials.digest(secret),
            user_id=user_id,
            how=how,
            address=address,
            agent=agent[:AGENT_LENGTH],
            created_at=moment,
            expires_at=moment + timedelta(days=days),
        )
        with self._session() as session:
            session.execute(delete(m.SignIn).where(col(m.SignIn.expires_at) < moment))
            session.add(row)
        return secret

    def user(self, secret: str) -> m.User | None:
        """Whose cookie it is; None when it has ended, or its owner is disabled."""
        query = (
            select(m.User)
            .join(m.SignIn, col(m.SignIn.user_id) == col(m.User.id))
            .where(col(m.SignIn.digest) == credentials.digest(secret))
            .where(col(m.SignIn.expires_at) > now(), col(m.User.disabled_at).is_(None))
        )
        with self._session() as session:
            return session.execute(query).scalars().first()

    def list(self, user_id: int) -> Sequence[m.SignIn]:
        """Those that still hold, newest first."""
        query = select(m.SignIn).where(col(m.SignIn.user_id) == user_id, col(m.SignIn.expires_at) > now())
        with self._session() as session:
            return session.execute(query.order_by(col(m.SignIn.created_at).desc())).scalars().all()

    def end(self, secret: str) -> None:
        with self._session() as session:
            session.execute(delete(m.SignIn).where(col(m.SignIn.digest) == credentials.digest(secret)))

    def end_all(self, user_id: int, *, but: str = "") -> int:
        """Sign a person out everywhere, unused links included; `but`: the cookie id that stays. Returns how many ended."""
        ended = delete(m.SignIn).where(col(m.SignIn.user_id) == user_id)
        if but:
            ended = ended.where(col(m.SignIn.digest) != credentials.digest(but))
        with self._session() as session:
            session.execute(delete(m.SignInLink).where(col(m.SignInLink.user_id) == user_id))
            return len(session.execute(ended.returning(col(m.SignIn.digest))).all())


class SignInLinks(Repository):
    """Links that sign one person in once."""

    def make(self, user_id: int, *, minutes: int = LINK_MINUTES) -> str:
        """The secret of a new link."""
        secret, moment = credentials.fresh(), now()
        row = m.SignInLink(
            digest=credentials.digest(secret),
            user_id=user_id,
            created_at=moment,
            expires_at=moment + timedelta(minutes=minutes),
        )
        with self._session() as session:
            session.execute(delete(m.SignInLink).where(col(m.SignInLink.expires_at) < moment))
            session.add(row)
        return secret

    def use(self, secret: str) -> m.User | None:
        """Whose link it is, once. None for an unknown, used or expired one, or a disabled person."""
        used = (
            delete(m.SignInLink)
            .where(col(m.SignInLink.digest) == credentials.digest(secret), col(m.SignInLink.expires_at) > now())
            .returning(col(m.SignInLink.user_id))
        )
        with self._session() as session:
            user_id = session.execute(used).scalar_one_or_none()
            user = session.get(m.User, user_id, populate_existing=True) if user_id is not None else None
            return user if user is not None and user.disabled_at is None else None


class ApiTokens(Repository):
    def make(self, user_id: int, name: str, scopes: Sequence[str], *, expires_at: datetime | None = None) -> str:
        """The new token, which is shown once. Raises ConfigError without a name or a scope."""
        if not name.strip() or not scopes:
            raise ConfigError("A token needs a name and at least one scope.")
        secret = credentials.fresh_token()
        row = m.ApiToken(
            user_id=user_id,
            name=name.strip(),
            digest=credentials.digest(secret),
            hint=secret[: credentials.HINT],
            scopes=sorted(set(scopes)),
            expires_at=expires_at,
        )
        with self._session() as session:
            session.add(row)
        return secret

    def use(self, secret: str) -> tuple[m.ApiToken, m.User] | None:
        """The token and its owner, when both may still come in. Notes the use, to the minute."""
        query = (
            select(m.ApiToken, m.User)
            .join(m.User, col(m.User.id) == col(m.ApiToken.user_id))
            .where(col(m.ApiToken.digest) == credentials.digest(secret))
            .where(col(m.ApiToken.revoked_at).is_(None), col(m.User.disabled_at).is_(None))
            .where(or_(col(m.ApiToken.expires_at).is_(None), col(m.ApiToken.expires_at) > now()))
        )
        with self._session() as session:
            if (row := session.execute(query).first()) is None:
                return None
            token, user = row
            if token.last_used_at is None or now() - token.last_used_at > timedelta(minutes=1):
                session.execute(update(m.ApiToken).where(col(m.ApiToken.id) == token.id).values(last_used_at=now()))
            return token, user

    def list(self, user_id: int) -> Sequence[m.ApiToken]:
        """Newest first, revoked ones included."""
        query = select(m.ApiToken).where(col(m.ApiToken.user_id) == user_id).order_by(col(m.ApiToken.id).desc())
        with self._session() as session:
            return session.execute(query).scalars().all()

    def revoke(self, token_id: int, user_id: int) -> m.ApiToken | None:
        """None when that person has no such token. Revoking twice keeps the first time."""
        mine = (col(m.ApiToken.id) == token_id, col(m.ApiToken.user_id) == user_id)
        with self._session() as session:
            session.execute(
                update(m.ApiToken).where(*mine, col(m.ApiToken.revoked_at).is_(None)).values(revoked_at=now())
            )
            return session.execute(select(m.ApiToken).where(*mine)).scalars().first()


# ------------------------------------------------------------------------------------------------- pauses after failures

FREE = {"login": 5, "address": 20}  # failures in a row that cost no pause
LONGEST_S = {"login": 300.0, "address": 3600.0}  # a login's is short: others could lock its owner out
FORGET = timedelta(hours=24)  # after the last failure


def pause_s(kind: str, failures: int) -> float:
    """Seconds until the next try: 0 for the first ones, then 2, 4, 8, … up to a limit. `kind`: "login" or "address"."""
    over = failures - FREE[kind]
    return 0.0 if over <= 0 else min(2.0 ** min(over, 30), LONGEST_S[kind])


class SignInFailures(Repository):
    """Counts a try before the password is looked at, so that tries at the same time cannot slip through."""

    def begin(self, login: str, address: str) -> float:
        """Count one try as failed. Returns 0 when it may go on, else the seconds to wait (and counts nothing)."""
        moment = now()
        keys = sorted([f"login:{login}", f"address:{address}"])
        fresh = [{"key": k, "failures": 0, "last_at": moment, "paused_until": moment} for k in keys]
        with self._session() as session:
            session.execute(delete(m.SignInFailure).where(col(m.SignInFailure.last_at) < moment - FORGET))
            session.execute(insert(m.SignInFailure).values(fresh).on_conflict_do_nothing())
            query = select(m.SignInFailure).where(col(m.SignInFailure.key).in_(keys)).order_by(col(m.SignInFailure.key))
            rows = session.execute(query.with_for_update()).scalars().all()
            wait = max((row.paused_until - moment).total_seconds() for row in rows)
            if wait > 0:
                return wait
            for row in rows:
                row.failures += 1
                row.last_at = moment
                kind = row.key.partition(":")[0]
                row.paused_until = moment + timedelta(seconds=pause_s(kind, row.failures))
        return 0.0

    def succeeded(self, login: str, address: str) -> None:
        """The last try was none: the login starts over, the address takes one failure back."""
        with self._session() as session:
            session.execute(delete(m.SignInFailure).where(col(m.SignInFailure.key) == f"login:{login}"))
            session.execute(
                update(m.SignInFailure)
                .where(col(m.SignInFailure.key) == f"address:{address}", col(m.SignInFailure.failures) > 0)
                .values(failures=col(m.SignInFailure.failures) - 1, paused_until=now())
            )
