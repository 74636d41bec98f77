"""One module per page: read the store, fill the page's context, render.

A module with a `router` is a page; the app takes all of them, so a new page needs no list. Its addresses must not
depend on order: write `/cycles/{cycle_id:int}`, never `/cycles/{cycle_id}` beside `/cycles/new`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter


def routers() -> Iterator[APIRouter]:
    """The routers of every page, by module name."""
    for module in sorted(iter_modules(__path__), key=lambda found: found.name):
        router = getattr(import_module(f"{__name__}.{module.name}"), "router", None)
        if router is not None:
            yield router
