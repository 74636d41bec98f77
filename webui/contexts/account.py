"""Contexts of the pages about people: signing in, one's own account and tokens, everybody's, and the audit log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from orchestrator import models as m
from webui.contexts import Fact, PageContext

Problems = Mapping[str, str]
"""Field -> what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInContext(PageContext):
    template: ClassVar[str] = "sign_in.html"
    login: str
    following: str  # where to go afterwards
    problem: str  # why the last try failed
    oidc: str  # name of the provider; empty: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkContext(PageContext):
    template: ClassVar[str] = "sign_in_link.html"
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInRow:
    how: str
    address: str
    agent: str
    created_at: datetime
    expires_at: datetime
    this: bool  # the browser that asks


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountContext(PageContext):
    template: ClassVar[str] = "account.html"
    facts: Sequence[Fact]
    sign_ins: Sequence[SignInRow]
    asks_current: bool  # a new password needs the present one
    done: str  # what was just done
    problems: Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeChoice:
    value: str
    says: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    token: m.ApiToken
    state: str  # "active", "expired" or "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiTokensContext(PageContext):
    template: ClassVar[str] = "api_tokens.html"
    tokens: Sequence[TokenRow]
    scopes: Sequence[ScopeChoice]
    lifetimes: Sequence[tuple[int, bool]]  # days, and whether it is chosen
    name: str
    fresh: str  # the token that was just made; this page is the only one that shows it
    problems: Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonRow:
    user: m.User
    how: str  # "password", "OIDC" or "link only"
    me: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleContext(PageContext):
    template: ClassVar[str] = "people.html"
    people: Sequence[PersonRow]
    roles: Sequence[m.Role]
    values: Mapping[str, str]  # of the form that adds somebody
    chosen: Sequence[str]
    link: str  # the one-time link that was just made
    link_for: str
    problem: str  # why a change of somebody was refused
    problems: Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLogContext(PageContext):
    template: ClassVar[str] = "audit_log.html"
    rows: Sequence[tuple[m.AuditLog, str]]  # with its payload in words
    filters: Mapping[str, str]
    next_href: str
    empty: bool  # nothing fits
