"""What every repository shares."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from sqlmodel import Session

if TYPE_CHECKING:
    from orchestrator.store.facade import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """One page of a list, newest first. `next` goes into the next call's `before`; None: this is the last page."""

    items: Sequence[T]
    next: int | None = None


class Repository:
    """One noun's SQL. Every method joins the caller's `store.transaction()`, or makes one of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _session(self) -> AbstractContextManager[Session]:
        return self._store.transaction()


def page(rows: Sequence[T], limit: int, key: str) -> Page[T]:
    """A page from `limit + 1` fetched rows; `key` names the column that orders them."""
    more = len(rows) > limit
    items = rows[:limit]
    return Page(items=items, next=getattr(items[-1], key) if more and items else None)
