"""The console: `uvicorn webui.app:start --factory`, or `rsi up`. Importing it loads no model code."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from orchestrator.audit_jobs import AuditRunner
from orchestrator.settings import Settings, get_settings
from orchestrator.store import Store
from stages.errors import RsiError, ServiceError, StoreError
from webui import api, pages, sse
from webui.errors import error_page
from webui.oidc import Provider
from webui.pages.parts import no_nul
from webui.problems import is_api
from webui.rendering import STATIC
from webui.security import ACCESS_LOG_FILTER, BodyLimit, SecurityHeaders
from webui.sign_in import Keys, SignIn

YEAR_S = 31_536_000


class HashedFiles(StaticFiles):
    """Static files; an address with a content hash may be cached for ever."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        hashed = b"v=" in scope.get("query_string", b"")
        response.headers["Cache-Control"] = f"public, max-age={YEAR_S}, immutable" if hashed else "no-cache"
        return response


def start() -> FastAPI:
    """The app of a process of its own: settings that cannot be used end it with one line instead of a traceback."""
    try:
        app = create_app()
    except RsiError as error:
        if os.environ.get("RSI_DEBUG"):
            raise
        sys.exit(f"error: the console does not start: {error}")
    gc.collect()
    gc.freeze()  # what is loaded by now stays; the collector going through it again and again stops every page for 0.15 s
    return app


def create_app(store: Store | None = None, settings: Settings | None = None) -> FastAPI:
    """The ASGI app. Without `store` it opens the database of the environment.

    Raises ServiceError when no database is named, ConfigError for settings that cannot be used: the key that signs cookies,
    the OpenID Connect provider, roles of strangers.
    """
    own = store is None
    settings = settings or get_settings()
    if store is None:
        if not settings.database_url:
            raise ServiceError("the console needs a database: run `rsi up`, or set RSI_DATABASE_URL")
        store = Store.open(settings.database_url, settings.artifacts, pool_size=10)
    opened = store

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.pulse = sse.Pulse(opened)
        app.state.audit_runner.wake()
        yield
        await run_in_threadpool(app.state.audit_runner.close)
        await app.state.pulse.close()
        if own:
            opened.close()

    app = FastAPI(
        title="Terminal-RSI",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=life,
        dependencies=[Depends(no_nul)],
    )
    app.state.store = opened
    app.state.audit_runner = AuditRunner(opened)
    app.state.settings = settings
    app.state.keys = Keys.of(settings)
    app.state.provider = Provider(settings, app.state.keys.key) if settings.oidc_issuer else None
    app.add_middleware(SignIn, store=opened, settings=settings, keys=app.state.keys)
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    logging.getLogger("uvicorn.access").addFilter(ACCESS_LOG_FILTER)
    app.add_middleware(BodyLimit)
    app.add_middleware(SecurityHeaders)
    app.mount("/static", HashedFiles(directory=STATIC), name="static")
    for router in pages.routers():
        app.include_router(router)
    for router in api.routers():
        app.include_router(router)
    app.include_router(sse.router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_exception_handler(StoreError, _store_error)
    app.add_exception_handler(RsiError, _refused)

    @app.get("/healthz", include_in_schema=False)
    def healthz() -> JSONResponse:
        """The process answers; `database` says whether its store does."""
        try:
            opened.events.last_id()
        except StoreError as error:
            return JSONResponse({"status": "ok", "database": str(error)})
        return JSONResponse({"status": "ok", "database": "ok"})

    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail if error.detail != "Not Found" else "There is no such page"
    advice = (
        "It may have been a link to something that was never stored, or was deleted."
        if error.status_code == 404
        else ""
    )
    return error_page(request, error.status_code, message, advice)


async def _bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if is_api(request.url.path):
        told = tuple((".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())
        return error_page(request, 422, "The request cannot be understood", "Correct these fields.", told)
    fields = tuple((".".join(map(str, e["loc"][1:])), e["msg"]) for e in error.errors())
    return error_page(request, 422, "The address cannot be understood", "Correct or remove these parameters:", fields)


async def _refused(request: Request, error: Exception) -> Response:
    """What a page or the API did not answer itself: somebody's mistake, or a service that is not there. No traceback."""
    status = 503 if isinstance(error, ServiceError) else 422
    field = getattr(error, "field", "")
    return error_page(request, status, str(error), fields=((field, str(error)),) if field else ())


async def _store_error(request: Request, error: Exception) -> Response:
    return error_page(request, 503, "The database does not answer", str(error))
