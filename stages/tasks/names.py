"""Names of files, directories and words: two syllables, consonant + vowel each ("bafo").

Every name belongs to one partition by the hash of its letters, so that splits are disjoint by construction: no generator
can hand a held-out name to a training task, whatever its seed.
"""

from __future__ import annotations

import hashlib
import random
from enum import StrEnum

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)

STOP_WORDS = frozenset(
    (
        *("data", "date", "done", "file", "five", "gone", "late", "life", "like", "line", "live", "made", "make"),
        *("mode", "more", "move", "name", "none", "note", "rate", "save", "same", "side", "size", "take", "tape"),
        *("time", "tone", "type", "vote", "zero", "give", "base", "site", "rule", "role"),
        *("dago", "homo", "kike", "nazi", "pedo", "puta", "puto", "rape"),  # no word that offends
    )
)
"""CVCV words that instructions, runbooks or bash use, or might: never names, so a name is never read as a word."""

EXTENSIONS = ("dat", "tmp", "bak", "img")
"""File kinds that a subgoal may treat as a group; within one task each belongs to one subgoal."""


class Partition(StrEnum):
    """Who may use a name."""

    TRAIN = "train"  # training pools and the pre-training corpus: 70 %
    VALIDATION = "validation"  # the protected validation suite: 10 %
    HELDOUT = "heldout"  # the reported suite of unseen names: 20 %


def partition_of(name: str) -> Partition:
    """The partition of a name, from the first byte pair of its SHA-256."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    if bucket < 7:
        return Partition.TRAIN
    return Partition.VALIDATION if bucket == 7 else Partition.HELDOUT


def _all_names() -> dict[Partition, tuple[str, ...]]:
    found: dict[Partition, list[str]] = {p: [] for p in Partition}
    for first in SYLLABLES:
        for second in SYLLABLES:
            name = first + second
            if first != second and name not in STOP_WORDS:
                found[partition_of(name)].append(name)
    return {p: tuple(names) for p, names in found.items()}


NAMES = _all_names()
"""Every usable name by partition, in alphabetical order of their syllables."""


class NameSource:
    """Hands out names of one partition and extensions, none twice within one task."""

    __slots__ = ("_extensions", "_names", "_rng", "_used")

    def __init__(self, rng: random.Random, partition: Partition) -> None:
        self._rng = rng
        self._names = NAMES[partition]
        self._used: set[str] = set()
        self._extensions = list(EXTENSIONS)
        rng.shuffle(self._extensions)

    def __call__(self) -> str:
        """A name that this source has not given yet."""
        while (name := self._rng.choice(self._names)) in self._used:
            pass
        self._used.add(name)
        return name

    def extension(self) -> str:
        """A file extension for a group of files; at most `len(EXTENSIONS)` per task."""
        return self._extensions.pop()
