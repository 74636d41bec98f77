"""Longest common runs of words between a short text and long ones, with the place of each run.

Comparison is over lower-cased words (letters, digits, underscore), so re-wrapping, quoting and punctuation hide nothing.
A runbook is short and is often the only one of its context, so the long texts are only flattened, never indexed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

_WORD = re.compile(r"\w+")
SEED_WORDS = 4  # shortest run that is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    text: str  # lower case
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Words `first … last-1` of the searched text also stand in `source` at line `line`."""

    first: int
    last: int
    source: str
    line: int  # 1-based


def words_of(text: str) -> list[Word]:
    return [Word(text=m.group().lower(), start=m.start(), end=m.end()) for m in _WORD.finditer(text)]


@lru_cache(maxsize=256)
def joined(text: str) -> str:
    """Words with one blank between and around them: `f" {run} " in joined(text)` asks for a run of whole words."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


class Passages:
    """`texts` by name, asked for the runs that they share with a line."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._flat = [(name, joined(text)) for name, text in texts.items()]

    def runs(self, words: list[Word]) -> Iterator[Run]:
        """Maximal runs, left to right, not overlapping."""
        i = 0
        while i + SEED_WORDS <= len(words):
            best = (0, "", 0)
            for name, flat in self._flat:
                run = " " + " ".join(w.text for w in words[i : i + SEED_WORDS]) + " "
                at = flat.find(run)
                if at < 0:
                    continue
                n = SEED_WORDS
                while i + n < len(words):
                    longer = flat.find(f"{run}{words[i + n].text} ", at)
                    if longer < 0:
                        break
                    run, at, n = f"{run}{words[i + n].text} ", longer, n + 1
                if n > best[0]:
                    best = (n, name, flat.count(" ", 0, at))  # words before the run
            if best[0]:
                yield Run(first=i, last=i + best[0], source=best[1], line=self._line(best[1], best[2]))
                i += best[0]
            else:
                i += 1

    def _line(self, name: str, word: int) -> int:
        """1-based line of the word number `word`."""
        for number, line in enumerate(self._texts[name].split("\n"), start=1):
            word -= len(_WORD.findall(line))
            if word < 0:
                return number
        return 1
