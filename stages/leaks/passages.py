"""Longest common runs of words between a short text and long ones, with the place of each run.

Comparison is over lower-cased words (letters, digits, underscore), so re-wrapping, quoting and punctuation hide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


def joined(text: str) -> str:
    """Words with one blank between and around them: `f" {run} " in joined(text)` asks for a run of whole words."""
    return f" {' '.join(m.group().lower() for m in _WORD.finditer(text))} "


class PassageIndex:
    """Every run of four words of `texts`. Built once for a context, asked for every line."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._words: list[list[str]] = []
        self._lines: list[list[int]] = []
        self._names = list(texts)
        self._seeds: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for number, text in enumerate(texts.values()):
            words: list[str] = []
            lines: list[int] = []
            for at, line in enumerate(text.split("\n"), start=1):
                found = _WORD.findall(line)
                words += [w.lower() for w in found]
                lines += [at] * len(found)
            self._words.append(words)
            self._lines.append(lines)
            for i in range(len(words) - SEED_WORDS + 1):
                places = self._seeds.setdefault(tuple(words[i : i + SEED_WORDS]), [])
                if len(places) < 8:  # boilerplate repeats; eight places are enough to find the longest run
                    places.append((number, i))

    def runs(self, words: list[Word]) -> Iterator[Run]:
        """Maximal runs, left to right, not overlapping."""
        i = 0
        while i + SEED_WORDS <= len(words):
            best = (0, 0, 0)
            for number, j in self._seeds.get(tuple(w.text for w in words[i : i + SEED_WORDS]), ()):
                other, n = self._words[number], SEED_WORDS
                while i + n < len(words) and j + n < len(other) and words[i + n].text == other[j + n]:
                    n += 1
                best = max(best, (n, -number, -j))
            if best[0]:
                n, number, j = best[0], -best[1], -best[2]
                yield Run(first=i, last=i + n, source=self._names[number], line=self._lines[number][j])
                i += n
            else:
                i += 1
