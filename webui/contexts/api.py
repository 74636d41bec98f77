"""What the API's reference page receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from webui.contexts import PageContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    where: str  # path, query or body
    kind: str
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    method: str
    path: str
    summary: str
    says: str
    parameters: Sequence[Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext(PageContext):
    """`/api/v1`."""

    template: ClassVar[str] = "api.html"
    groups: Sequence[tuple[str, Sequence[Operation]]]  # by noun
    scopes: Sequence[tuple[str, str]]  # what a token may be given, in words
