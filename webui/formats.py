"""Numbers, times and texts as the console writes them. Missing is "—", never 0; minus is U+2212.

Every function takes None where a value may be missing. These are the template filters of the same names.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

MISSING = "—"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def minus(text: str) -> str:
    return text.replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as "19.8 %"."""
    return MISSING if value is None or math.isnan(value) else minus(f"{100 * value:.{digits}f} %")


def points(value: float | None) -> str:
    """A difference of shares as "+2.4 pp"."""
    return MISSING if value is None or math.isnan(value) else minus(f"{100 * value:+.1f} pp")


def interval(low: float | None, high: float | None) -> str:
    """Shares of 1 as "[15.4, 25.2]"."""
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}]"


def signed(value: float | None, digits: int = 2) -> str:
    """EV and the like: "−1.15"."""
    return MISSING if value is None or math.isnan(value) else minus(f"{value:.{digits}f}")


def number(value: float | None) -> str:
    """Any number, short: "5e-7", "0.30", "1 024"."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if isinstance(value, int) or float(value).is_integer():
        return minus(f"{int(value):,}".replace(",", " "))
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.3g}".partition("e")[::2] if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
        return f"{minus(mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa)}e{int(exponent)}"
    if abs(value) >= 1000:
        return number(round(value))
    return minus(f"{value:.3g}")


def tokens(value: int | None) -> str:
    """A count of tokens: "1.28 M tok"."""
    if value is None:
        return MISSING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit} tok"
    return f"{value} tok"


def duration(seconds: float | None) -> str:
    """ "2 h 14 m", "3 m 05 s", "12.4 s"."""
    if seconds is None or math.isnan(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {left:02d} s"


def between(start: datetime | None, end: datetime | None) -> float | None:
    """Seconds from `start` to `end` (None: until now); None when it has not started."""
    return None if start is None else ((end or datetime.now(UTC)) - start).total_seconds()


def when(time: datetime | None) -> str:
    return MISSING if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def iso(time: datetime | None) -> str:
    return "" if time is None else time.astimezone(UTC).isoformat(timespec="seconds")


def age(time: datetime | None) -> str:
    """ "3 m ago"; a page that stays open lets the script renew it."""
    if time is None:
        return MISSING
    seconds = max(0.0, (datetime.now(UTC) - time).total_seconds())
    return f"{duration(math.floor(seconds)).replace('.0 s', ' s')} ago"


def digest(value: str | None) -> str:
    """The first 12 digits of a digest."""
    return value[:12] if value else MISSING


def setting(value: object) -> str:
    """A configuration's value as it is written in TOML, roughly; nothing is the dash."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(setting, value))}]"
    return str(value) if value != "" else '""'


def visible(text: str) -> str:
    """Terminal text with its control characters written out (^[ for escape), so that none acts on the page or hides text."""
    return str(shown(text.replace("\t", "    ")))


def shown(value: object) -> object:
    """What a template puts on a page: every text of it goes through here, so that no page can forget to.

    Tabs and line ends stay, and markup of our own (`Markup`) is left alone.
    """
    if type(value) is not str or value.isprintable():
        return value
    return _CONTROL.sub(_picture, value.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20 or code == 0x7F:
        return f"^{chr(code ^ 0x40)}"
    return "\ufffd"
