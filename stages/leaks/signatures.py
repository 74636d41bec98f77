"""Shapes of text that no planner may see and no runbook may hold: secrets, hidden paths, hashes, blobs.

Used by the sanitiser (which removes them) and by the rules (which report them). `public` is text that everybody may see,
as a rule the instruction: what stands there verbatim is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One hit: what it is and where, in characters of the text searched."""

    kind: str  # "secret", "hidden path", "hash" or "blob"
    name: str  # which shape, e.g. "github-token"
    start: int
    end: int


# Values of these shapes are secrets wherever they stand (vendors' published token formats).
_TOKENS = {
    "private-key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----)?",
    "aws-key-id": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "github-token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "gitlab-token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "slack-token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "google-key": r"\bAIza[0-9A-Za-z_-]{30,}",
    "huggingface-token": r"\bhf_[A-Za-z0-9]{20,}",
    "npm-token": r"\bnpm_[A-Za-z0-9]{30,}",
    "stripe-key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "api-key": r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{18,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{6,}",
    "password-hash": r"\$(?:1|2[aby]?|5|6|y|argon2id?)\$[^\s:'\"]{16,}",
}
_TOKEN = re.compile("|".join(f"(?P<{name.replace('-', '_')}>{rx})" for name, rx in _TOKENS.items()))
# One cheap pass that says whether the expensive one is worth it.
_TOKEN_HINT = re.compile(
    r"-----BEGIN|AKIA|ASIA|gh[pousr]_|github_pat|glpat-|xox[abeoprs]-|AIza|hf_|npm_|[rs]k_|sk-|eyJ|\$[\dy2a]"
)

# `password = value`, `--token value`, `user:password@host`. The value is group 1; what it may be is checked in code.
_NAMED = (
    (
        "password",
        re.compile(
            r"(?i)(?:\b|_)(?:pass(?=\s*=)|pass(?:word|wd|phrase)|pwd|secret)\b[\"']?\s*(?:=|:(?!/)|\bis\b)\s*[\"'`]?([^\s\"'`,;|&<>()]{4,})"
        ),
    ),
    (
        "credential",
        re.compile(
            r"(?i)(?:\b|_)(?:token|api[_-]?key|access[_-]?key|secret[_-]?key|credentials?|authorization)\b[\"']?\s*"
            r"(?:=|:|\bis\b)\s*[\"'`]?(?:bearer\s+|basic\s+)?([^\s\"'`,;|&<>()]{6,})"
        ),
    ),
    ("bearer", re.compile(r"(?i)\bbearer\s+([A-Za-z0-9._~+/=-]{12,})")),
    (
        "password-option",
        re.compile(r"--?(?:password|passwd|passphrase|token|secret)[= ][\"']?([^\s\"'`;|&<>()-][^\s\"'`;|&<>()]{3,})"),
    ),
    ("url-password", re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s:/@]+:([^\s@/]{3,})@")),
    ("sshpass", re.compile(r"\bsshpass\s+-p\s*[\"']?([^\s\"';|&]{3,})")),
)
_NAMED_HINT = re.compile(r"(?i)pass|pwd|secret|token|key|cred|auth|bearer|://")
_PLACEHOLDER = re.compile(
    r"(?i)[$%<{\[].*|\.{2,}|x{3,}|\*+|(?:it|this|that|none|null|true|false|your.*|my.*|the|an?|to|for|from|required|prompt|stdin"
    r"|changeme|example|secret|password|placeholder|incorrect|invalid|wrong|correct|empty|missing|set|unset|not)"
)

# Harbor's and Terminal-Bench's own places: absent while the agent lives, so nothing public can name them by chance.
_HIDDEN_PATH = re.compile(
    r"(?<![\w.\-])(?:/|(?:\.\./)+)(?:tests|solution|oracle|verifier|logs/verifier)(?![\w.\-])(?:/[\w.\-/*\[\]?{},]*)?"
    r"|(?<![\w\-/])(?:[\w.\-]+/)*"
    r"(?:test_outputs\.py|run[-_]tests\.sh|solve\.sh|solution\.(?:sh|ya?ml)|reward\.(?:txt|json)|ctrf\.json|parser_results\.json)\b"
)
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:0x)?[0-9a-fA-F]{12,}(?![0-9A-Za-z])")
_UUID = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9A-Za-z])")
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{40,}={0,2}(?![A-Za-z0-9+/_\-])|(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{14,}={1,2}(?!\w)"
)
_ESCAPES = re.compile(r"(?:\\x[0-9a-fA-F]{2}){6,}")
_LONG_WORD = re.compile(r"\S{200,}")


def _is_value(name: str, value: str) -> bool:
    """Does the text after `password =` look like a value, not like prose or code?"""
    value = value.rstrip(".!?]}")
    if len(value) < 3 or _PLACEHOLDER.fullmatch(value) or value.startswith(("/", "~", "./", "-")):
        return False
    if "(" in value or value.endswith(":"):
        return False
    if name == "credential":  # "token: next" is code or prose; real tokens mix classes
        return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return True


def secrets(text: str, public: str = "") -> Iterator[Match]:
    """Keys, tokens and passwords that do not stand verbatim in `public`."""
    if _TOKEN_HINT.search(text):
        for m in _TOKEN.finditer(text):
            if m.group() not in public:
                yield Match(kind="secret", name=(m.lastgroup or "").replace("_", "-"), start=m.start(), end=m.end())
    if _NAMED_HINT.search(text):
        for name, rx in _NAMED:
            for m in rx.finditer(text):
                if _is_value(name, m.group(1)) and m.group(1) not in public:
                    yield Match(kind="secret", name=name, start=m.start(1), end=m.end(1))


def hidden_paths(text: str, public: str = "") -> Iterator[Match]:
    """Places of the verifier, the reference solution and the reward that `public` does not itself name."""
    for m in _HIDDEN_PATH.finditer(text):
        named = m.group().rstrip("/.,")
        if named not in public:
            yield Match(kind="hidden path", name=named, start=m.start(), end=m.start() + len(named))


def blobs(text: str, public: str = "") -> Iterator[Match]:
    """Hashes, identifiers, base64 and other long machine text that `public` does not hold."""
    for kind, name, rx in (
        ("hash", "uuid", _UUID),
        ("hash", "hex", _HEX),
        ("blob", "escapes", _ESCAPES),
        ("blob", "base64", _BASE64),
        ("blob", "long-word", _LONG_WORD),
    ):
        for m in rx.finditer(text):
            if m.group() not in public and _dense(name, m.group()):
                yield Match(kind=kind, name=name, start=m.start(), end=m.end())


def _dense(name: str, text: str) -> bool:
    """Rejects look-alikes: decimal numbers, paths, rulers, long identifiers in one case."""
    if name == "hex":
        body = text.removeprefix("0x")
        return any(c.isdigit() for c in body) and any(c.isalpha() for c in body)
    if name == "base64":
        classes = any(c.isdigit() for c in text) + any(c.isupper() for c in text) + any(c.islower() for c in text)
        padded = text.endswith("=")
        if classes < 2 + (not padded) or len(set(text)) < (6 if padded else 16):
            return False
        # A path has short parts between its slashes; base64 has few, far apart.
        parts = re.split(r"[/_\-]", text)
        return padded or max(map(len, parts)) >= 20
    return True


def first_of_each_place(matches: Iterable[Match]) -> list[Match]:
    """Matches in order, without those that overlap an earlier-listed one."""
    kept: list[Match] = []
    for m in matches:
        if all(m.end <= k.start or m.start >= k.end for k in kept):
            kept.append(m)
    return sorted(kept, key=lambda m: m.start)
