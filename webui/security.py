"""Headers that every answer carries, the largest body that is read, and what an access log must not hold.

The policy allows files of this origin and nothing else: no inline script or style.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webui.problems import problem

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class SecurityHeaders:
    """Pure ASGI, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


MAX_BODY = 4 * 2**20  # bytes


class BodyLimit:
    """Answers 413 for a body above `MAX_BODY`, before the rest of it is read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read = 0
        too_large = HTTPException(413, f"The body is larger than {MAX_BODY // 2**20} MiB. Nothing was changed.")

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY:
                raise too_large
            return message

        length = Headers(scope=scope).get("Content-Length", "")
        try:
            if length.isdecimal() and int(length) > MAX_BODY:
                raise too_large
            await self.app(scope, bounded, send)
        except HTTPException as error:  # raised above, outside of the app's own handlers: nothing has been sent yet
            await problem(error.status_code, error.detail, scope["path"])(scope, receive, send)


class _WithoutQuery(logging.Filter):
    """The addresses below /sign-in/ carry one-time secrets in their query; the access log gets them without it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                a.partition("?")[0] if isinstance(a, str) and a.startswith("/sign-in/") else a for a in record.args
            )
        return True


ACCESS_LOG_FILTER = _WithoutQuery()
