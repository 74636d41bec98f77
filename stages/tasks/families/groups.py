"""Families that act on all files of one extension: move, prune."""

from __future__ import annotations

import random

from stages.tasks.families.base import Check, Draw, Family, Subgoal, lines, quote
from stages.tasks.names import NameSource


def _group(rng: random.Random, names: NameSource) -> tuple[str, str, list[str], str, dict[str, str]]:
    """(extension, another extension, the files of the first, one file of the other, all contents)."""
    ext, other = names.extension(), names.extension()
    group = [f"{names()}.{ext}" for _ in range(rng.randint(2, 3))]
    keep = f"{names()}.{other}"
    return ext, other, group, keep, {f: lines([f.partition(".")[0]]) for f in (*group, keep)}


class Move(Family):
    """All files of one extension into a new directory; a file of another extension stays."""

    name = "move"
    skill = 0.42
    wordings = (
        "move all {e} files into directory {d}",
        "put every {e} file in new directory {d}",
        "collect {e} files under {d}",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        ext, other, group, keep, files = _group(rng, names)
        params = {"e": ext, "o": other, "d": names(), "fs": tuple(group), "keep": keep}
        return Draw(params=params, files=files, untouched=(keep,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        p = goal.params
        d, group = quote(p["d"]), " ".join(quote(f) for f in p["fs"])
        there = " && ".join(f"equals {quote(p['d'] + '/' + f)} {quote(goal.files[f])}" for f in p["fs"])
        return (
            Check(id="directory", test=f"is_dir {d}"),
            Check(id="arrived", test=there),
            Check(id="gone", test=f"is_dir {d} && gone {group}"),
            Check(id="other-stays", test=f"is_dir {d} && is_file {quote(p['keep'])}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        d, e = goal.params["d"], goal.params["e"]
        return [f"mkdir {d}", f"mv *.{e} {d}"] if rng.random() < 0.5 else [f"mkdir {d} && mv *.{e} {d}"]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        d, e, o = (goal.params[x] for x in "deo")
        return rng.choice(
            [
                [f"mv *.{e} {d}"],
                [f"mkdir {d} && cp *.{e} {d}"],
                [f"mkdir {d}"],
                [f"mkdir {d}", f"mv *.{o} {d}"],  # damage
                [f"mkdir {d} && mv * {d}"],  # damage
            ]
        )


class Prune(Family):
    """Delete all files of one extension; a named file of another extension stays."""

    name = "prune"
    skill = 0.44
    wordings = (
        "delete all {e} files but keep {keep}",
        "keep {keep} and delete every {e} file",
        "only delete {e} files , {keep} must stay",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        ext, other, group, keep, files = _group(rng, names)
        return Draw(params={"e": ext, "o": other, "fs": tuple(group), "keep": keep}, files=files, untouched=(keep,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        p = goal.params
        group, keep = " ".join(quote(f) for f in p["fs"]), quote(p["keep"])
        some = " || ".join(f"gone {quote(f)}" for f in p["fs"])
        return (
            Check(id="some-gone", test=some),
            Check(id="all-gone", test=f"gone {group}"),
            Check(id="only-those", test=f"gone {group} && is_file {keep}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["rm *.{e}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        e, o, first = goal.params["e"], goal.params["o"], goal.params["fs"][0]
        return [rng.choice([f"rm {first}", f"ls *.{e}", f"rm {e}", f"rm *.{o}", "rm *"])]  # the last two: damage
