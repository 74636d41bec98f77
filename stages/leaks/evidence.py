"""Where a word comes from: the public instruction, the agent's own keys, what it read, or the hidden material.

One `Evidence` belongs to one context; its indexes are built when first asked for and then shared by all rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from stages.domain import Task, Trajectory
from stages.leaks.answers import answers
from stages.leaks.passages import Passages, joined, words_of
from stages.leaks.words import COMMON, COMMON_NUMBERS, LISTERS, NUMERALS
from stages.leaks.words import words as word_set

_ATOM = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:[.:]\d+)+|\w+")
_LINES = re.compile(r"\n| ; ")  # the shell harness joins the lines of an observation by " ; "
_BOILERPLATE = re.compile(
    r"^[ \t]*(?:import |from \S+ import |#!|set -|if __name__|(?:\"\"\"|''')\s*$|@pytest|# ?canary|.*BENCHMARK DATA).*$",
    re.M,
)
_FILE_LIKE = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*\.\w+")
_MAX_FILE_CHARS = 200_000
_GENERIC_NAMES = word_set("""
    main.py app.py utils.py config.json config.yaml config.toml data.csv data.json README.md Makefile Dockerfile
    requirements.txt setup.py pyproject.toml package.json index.html input.txt output.txt __init__.py
""")


class OriginKind(StrEnum):
    PUBLIC = "public"  # stands in the instruction
    COMMON = "common"  # carries no information
    OWN = "own"  # the agent typed it before it saw it
    READ = "read"  # the agent saw it first
    FILE = "file"  # content of a workspace file, or a name in the workspace, that the agent did not meet
    HIDDEN = "hidden"  # only the tests or the reference solution hold it
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    kind: OriginKind
    place: str = ""  # "turn 3", "fodu.ref:1", "tests/test.sh:12"
    lone: bool = False  # it stood there alone on its line, as the content of a pointer file or a computed result does
    common: bool = False  # an everyday word: telling only where the runbook produces it


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """The smallest piece of text that has an origin: a word, or a number with its points."""

    text: str  # lower case, thousands separators removed
    start: int
    end: int

    @property
    def is_number(self) -> bool:
        return self.text[:1].isdigit() and self.text.replace(".", "").replace(":", "").isdigit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A run of words shared with a hidden file or an observation."""

    start: int
    end: int
    text: str
    source: str  # "tests/test.sh:12" or "turn 3"


def atoms_of(text: str) -> list[Atom]:
    found = []
    for m in _ATOM.finditer(text):
        word = m.group().lower()
        found.append(Atom(text=word.replace(",", "") if word[0].isdigit() else word, start=m.start(), end=m.end()))
    return found


def _atoms(text: str) -> Iterator[str]:
    for m in _ATOM.finditer(text):
        word = m.group().lower()
        yield word.replace(",", "") if word[0].isdigit() else word


class HiddenTexts:
    """Passages of tests and solution that nothing visible explains.

    `visible` are texts whose runs explain themselves; only the words of the first `sources` of them (instruction, the
    agent's own keys) also explain single words.
    """

    def __init__(self, texts: Mapping[str, str], visible: Sequence[str], sources: int = 2) -> None:
        self._passages = Passages({name: _without_boilerplate(text) for name, text in texts.items()})
        self._visible = tuple(joined(text) for text in visible if text)
        self._words = COMMON.union(*(joined(text).split() for text in visible[:sources]))

    def passages(self, text: str, *, min_words: int = 0, min_strange: int = 0) -> list[Passage]:
        words = words_of(text)
        found = []
        for run in self._passages.runs(words):
            part = [w.text for w in words[run.first : run.last]]
            if len(part) < min_words or strange_words(part, self._words) < min_strange:
                continue
            if is_telling(part, self._words, self._visible):
                start, end = words[run.first].start, words[run.last - 1].end
                found.append(Passage(start=start, end=end, text=text[start:end], source=f"{run.source}:{run.line}"))
        return found


@lru_cache(maxsize=256)
def _without_boilerplate(text: str) -> str:
    return _BOILERPLATE.sub("", text)


def strange_words(part: Sequence[str], explained: frozenset[str]) -> int:
    """Words that carry information and are explained by nothing."""
    return sum(1 for w in part if w not in explained and len(w) > 1 and not (w.isdigit() and len(w) < 3))


def is_telling(part: Sequence[str], explained: frozenset[str], visible: Sequence[str]) -> bool:
    """Is a shared run of words evidence of copying? Few unexplained words need a longer run."""
    strange, n = strange_words(part, explained), len(part)
    if not (strange >= 3 or (strange == 2 and n >= 6) or (strange == 1 and n >= 10) or n >= 24):
        return False
    run = f" {' '.join(part)} "
    return not any(run in text for text in visible)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


ABSENT = HiddenTexts({}, ())


class Evidence:
    """All origins of one context. `hidden` maps "tests/test.sh" and the like to their text."""

    def __init__(self, task: Task, source: Trajectory | None, hidden: Mapping[str, str]) -> None:
        self._task, self._source, self._hidden = task, source, hidden

    # ------------------------------------------------------------ what is public

    @cached_property
    def public(self) -> frozenset[str]:
        """Atoms of the instruction, their parts, and numerals in both spellings."""
        words: set[str] = set()
        for atom in _atoms(self._task.instruction):
            words.add(atom)
            if not atom.isalnum():
                words.update(re.split(r"[_.:]", atom))
            if atom in NUMERALS:
                words.add(NUMERALS[atom])
        words |= {word for word, digit in NUMERALS.items() if digit in words}
        return frozenset(words)

    def is_public(self, atom: str) -> bool:
        if atom in self.public:
            return True
        return "_" in atom and all(p in self.public or p in COMMON for p in atom.split("_") if p)

    @cached_property
    def typed_text(self) -> str:
        return "\n".join(t.action for t in self._source.turns) if self._source else ""

    @cached_property
    def observed_text(self) -> str:
        return "\n".join(t.observation for t in self._source.turns) if self._source else ""

    @cached_property
    def files_text(self) -> str:
        """The workspace's text files, one after the other."""
        return "\n".join(text for _, text in self._text_files())

    @cached_property
    def visible_lower(self) -> str:
        """Instruction, the agent's keys, its screen and the workspace, in lower case."""
        return f"{self._task.instruction}\n{self.typed_text}\n{self.observed_text}\n{self.files_text}".lower()

    def _text_files(self) -> Iterator[tuple[str, str]]:
        for path, content in self._task.files.items():
            if b"\0" not in content[:1024]:
                yield path, content[:_MAX_FILE_CHARS].decode("utf-8", "replace")

    # ---------------------------------------------------------- where things were met

    @cached_property
    def _met(self) -> dict[str, Origin]:
        """First meeting of every atom in the source trajectory: typed (own) or seen (read)."""
        met: dict[str, Origin] = {}
        for turn in self._source.turns if self._source else ():
            own = Origin(kind=OriginKind.OWN, place=f"turn {turn.index}")
            for atom in _atoms(turn.action):
                met.setdefault(atom, own)
            read = Origin(kind=OriginKind.READ, place=f"turn {turn.index}")
            for atom in _atoms(turn.observation):
                met.setdefault(atom, read)
        return met

    @cached_property
    def _lone(self) -> dict[str, Origin]:
        """Values that an observation showed alone on a line, before the agent typed them; listings of names excepted."""
        lone: dict[str, Origin] = {}
        typed: set[str] = set()
        for turn in self._source.turns if self._source else ():
            typed.update(_atoms(turn.action))
            if turn.action.split(None, 1)[:1] and turn.action.split(None, 1)[0] in LISTERS:
                continue
            for line in _LINES.split(turn.observation):
                atoms = list(_atoms(line))
                if 1 <= len(atoms) <= 3 and len(line) <= 80:
                    for atom in atoms:
                        if atom not in typed:
                            lone.setdefault(atom, Origin(kind=OriginKind.READ, place=f"turn {turn.index}", lone=True))
        return lone

    @cached_property
    def listed(self) -> frozenset[str]:
        """Atoms of names that exist: workspace files, and what `ls`, `find` and the like showed."""
        names: set[str] = set()
        for path in self._task.files:
            names.update(_atoms(path))
        for turn in self._source.turns if self._source else ():
            if turn.action.split(None, 1)[:1] and turn.action.split(None, 1)[0] in LISTERS:
                names.update(_atoms(turn.observation))
        return frozenset(names)

    @cached_property
    def names_met(self) -> frozenset[str]:
        """File names of the workspace, and every file-like word that the agent typed or saw; with and without folders."""
        names: set[str] = set(self._task.files)
        for turn in self._source.turns if self._source else ():
            names.update(_FILE_LIKE.findall(f"{turn.action}\n{turn.observation}"))
        return frozenset(names | {n.rsplit("/", 1)[-1] for n in names})

    @cached_property
    def _files(self) -> dict[str, Origin]:
        """Atoms inside the workspace's text files."""
        found: dict[str, Origin] = {}
        for path, text in self._text_files():
            lines = text.split("\n")
            alone = len([line for line in lines if line.strip()]) == 1
            for number, line in enumerate(lines, start=1):
                atoms = list(_atoms(line))
                pointer = alone and len(atoms) <= 3 and not set(atoms) & set(_atoms(path))
                for atom in atoms:
                    if pointer or atom not in found:
                        found[atom] = Origin(kind=OriginKind.FILE, place=f"{path}:{number}", lone=pointer)
        return found

    @cached_property
    def _pointers(self) -> dict[str, Origin]:
        """Words that are the whole content of a workspace file, unless the agent typed them first."""
        return {
            atom: origin
            for atom, origin in self._files.items()
            if origin.lone and (atom not in self._met or self._met[atom].kind is not OriginKind.OWN)
        }

    @cached_property
    def check_ids(self) -> tuple[str, ...]:
        """Ids of the verifier's checks that are names, not words, and that nothing visible holds."""
        visible = f"{self._task.instruction}\n{self.typed_text}\n{self.observed_text}"
        ids = (c.id for c in self._task.checks)
        return tuple(i for i in ids if len(i) > 5 and re.search(r"[\W_]", i) and i not in visible)

    @cached_property
    def _hidden_lower(self) -> list[tuple[str, str]]:
        return [(name, text.lower()) for name, text in self._hidden.items()]

    def hidden_place(self, atom: str) -> str | None:
        """Where hidden material holds the atom (lower case) as a whole word, as in "tests/test.sh:12"."""
        for name, text in self._hidden_lower:
            start = text.find(atom)
            while start >= 0:
                end = start + len(atom)
                if not (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                    return f"{name}:{text.count(chr(10), 0, start) + 1}"
                start = text.find(atom, end)
        if len(atom) > 3 and atom.isdigit() and atom[0] != "0":  # written with thousands separators there
            return self.hidden_place(f"{int(atom):,}")
        return None

    def origin(self, atom: str) -> Origin:
        """Where `atom` (lower case) comes from. Public beats everything; what was read beats what was typed later."""
        if self.is_public(atom):
            return Origin(kind=OriginKind.PUBLIC, place="instruction")
        everyday = atom in COMMON or (len(atom) == 1 and not atom.isdigit())
        alone = self._lone.get(atom) or self._pointers.get(atom)
        if alone:
            return replace(alone, common=True) if everyday else alone
        if everyday:
            return Origin(kind=OriginKind.COMMON)
        found = self._met.get(atom) or self._files.get(atom)
        if found:
            return found
        place = self.hidden_place(atom)
        if place:
            return Origin(kind=OriginKind.HIDDEN, place=place)
        if atom in self.listed:
            return Origin(kind=OriginKind.FILE, place="workspace")
        if atom in COMMON_NUMBERS:
            return Origin(kind=OriginKind.COMMON)
        return Origin(kind=OriginKind.UNKNOWN)

    # ------------------------------------------------------------------- passages

    @cached_property
    def hidden_passages(self) -> HiddenTexts:
        return HiddenTexts(self._hidden, (self._task.instruction, self.typed_text, self.observed_text, self.files_text))

    @cached_property
    def _observations(self) -> Passages:
        turns = self._source.turns if self._source else ()
        return Passages({f"turn {t.index}": t.observation for t in turns})

    def copied(self, text: str) -> list[Passage]:
        """Runs of words of `text` that an observation holds and neither instruction nor own keys explain."""
        words = words_of(text)
        if self._source is None or len(words) < 4:
            return []
        visible = (joined(self._task.instruction), joined(self.typed_text))
        explained = COMMON.union(self.public, visible[1].split())
        found = []
        for run in self._observations.runs(words):
            part = [w.text for w in words[run.first : run.last]]
            if is_telling(part, explained, visible):
                start, end = words[run.first].start, words[run.last - 1].end
                found.append(Passage(start=start, end=end, text=text[start:end], source=run.source))
        return found

    @cached_property
    def answers(self) -> list[tuple[str, str]]:
        """What this attempt had to find out: (normalised text, place)."""
        return answers(self._task, self._source, self._hidden)

    # ------------------------------------------------------------- hidden names, words

    def made_by_agent(self, name: str) -> bool:
        """The agent itself wrote a relative file of that name, so the name is its own."""
        if name.startswith(("/", ".")):
            return False
        base = re.escape(name.rsplit("/", 1)[-1])
        return bool(re.search(rf"(?:>|\btouch|\btee)\s*[\w./]*{base}(?![\w\-])", self.typed_text))

    @cached_property
    def hidden_names(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """(hidden file, pattern of its path or base name), where that name is neither public nor the agent's own."""
        public = "\n".join((self._task.instruction, *self._task.files))
        names = []
        for path in self._hidden:
            base = path.rsplit("/", 1)[-1]
            for name in (path, base):
                if name in public or (base in _GENERIC_NAMES and name == base) or self.made_by_agent(name):
                    continue
                names.append((path, re.compile(rf"(?<![\w.\-/]){re.escape(name)}(?![\w\-])")))
        return tuple(names)

    def typed_first(self, atom: str) -> int | None:
        """Turn in which the agent typed the atom before it saw it; None if it saw it first, or never typed it."""
        origin = self._met.get(atom)
        return int(origin.place.removeprefix("turn ")) if origin and origin.kind is OriginKind.OWN else None

    def is_pointer(self, atom: str) -> bool:
        """The atom is the whole content of a workspace file."""
        return atom in self._files and self._files[atom].lone

    def hidden_file_with(self, text: str) -> str | None:
        return next((name for name, body in self._hidden.items() if text in body), None)

    def file_place(self, atom: str) -> str | None:
        """ "fodu.ref:1" when the content of a workspace file holds the atom."""
        origin = self._files.get(atom)
        return origin.place if origin else None
