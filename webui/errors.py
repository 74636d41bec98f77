"""What is answered instead of a page: an error in words, or JSON for a program and for a fragment."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from webui.contexts import ErrorContext
from webui.problems import is_api, problem
from webui.rendering import page

DATA = (".json", ".csv", ".parquet", ".txt")


def wants_page(request: Request) -> bool:
    """True for a person's browser that opens a page; False for a fragment, a stream, a download or a program."""
    path = request.url.path
    if request.headers.get("HX-Request") == "true" or path.startswith("/api/") or path == "/events":
        return False
    accepted = request.headers.get("Accept", "*/*")
    return not path.endswith(DATA) and ("text/html" in accepted or "*/*" in accepted)


def error_page(
    request: Request, status: int, message: str, advice: str = "", fields: Sequence[tuple[str, str]] = ()
) -> Response:
    """`fields`: (where, what) of each part of the request that is wrong. Below /api it is JSON (`webui.problems`)."""
    if is_api(request.url.path):
        return problem(status, message, request.url.path, advice, fields=fields)
    details = tuple(f"{where}: {what}" for where, what in fields)
    context = ErrorContext(title=message, section="", status=status, message=message, advice=advice, details=details)
    return page(request, context, status=status)


def refusal(request: Request, status: int, message: str, advice: str = "") -> Response:
    """A page for a person, JSON for everything else."""
    if wants_page(request):
        return error_page(request, status, message, advice)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    if is_api(request.url.path):
        return problem(status, message, request.url.path, advice, headers=headers)
    return JSONResponse({"detail": " ".join(filter(None, (message + ".", advice)))}, status, headers=headers)
