"""What a model sees of a command's output: one short line.

The pre-training corpus and the shell harness use this same function, so that the model reads in a rollout what it read in
pre-training. Deterministic, total: any bytes give a string.
"""

from __future__ import annotations

import re

_BASH = re.compile(r"^(?:/\S*/)?bash: (?:eval: )?(?:line \d+: )?", re.MULTILINE)  # who complains, never what is wrong
_CONTROL = re.compile(r"[^\S\n]+|[\x00-\x08\x0e-\x1f\x7f]")
_QUOTES = str.maketrans({"‘": "'", "’": "'"})  # coreutils quotes so outside the C locale
_BYTES_PER_CHAR = 16  # how much raw output is looked at: more cannot reach the kept characters in ordinary text


def tidy(output: bytes, exit_code: int | None, timed_out: bool, limit_chars: int = 64) -> str:
    """The observation after one command, at most `limit_chars` characters.

    `output` is stdout and stderr as they came. Lines are joined by " ; ", bash's own "bash: line N: " is dropped, runs of
    blanks become one blank, other control characters vanish, bytes that are not UTF-8 become U+FFFD. A command that failed
    starts with "err "; one that failed silently reads "err failed". `exit_code` None: "err timeout" if `timed_out`, else
    the shell ended: "err shell ended".
    """
    if timed_out:
        return "err timeout"[:limit_chars]
    if exit_code is None:
        return "err shell ended"[:limit_chars]
    text = output[: limit_chars * _BYTES_PER_CHAR].decode("utf-8", "replace").replace("\r", "\n")
    text = _CONTROL.sub(lambda m: " " if m[0].isspace() else "", _BASH.sub("", text)).translate(_QUOTES)
    text = " ; ".join(line for line in map(str.strip, text.split("\n")) if line)
    if exit_code == 0:
        return text[:limit_chars]
    return f"err {text or 'failed'}"[:limit_chars]
