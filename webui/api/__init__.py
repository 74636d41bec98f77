"""REST `/api/v1`: what the pages do, for programs. One module per noun, no logic of its own.

A module with a `router` is part of the API, one with `twins` exports lists of the console (`webui.api.listing`).
Permissions are the pages' (`webui.access`). A program sends `Authorization: Bearer <token>`; a browser its cookie and, for
what changes something, the header `X-CSRF-Token`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter


def routers() -> Iterator[APIRouter]:
    """The routers of every noun, by module name, and those of the exports."""
    for module in sorted(iter_modules(__path__), key=lambda found: found.name):
        loaded = import_module(f"{__name__}.{module.name}")
        yield from (getattr(loaded, name) for name in ("router", "twins") if hasattr(loaded, name))
