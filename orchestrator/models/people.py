"""People and how they get in: accounts, sign-ins, one-time links, API tokens, failed sign-ins.

Whatever lets somebody in is stored as a digest of its 256 random bits (`orchestrator.credentials`), never itself.
"""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import Field, SQLModel

from orchestrator.models.columns import JSONB, Timestamp, created, now


class User(SQLModel, table=True):
    __tablename__ = "users"

    id: int | None = Field(default=None, primary_key=True)
    login: str = Field(unique=True)
    name: str = ""
    email: str = ""
    roles: list[str] = Field(default_factory=list, sa_type=pg.ARRAY(sa.String(32)))
    password_hash: str | None = None  # argon2; None: cannot sign in with a password
    oidc_subject: str | None = Field(default=None, unique=True)  # "<issuer>|<sub>" of who signs in through OIDC
    preferences: dict[str, Any] = Field(default_factory=dict, sa_type=JSONB)
    disabled_at: datetime | None = Field(default=None, sa_type=Timestamp)
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())


class SignIn(SQLModel, table=True):
    """Somebody is signed in on one browser. Deleting the row signs that browser out."""

    __tablename__ = "sign_in"

    digest: str = Field(primary_key=True)  # SHA-256 of the id in the cookie
    user_id: int = Field(foreign_key="users.id", index=True, ondelete="CASCADE")
    how: str  # "password", "link" or "oidc"
    address: str = ""
    agent: str = ""  # the browser's own words, cut
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    expires_at: datetime = Field(sa_type=Timestamp, index=True)


class SignInLink(SQLModel, table=True):
    """A link that signs one person in once."""

    __tablename__ = "sign_in_link"

    digest: str = Field(primary_key=True)
    user_id: int = Field(foreign_key="users.id", index=True, ondelete="CASCADE")
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    expires_at: datetime = Field(sa_type=Timestamp, index=True)


class SignInFailure(SQLModel, table=True):
    """Failed sign-ins in a row, for one login and for one address: who has many must pause."""

    __tablename__ = "sign_in_failure"

    key: str = Field(primary_key=True)  # "login:ada" or "address:192.0.2.7"
    failures: int
    last_at: datetime = Field(sa_type=Timestamp, index=True)
    paused_until: datetime = Field(sa_type=Timestamp)


class ApiToken(SQLModel, table=True):
    """A secret that a program of one person sends instead of a cookie."""

    __tablename__ = "api_token"

    id: int | None = Field(default=None, primary_key=True)
    user_id: int = Field(foreign_key="users.id", index=True, ondelete="CASCADE")
    name: str
    digest: str = Field(unique=True)
    hint: str  # its first characters, by which its owner knows it
    scopes: list[str] = Field(default_factory=list, sa_type=pg.ARRAY(sa.String(32)))  # actions of `webui.access`
    created_at: datetime = Field(default_factory=now, sa_type=Timestamp, sa_column_kwargs=created())
    expires_at: datetime | None = Field(default=None, sa_type=Timestamp)
    last_used_at: datetime | None = Field(default=None, sa_type=Timestamp)
    revoked_at: datetime | None = Field(default=None, sa_type=Timestamp)
