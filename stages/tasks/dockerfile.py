"""Reads a Dockerfile far enough to know what a task's workspace holds and what a daemonless sandbox cannot do with it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from posixpath import join, normpath

_CONTINUED = re.compile(r"\\[ \t]*$")
_HEREDOC = re.compile(r"<<-?([\"']?)(\w+)\1")
_HARMLESS = frozenset(
    {"LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ARG", "SHELL"}
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One Dockerfile instruction, continuation lines joined."""

    line: int  # 1-based, of its first line
    name: str  # upper case
    text: str  # the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What a Dockerfile makes of the build context."""

    workdir: str  # the last WORKDIR; "/" if none
    files: Mapping[str, bytes]  # files under `workdir` at the end, relative path -> content
    env: Mapping[str, str]  # what ENV sets
    unsupported: tuple[tuple[int, str], ...]  # what only a real image build can do: line, and a clause each


@lru_cache(maxsize=256)
def parse(text: str) -> tuple[Instruction, ...]:
    """The instructions of a Dockerfile. Total: what is no instruction is skipped (the builder will complain)."""
    found: list[Instruction] = []
    rows = text.splitlines()
    i = 0
    while i < len(rows):
        first = i
        row = rows[i].strip()
        i += 1
        if not row or row.startswith("#"):
            continue
        parts = [row]
        while _CONTINUED.search(parts[-1]) and i < len(rows):
            nxt = rows[i].strip()
            i += 1
            if not nxt.startswith("#"):
                parts[-1] = _CONTINUED.sub("", parts[-1])
                parts.append(nxt)
        joined = " ".join(parts)
        if heredoc := _HEREDOC.search(joined):
            while i < len(rows) and rows[i].strip() != heredoc[2]:
                joined += "\n" + rows[i]
                i += 1
            i += 1
        name, _, rest = joined.partition(" ")
        if name.isalpha():
            found.append(Instruction(first + 1, name.upper(), rest.strip()))
    return tuple(found)


def base_images(text: str) -> list[tuple[int, str]]:
    """(line, image) of every FROM that names an image rather than an earlier stage."""
    stages: set[str] = set()
    found = []
    for instruction in parse(text):
        if instruction.name != "FROM":
            continue
        words = [w for w in instruction.text.split() if not w.startswith("--")]
        if words and words[0] not in stages and words[0] != "scratch":
            found.append((instruction.line, words[0]))
        if len(words) == 3 and words[1].lower() == "as":
            stages.add(words[2])
    return found


def is_pinned(image: str) -> bool:
    """Whether an image reference names a digest, or a tag other than `latest`."""
    if "@sha256:" in image:
        return True
    tag = image.rpartition("/")[2].partition(":")[2]
    return bool(tag) and tag != "latest"


def copies(instruction: Instruction) -> tuple[list[str], str] | None:
    """(sources, destination) of a plain COPY or ADD; None for other stages, URLs, heredocs and broken ones."""
    words = _arguments(instruction.text)
    flags = [w for w in words if w.startswith("--")]
    paths = [w for w in words if not w.startswith("--")]
    if any(f.startswith("--from") for f in flags) or "<<" in instruction.text or len(paths) < 2:
        return None
    if any("://" in p for p in paths):
        return None
    return paths[:-1], paths[-1]


def workspace(
    text: str, context: Mapping[str, bytes], default_workdir: str = "/", *, prepared: bool = False
) -> Workspace:
    """Follow WORKDIR, COPY and ENV over a build context (relative path → content).

    Everything that needs a builder (RUN, USER, another stage, a copy to outside the work directory) is reported, not guessed at.
    `prepared`: what RUN installs is there already.
    """
    cwd = default_workdir
    image: dict[str, tuple[bytes, int]] = {}
    env: dict[str, str] = {}
    unsupported: list[tuple[int, str]] = []
    for instruction in parse(text):
        line = instruction.line
        if instruction.name == "FROM" or instruction.name in _HARMLESS or (prepared and instruction.name == "RUN"):
            continue
        if instruction.name == "ENV" and (pairs := _environment(instruction.text)) is not None:
            env |= pairs
        elif instruction.name == "WORKDIR":
            cwd = normpath(join(cwd, instruction.text.strip("\"'")))
        elif instruction.name == "COPY" and (pair := copies(instruction)) is not None:
            copied = _copy(pair[0], pair[1], context, cwd)
            if not copied:
                unsupported.append((line, f"COPY {instruction.text} matches nothing in environment/"))
            image |= {path: (content, line) for path, content in copied.items()}
        else:
            first = instruction.text.split("\n", 1)[0]
            unsupported.append((line, f"{instruction.name} {first[:60]} needs an image build"))
    prefix = "/" if cwd == "/" else cwd + "/"
    outside = sorted(path for path in image if not path.startswith(prefix))
    if outside:
        unsupported.append((image[outside[0]][1], f"a copy to {outside[0]}, outside the work directory {cwd}"))
    files = {path[len(prefix) :]: content for path, (content, _) in image.items() if path.startswith(prefix)}
    return Workspace(workdir=cwd, files=dict(sorted(files.items())), env=env, unsupported=tuple(unsupported))


def _environment(text: str) -> dict[str, str] | None:
    """Of an ENV instruction with plain values; None where a value is made from others."""
    words = _arguments(text)
    if "$" in text or not words:
        return None
    if "=" not in words[0]:
        return {words[0]: text.split(None, 1)[1]} if len(words) > 1 else None
    return dict(word.split("=", 1) for word in words) if all("=" in word for word in words) else None


def _arguments(text: str) -> list[str]:
    try:
        if text.startswith("["):
            return [str(w) for w in json.loads(text)]
        return shlex.split(text)
    except ValueError:
        return text.split()


def _copy(sources: list[str], destination: str, context: Mapping[str, bytes], cwd: str) -> dict[str, bytes]:
    target = normpath(join(cwd, destination))
    many = destination.endswith(("/", "/.")) or destination == "." or len(sources) > 1
    out: dict[str, bytes] = {}
    for source in sources:
        clean = normpath(source).lstrip("/")
        prefix = "" if clean == "." else clean + "/"
        inside = {path[len(prefix) :]: content for path, content in context.items() if path.startswith(prefix)}
        if inside:
            out |= {f"{target}/{path}".replace("//", "/"): content for path, content in inside.items()}
        elif clean in context:
            out[join(target, clean.rpartition("/")[2]) if many else target] = context[clean]
        else:  # a pattern
            pattern = re.compile(re.escape(clean).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + "$")
            out |= {join(target, p.rpartition("/")[2]): c for p, c in context.items() if pattern.match(p)}
    return out
