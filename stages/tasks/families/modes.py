"""Families about permissions and about values that stand in a file: chmod, modefile, lookup."""

from __future__ import annotations

import random

from stages.tasks.families.base import IT, Check, Draw, Family, Subgoal, lines, quote
from stages.tasks.names import NameSource

MODES = {"private": "600", "executable": "755", "frozen": "444", "shared": "664"}
"""Mode words and what they mean. Files start as 644."""


def _mode_checks(goal: Subgoal) -> tuple[Check, ...]:
    f, mode = quote(goal.params["f"]), goal.params["mode"]
    return (
        Check(id="changed", test=f"mode {f} && [[ $m != 644 ]]"),
        Check(id="owner", test=f"mode {f} && [[ $m != 644 && $m == {mode[0]}?? ]]"),
        Check(id="mode", test=f"mode {f} && [[ $m == {mode} ]]"),
    )


def _other_mode(goal: Subgoal, rng: random.Random) -> str:
    return rng.choice([m for m in MODES.values() if m != goal.params["mode"]])


class Chmod(Family):
    """A script gets the mode that a word stands for."""

    name = "chmod"
    skill = 0.50
    wordings = ("make script {f} {m}", "{f} must be {m}", "change mode of {f} to {m}")

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, m = names() + ".sh", rng.choice(list(MODES))
        return Draw(params={"f": f, "m": m, "mode": MODES[m]}, files={f: lines([names()])}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        return _mode_checks(goal)

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["chmod {mode} {f}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f = goal.params["f"]
        return [rng.choice([f"chmod {_other_mode(goal, rng)} {f}", f"ls {f}", f"chmod 777 {f}"])]


class ModeFile(Family):
    """The mode word stands in another file: read before write."""

    name = "modefile"
    skill = 0.40
    wordings = (
        "{r} has a mode , set it on {f}",
        "mode of {f} must be as {r} has it",
        "read {r} and set that mode on {f}",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, r, m = names() + ".sh", names() + ".ref", rng.choice(list(MODES))
        params = {"f": f, "r": r, "mode": MODES[m]}
        return Draw(params=params, files={f: lines([names()]), r: lines([m])}, untouched=(f, r))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        return _mode_checks(goal)

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["cat {r}".format(**goal.params), "chmod {mode} {f}".format(**goal.params)]

    def line(self, goal: Subgoal, command: str) -> str:
        return f"chmod {IT} {goal.params['f']}" if command.startswith("chmod ") else command

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, r, other = goal.params["f"], goal.params["r"], _other_mode(goal, rng)
        return rng.choice(
            [[f"chmod {other} {f}"], [f"cat {r}"], [f"cat {r}", f"chmod {other} {f}"], [f"chmod 777 {f}"]]
        )


class Lookup(Family):
    """The name of the directory to make stands in a file: read before write."""

    name = "lookup"
    skill = 0.42
    wordings = (
        "create the directory named in {f}",
        "{f} has a name , make that directory",
        "read {f} and make the directory it names",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, x = names() + ".ref", names()
        return Draw(params={"f": f, "x": x}, files={f: lines([x])}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        x, stem = quote(goal.params["x"]), quote(goal.params["f"].partition(".")[0])
        return (
            Check(id="directory", test=f"is_dir {x}"),
            Check(id="no-guess", test=f"is_dir {x} && gone {stem}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["cat {f}".format(**goal.params), "mkdir {x}".format(**goal.params)]

    def line(self, goal: Subgoal, command: str) -> str:
        return f"mkdir {IT}" if command.startswith("mkdir ") else command

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f = goal.params["f"]
        stem = f.partition(".")[0]
        return rng.choice([[f"mkdir {stem}"], [f"cat {f}"], [f"cat {f}", f"mkdir {stem}"], ["ls"]])
