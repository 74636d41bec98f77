"""`/api/v1`: the reference, as OpenAPI 3.1 and as a page made from it."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import Any

from fastapi import Depends, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.routing import BaseRoute

from webui.access import SCOPES, Action, needs
from webui.api.listing import noun_router
from webui.contexts.api import ApiContext, Operation, Parameter
from webui.rendering import page

router = noun_router("reference")
SAYS = """What the console's pages do, for programs, with the same permissions.

Send `Authorization: Bearer TOKEN`; a token is made at /tokens, with the scopes that it needs. A browser may send its cookie
instead, and for what changes something the header `X-CSRF-Token`. Lists answer `{items, next}`; send `next` as `cursor` for
the rows that follow. Every error is `{error, what, where, next, fields}`.
"""


@router.get("/openapi.json", include_in_schema=False, dependencies=[Depends(needs(Action.SEE))])
def openapi(request: Request) -> JSONResponse:
    return JSONResponse(document(), headers={"Cache-Control": "private, no-cache"})


@router.get("", include_in_schema=False, response_class=HTMLResponse, dependencies=[Depends(needs(Action.SEE))])
def reference(request: Request) -> HTMLResponse:
    told = document()
    groups: dict[str, list[Operation]] = {}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation(path, method, operation))
    context = ApiContext(
        title="REST API",
        section="api",
        groups=sorted(groups.items()),
        scopes=[(action.value, words) for action, words in SCOPES.items()],
    )
    return page(request, context)


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI document. Every operation may be refused as 401 and 403, and says what guards it."""
    from webui import api  # the other modules, this one among them

    routes: list[BaseRoute] = [route for router in api.routers() for route in router.routes]
    told = get_openapi(title="Terminal-RSI", version=metadata.version("terminal-rsi"), description=SAYS, routes=routes)
    told["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "cookie": {"type": "apiKey", "in": "cookie", "name": "rsi_session"},
    }
    told["security"] = [{"token": []}, {"cookie": []}]
    for schema in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; ours is Problem
        told["components"]["schemas"].pop(schema, None)
    return told


def _operation(path: str, method: str, told: dict[str, Any]) -> Operation:
    body = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    schema = document()["components"]["schemas"].get(name, {})
    parameters = [
        Parameter(name=p["name"], where=p["in"], kind=_kind(p["schema"]), says=p.get("description", ""))
        for p in told.get("parameters", [])
    ] + [
        Parameter(name=n, where="body", kind=_kind(s), says=s.get("description", ""))
        for n, s in schema.get("properties", {}).items()
    ]
    return Operation(
        method=method.upper(),
        path=path,
        summary=told.get("summary", ""),
        says=told.get("description", ""),
        parameters=parameters,
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in few words."""
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        found = document()["components"]["schemas"].get(name, {})
        return _kind(found) if "enum" in found else name
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", schema.get("const", "any")))
