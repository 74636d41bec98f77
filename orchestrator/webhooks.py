"""The webhook: every notice as signed JSON to one address, tried again with growing pauses, every attempt recorded.

Set `RSI_WEBHOOK_URL`. Run by the supervisor and by `rsi reconcile --every`, never by a web request. A receiver checks
`X-RSI-Signature: sha256=…`, the HMAC-SHA256 of `{X-RSI-Timestamp}.{body}` under the secret in `RSI_WEBHOOK_SECRET_FILE`
(made at the first use), and may see a notice twice: `id` in the body tells.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from orchestrator import models as m
from orchestrator.models.columns import now
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.notices import DeliveryEntry
from stages.errors import ConfigError, ServiceError

TIMEOUT_S = 10.0
PAUSES_S = (10, 60, 300, 1800, 7200, 21600, 86400)  # after the first, second, … failure; then it is given up


def deliver(store: Store, settings: Settings) -> int:
    """Send what is due; returns how many attempts were made. Does nothing without `RSI_WEBHOOK_URL`.

    Raises:
        ConfigError: the address is no http(s) URL.
        ServiceError: the secret cannot be read or made.
    """
    url = settings.webhook_url
    if not url:
        return 0
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"RSI_WEBHOOK_URL: {url!r} is no http:// or https:// address")
    key = secret(settings.webhook_secret_path)
    store.notices.enqueue(url)
    due = store.notices.claim_due(url, now())
    if not due:
        return 0
    with httpx.Client(follow_redirects=False, trust_env=False, timeout=TIMEOUT_S) as client:
        for entry in due:
            _attempt(store, client, entry, key)
    return len(due)


def deliver_once(settings: Settings, database_url: str) -> int:
    """As `deliver`, through a store of its own."""
    store = Store.open(database_url, settings.artifacts, pool_size=1)
    try:
        return deliver(store, settings)
    finally:
        store.close()


def secret(path: Path) -> bytes:
    """The signing secret; made at the first use, readable by the owner only. Raises ServiceError when that fails."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                handle.write(secrets.token_urlsafe(32) + "\n")
            fresh.replace(path)
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServiceError(f"{path}: the webhook's secret cannot be used: {error}") from error
    if not found:
        raise ServiceError(f"{path}: the webhook's secret is empty; delete the file to have one made")
    return found.encode()


def signature(key: bytes, timestamp: str, body: bytes) -> str:
    return "sha256=" + hmac.new(key, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def body_of(notice: m.Notice) -> bytes:
    """What a receiver gets."""
    document = {
        "id": notice.id,
        "kind": notice.kind,
        "cycle": notice.cycle_id,
        "text": notice.text,
        "created_at": notice.created_at.isoformat(),
        "details": notice.payload,
    }
    return json.dumps(document, ensure_ascii=False, sort_keys=True).encode()


def _attempt(store: Store, client: httpx.Client, entry: DeliveryEntry, key: bytes) -> None:
    body, timestamp = body_of(entry.notice), str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "terminal-rsi",
        "X-RSI-Timestamp": timestamp,
        "X-RSI-Signature": signature(key, timestamp, body),
    }
    status: int | None = None
    try:
        with client.stream("POST", entry.delivery.url, content=body, headers=headers) as answer:
            status = answer.status_code  # its text is not read: it may be of any length
        error = "" if answer.is_success else f"answered {status}"
        if answer.is_redirect:
            error += "; redirects are not followed, name the final address"
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        error = f"{type(failure).__name__}: {failure}"
    failures = entry.delivery.attempts  # before this attempt
    if not error:
        store.notices.record_attempt(entry.id, state=m.DeliveryState.DELIVERED, status=status)
    elif failures < len(PAUSES_S):
        later = now() + timedelta(seconds=PAUSES_S[failures])
        store.notices.record_attempt(entry.id, state=m.DeliveryState.WAITING, status=status, error=error, next_at=later)
    else:
        store.notices.record_attempt(entry.id, state=m.DeliveryState.GIVEN_UP, status=status, error=error)
