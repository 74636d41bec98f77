"""Contexts of the pages about people: signing in, one's own account and tokens, everybody's, and the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from webui.contexts import PageContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInContext(PageContext):
    template: ClassVar[str] = "sign_in.html"
    login: str
    following: str  # where to go afterwards
    problem: str  # why the last try failed
