"""Signing in through an OpenID Connect provider: authorization code with PKCE, state and nonce (extra `oidc`).

What must survive the way to the provider and back (`Flight`) lies in a signed cookie of this browser; the provider's
answer counts only together with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from itsdangerous import BadSignature, URLSafeTimedSerializer

from orchestrator.models import Role
from orchestrator.settings import Settings
from stages.errors import ConfigError, ServiceError

BACK = "/sign-in/oidc/back"
SCOPE = "openid profile email"
ALGORITHMS = ["RS256", "ES256", "PS256"]  # of ID tokens; never "none", never a shared secret
LEEWAY_S = 60  # between the two clocks
FLIGHT_S = 600
TIMEOUT_S = 10.0
ENDS = ("issuer", "authorization_endpoint", "token_endpoint", "jwks_uri")
ADVICE = "Sign in with a password, and ask an administrator to look at RSI_OIDC_ISSUER and the provider."


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One try to sign in, between leaving and coming back."""

    state: str
    nonce: str
    verifier: str
    following: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the provider says about somebody, checked."""

    subject: str  # "<issuer>|<sub>", which never changes
    login: str  # a wish
    name: str
    email: str  # empty unless the provider has verified it
    roles: frozenset[Role] | None  # None: this installation does not map roles


class Provider:
    def __init__(self, settings: Settings, key: str) -> None:
        """Raises ConfigError for settings that do not fit together, or without the extra `oidc`."""
        try:
            import authlib  # noqa: F401
        except ImportError:
            raise ConfigError("RSI_OIDC_ISSUER is set; it needs `pip install 'terminal-rsi[oidc]'`.") from None
        self.issuer, self.client_id = settings.oidc_issuer, settings.oidc_client_id
        _check_issuer(self.issuer)
        if not self.client_id:
            raise ConfigError("RSI_OIDC_ISSUER is set; RSI_OIDC_CLIENT_ID is needed, too.")
        self._secret = _secret(settings.oidc_client_secret_file)
        self._claim, self._roles = settings.oidc_role_claim, role_table(settings.oidc_roles)
        self._back = settings.console_public + BACK
        self._flights = URLSafeTimedSerializer(key, salt="rsi.oidc")

    def begin(self, following: str) -> tuple[str, str]:
        """The provider's address to go to, and the cookie to carry. Raises ServiceError when it does not answer."""
        from authlib.common.security import generate_token

        flight = Flight(
            state=generate_token(40), nonce=generate_token(40), verifier=generate_token(64), following=following
        )
        with self._client() as client:
            url, _ = client.create_authorization_url(
                self._metadata()["authorization_endpoint"],
                state=flight.state,
                nonce=flight.nonce,
                code_verifier=flight.verifier,
            )
        return str(url), self._flights.dumps(asdict(flight))

    def finish(self, cookie: str, answer: Mapping[str, str]) -> tuple[Identity, str]:
        """Who came back, and where they were going. Raises ServiceError when the answer does not hold."""
        try:
            flight = Flight(**self._flights.loads(cookie, max_age=FLIGHT_S))
        except (BadSignature, TypeError):
            raise ServiceError("This sign-in was begun in another browser, or too long ago. Begin again.") from None
        if answer.get("state") != flight.state:
            raise ServiceError("The provider's answer belongs to another sign-in. Begin again.")
        if "code" not in answer:
            raise ServiceError(f"The provider refused: {answer.get('error', 'it gave no reason')[:200]}.")
        return self._identity(self._claims(answer["code"], flight)), flight.following

    def _claims(self, code: str, flight: Flight) -> dict[str, Any]:
        from authlib.common.errors import AuthlibBaseError
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        metadata = self._metadata()
        try:
            with self._client() as client:
                tokens = client.fetch_token(
                    metadata["token_endpoint"],
                    grant_type="authorization_code",
                    code=code,
                    code_verifier=flight.verifier,
                    timeout=TIMEOUT_S,
                )
            keys = KeySet.import_key_set(_fetch(metadata["jwks_uri"]))  # type: ignore[arg-type]
            claims = jwt.decode(tokens["id_token"], keys, algorithms=ALGORITHMS).claims
            jwt.JWTClaimsRegistry(
                leeway=LEEWAY_S,
                iss={"essential": True, "value": self.issuer},
                aud={"essential": True, "value": self.client_id},
                exp={"essential": True},
                sub={"essential": True},
                nonce={"essential": True, "value": flight.nonce},
            ).validate(claims)
        except (AuthlibBaseError, JoseError, KeyError, ValueError) as error:
            raise ServiceError(f"The provider's answer does not hold: {error}") from error
        except OSError as error:  # of requests, too
            raise ServiceError(f"The provider {self.issuer} does not answer: {error}. {ADVICE}") from error
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") != self.client_id:
            raise ServiceError("The provider's answer does not hold: it was made for another client.")
        return claims

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        words = claims.get(self._claim, [])
        words = [words] if isinstance(words, str) else words
        given = frozenset(role for word, role in self._roles if word in words) if self._roles else None
        email = str(claims.get("email", "")) if claims.get("email_verified") is True else ""
        wish = str(claims.get("preferred_username") or email.partition("@")[0] or claims["sub"])
        return Identity(
            subject=f"{self.issuer}|{claims['sub']}",
            login="".join(c for c in wish if c.isalnum() or c in "._-")[:100],
            name="".join(c for c in str(claims.get("name", "")) if c.isprintable())[:200],
            email=email if email.isprintable() and len(email) <= 200 else "",
            roles=given,
        )

    def _metadata(self) -> Mapping[str, Any]:
        address = self.issuer.rstrip("/") + "/.well-known/openid-configuration"
        found = _fetch(address)
        if missing := [name for name in ENDS if not isinstance(found.get(name), str)]:
            raise ServiceError(
                f"The provider does not say its {missing[0]} at {address}. Is it an OpenID Connect provider?"
            )
        if found.get("issuer") != self.issuer:
            raise ServiceError(
                f"The provider calls itself {found.get('issuer')}, not {self.issuer}. Correct RSI_OIDC_ISSUER."
            )
        return found

    def _client(self) -> Any:
        from authlib.integrations.requests_client import OAuth2Session

        return OAuth2Session(
            self.client_id,
            self._secret or None,
            scope=SCOPE,
            redirect_uri=self._back,
            code_challenge_method="S256",
            token_endpoint_auth_method="client_secret_basic" if self._secret else "none",
        )


def role_table(text: str) -> tuple[tuple[str, Role], ...]:
    """`"admins=admin,research=lead"` as pairs. Raises ConfigError for anything else."""
    pairs = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        word, _, role = part.rpartition("=")
        if not word or role not in set(Role):
            raise ConfigError(f"RSI_OIDC_ROLES: {part!r} is no word=role. Roles are {', '.join(Role)}.")
        pairs.append((word.strip(), Role(role)))
    return tuple(pairs)


def _check_issuer(issuer: str) -> None:
    """Raises ConfigError for what is no address of a provider."""
    wanted = (
        "Set it to the provider's address, such as https://login.example.org, or leave it empty for passwords alone."
    )
    try:
        place = urlsplit(issuer)
        port = place.port
    except ValueError as error:
        raise ConfigError(f"RSI_OIDC_ISSUER is {issuer!r}, which is no address: {error}. {wanted}") from error
    if place.scheme not in {"https", "http"} or not place.hostname or port == 0 or not issuer.isprintable():
        raise ConfigError(f"RSI_OIDC_ISSUER is {issuer!r}, which is no address. {wanted}")
    if place.query or place.fragment:
        raise ConfigError(f"RSI_OIDC_ISSUER is {issuer!r}; an issuer has no ? and no #. {wanted}")
    if place.scheme != "https" and place.hostname not in {"127.0.0.1", "localhost", "::1"}:
        raise ConfigError(
            f"RSI_OIDC_ISSUER is {issuer!r}; it must begin with https:// except on this machine. {wanted}"
        )


def _fetch(url: str) -> dict[str, Any]:
    try:
        found = httpx.get(url, timeout=TIMEOUT_S)
        found.raise_for_status()
        document = found.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(f"The provider does not answer at {url}: {error}. {ADVICE}") from error
    if not isinstance(document, dict):
        raise ServiceError(f"The provider answers at {url} with something else than a JSON object.")
    return document


def _secret(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"RSI_OIDC_CLIENT_SECRET_FILE cannot be read: {error}") from error
