"""Who asks, and whether the request really comes from them: decided once, here, before any page runs.

A cookie (signed, HttpOnly, SameSite=Lax) names a sign-in; `Authorization: Bearer` names an API token. Every unsafe
request of a cookie must come from this origin and send back the token of its sign-in, as the field `csrf` or the header
`X-CSRF-Token`. A bearer needs neither: no browser sends that header by itself.
"""

from __future__ import annotations

from urllib.parse import urlencode, urlsplit

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response
from itsdangerous import BadSignature, Signer
from starlette.formparsers import MultiPartException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator import models as m
from orchestrator.credentials import signing_key
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.accounts import SIGN_IN_DAYS
from stages.errors import ConfigError, StoreError
from webui.access import ANONYMOUS, NOBODY, Action, Viewer
from webui.errors import error_page, refusal, wants_page

COOKIE = "rsi_session"
HEADER = "x-csrf-token"
FIELD = "csrf"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN = ("/healthz", "/static/")  # asked by probes, and needed by the sign-in page
SIGN_IN = "/sign-in"  # this address and those below it are for people who are not signed in yet


class Keys:
    """Signs and reads cookies, and derives the form token of a sign-in from its cookie."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._cookies = Signer(key, salt="rsi.cookie", key_derivation="hmac", digest_method="sha256")
        self._forms = Signer(key, salt="rsi.csrf", key_derivation="hmac", digest_method="sha256")

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        return cls(signing_key(settings.secret_path))

    def cookie(self, secret: str) -> str:
        return self._cookies.sign(secret).decode()

    def secret(self, cookie: str) -> str | None:
        """None for a cookie that was not made here."""
        try:
            return self._cookies.unsign(cookie).decode()
        except (BadSignature, UnicodeError):
            return None

    def csrf(self, secret: str) -> str:
        return self._forms.get_signature(secret).decode()

    def csrf_holds(self, secret: str, given: str) -> bool:
        return self._forms.verify_signature(secret, given)


class SignIn:
    """Leaves the viewer in `request.state.viewer`. Pure ASGI, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp, *, store: Store, settings: Settings, keys: Keys) -> None:
        self.app = app
        self._store = store
        self._keys = keys
        self._host = urlsplit(settings.console_url).netloc
        self._anonymous = anonymous(settings.anonymous_roles)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OPEN):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            viewer, secret = await run_in_threadpool(self._who, request)
        except StoreError as error:
            await error_page(request, 503, "The database does not answer", str(error))(scope, receive, send)
            return
        request.state.viewer = viewer or self._anonymous
        request.state.who = lambda: self._who(request)[0] or self._anonymous
        answer = self._refuse_stranger(request, viewer)
        if answer is None and request.method not in SAFE and not _bearer(request):
            answer, receive = await self._refuse_forgery(request, secret)
        await (answer or self.app)(scope, receive, send)

    def _who(self, request: Request) -> tuple[Viewer | None, str]:
        """The viewer, None for nobody, and the cookie's secret. A bearer goes before a cookie."""
        if bearer := _bearer(request):
            if (found := self._store.api_tokens.use(bearer)) is None:
                return None, ""
            token, user = found
            scope = frozenset(Action(word) for word in token.scopes if word in set(Action))
            return viewer_for(user, scope=scope), ""
        secret = self._keys.secret(request.cookies.get(COOKIE, ""))
        if secret is None or (owner := self._store.sign_ins.user(secret)) is None:
            return None, ""
        return viewer_for(owner, csrf=self._keys.csrf(secret)), secret

    def _refuse_stranger(self, request: Request, viewer: Viewer | None) -> Response | None:
        """An answer for nobody, where nobody may not be."""
        if viewer is not None or _is_sign_in(request.url.path):
            return None
        if _bearer(request):
            return refusal(request, 401, "This API token does not hold", "It is unknown, expired or revoked.")
        if request.method in SAFE:
            if self._anonymous.roles:
                return None
            if wants_page(request):
                return RedirectResponse(sign_in_href(request.url.path, request.url.query), 303)
        return refusal(request, 401, "You are not signed in", "Sign in at /sign-in, then send this again.")

    async def _refuse_forgery(self, request: Request, secret: str) -> tuple[Response | None, Receive]:
        """An answer for a request that another site sent, and what the app reads the body from."""
        if not self._own_origin(request):
            return refusal(request, 403, "This was sent by another site", "Nothing was changed."), request.receive
        if not secret:  # signing in: there is no sign-in yet that could be abused
            return None, request.receive
        receive = request.receive
        given = request.headers.get(HEADER)
        if given is None:
            given, receive = await _field(request)
        if self._keys.csrf_holds(secret, given):
            return None, receive
        advice = "Nothing was changed. Open the form again and send it from there: it belonged to another sign-in."
        return refusal(request, 403, "This form does not hold any more", advice), receive

    def _own_origin(self, request: Request) -> bool:
        """What the browser says about where it comes from; a client that says nothing is no browser."""
        if site := request.headers.get("Sec-Fetch-Site"):
            return site in {"same-origin", "none"}
        if origin := request.headers.get("Origin"):
            mine = {request.headers.get("Host", ""), self._host} - {""}
            return urlsplit(origin).netloc in mine
        return True


def viewer_for(user: m.User, *, csrf: str = "", scope: frozenset[Action] | None = None) -> Viewer:
    roles = frozenset(m.Role(word) for word in user.roles if word in set(m.Role))
    return Viewer(login=user.login, name=user.name, user_id=user.id, roles=roles, csrf=csrf, scope=scope)


def anonymous(roles: str) -> Viewer:
    """What somebody is who is not signed in: by default nobody; never one who may change something.

    Raises ConfigError for a word that is no role.
    """
    words = [word.strip() for word in roles.split(",") if word.strip()]
    if unknown := set(words) - set(m.Role):
        raise ConfigError(f"RSI_ANONYMOUS_ROLES names {', '.join(sorted(unknown))}. Choose among {', '.join(m.Role)}.")
    return Viewer(roles=frozenset(map(m.Role, words)), scope=ANONYMOUS) if words else NOBODY


def still_may(request: Request, action: Action) -> bool:
    """Whether who began this request may still do that; for answers that last. A database that is away takes no right."""
    try:
        viewer: Viewer = request.state.who()
    except StoreError:
        return True
    return viewer.may(action)


def open_session(request: Request, response: Response, user: m.User, how: str) -> None:
    """Sign `user` in on this browser: a fresh sign-in, whatever cookie came before."""
    store, keys = request.app.state.store, request.app.state.keys
    close_session(request, response)
    address = address_of(request)
    secret = store.sign_ins.open(user.id, how, address=address, agent=request.headers.get("User-Agent", ""))
    store.audit_trail.add(user.login, "sign-in", payload={"how": how, "address": address})
    response.set_cookie(
        COOKIE,
        keys.cookie(secret),
        max_age=SIGN_IN_DAYS * 86_400,
        httponly=True,
        samesite="lax",
        secure=is_https(request),
    )


def close_session(request: Request, response: Response) -> None:
    """End the sign-in of this browser's cookie, if it has one."""
    if (secret := session_secret(request)) is not None:
        request.app.state.store.sign_ins.end(secret)
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")


def is_https(request: Request) -> bool:
    """Whether people reach the console by https; a proxy may speak http to it."""
    return request.url.scheme == "https" or request.app.state.settings.console_url.startswith("https:")


def address_of(request: Request) -> str:
    return request.client.host if request.client else ""


def session_secret(request: Request) -> str | None:
    keys: Keys = request.app.state.keys
    return keys.secret(request.cookies.get(COOKIE, ""))


def sign_in_href(path: str = "", query: str = "") -> str:
    following = f"{path}?{query}" if query else path
    return f"{SIGN_IN}?{urlencode({'next': following})}" if following not in ("", "/") else SIGN_IN


def local_path(following: str) -> str:
    """The address to go to after signing in, "/" for anything that is no page of this console."""
    parts = urlsplit(following)
    clean = following.isprintable() and "\\" not in following and not following.startswith("//")
    if clean and following.startswith("/") and not parts.scheme and not parts.netloc and not _is_sign_in(parts.path):
        return following
    return "/"


def _is_sign_in(path: str) -> bool:
    return path == SIGN_IN or path.startswith(SIGN_IN + "/")


def _bearer(request: Request) -> str:
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else ""


async def _field(request: Request) -> tuple[str, Receive]:
    """The form's token, and the body once more for the app. `webui.security` has bounded its size."""
    whole: Message = {"type": "http.request", "body": await request.body(), "more_body": False}
    left = [whole]

    async def replay() -> Message:
        return left.pop() if left else await request.receive()  # what comes after the body is a disconnect

    kind = request.headers.get("Content-Type", "")
    if not kind.startswith(("application/x-www-form-urlencoded", "multipart/form-data")):
        return "", replay
    try:
        form = await request.form()  # from the body that was just read
    except MultiPartException:
        return "", replay
    given = form.get(FIELD, "")
    return (given if isinstance(given, str) else ""), replay
