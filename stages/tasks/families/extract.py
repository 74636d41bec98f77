"""Families that compute one new file from a read-only input: count, column, first, copy."""

from __future__ import annotations

import random

from stages.tasks.families.base import Check, Draw, Family, Subgoal, lines, quote
from stages.tasks.names import NameSource


class Count(Family):
    """How many lines hold a word."""

    name = "count"
    skill = 0.40
    wordings = (
        "count lines with {w} in {f} and save to {o}",
        "save to {o} how many lines of {f} have {w}",
        "number of {w} lines in {f} goes to {o}",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, w, o = names() + ".lst", names(), names() + ".txt"
        n = rng.randint(2, 5)
        rows = [f"{w} {names()}" for _ in range(n)] + [f"{names()} {names()}" for _ in range(rng.randint(1, 3))]
        rng.shuffle(rows)
        return Draw(params={"f": f, "w": w, "o": o, "n": str(n)}, files={f: lines(rows)}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        o, n = quote(goal.params["o"]), goal.params["n"]
        blank = "[[:space:]]*"
        return (
            Check(id="exists", test=f"is_file {o}"),
            Check(id="is-number", test=f"slurp {o} && [[ $text =~ ^{blank}[0-9]+{blank}$ ]]"),
            Check(id="number", test=f"slurp {o} && [[ $text =~ ^{blank}{n}{blank}$ ]]"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["grep -c {w} {f} > {o}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, w, o = (goal.params[x] for x in "fwo")
        return [rng.choice([f"grep {w} {f} > {o}", f"wc -l {f} > {o}", f"grep -c {w} {f}", f"grep -c {w} {o}"])]


class Column(Family):
    """One column of a comma-separated file, sorted."""

    name = "column"
    skill = 0.34
    wordings = (
        "write sorted column {n} of {f} to {o}",
        "sort column {n} of {f} into {o}",
        "{o} gets column {n} of {f} sorted",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        rows = [[names() for _ in range(3)] for _ in range(rng.randint(3, 4))]
        n = rng.randint(1, 3)
        f, o = names() + ".csv", names() + ".txt"
        params = {"f": f, "o": o, "n": str(n), "want": tuple(sorted(row[n - 1] for row in rows))}
        return Draw(params=params, files={f: lines(",".join(row) for row in rows)}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        o, want = quote(goal.params["o"]), goal.params["want"]
        rows, text = " ".join(quote(w) for w in want), lines(want)
        return (
            Check(id="exists", test=f"is_file {o}"),
            Check(id="values", test=f"has_lines {o} {rows} && ((${{#text}} == {len(text)}))"),
            Check(id="sorted", test=f"equals {o} {quote(text)}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["cut -d, -f{n} {f} | sort > {o}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, o, n = (goal.params[x] for x in "fon")
        return [
            rng.choice(
                [
                    f"cut -d, -f{n} {f} > {o}",
                    f"sort {f} > {o}",
                    f"cut -d, -f{int(n) % 3 + 1} {f} | sort > {o}",
                    f"cut -d, -f{n} {f} | sort",
                ]
            )
        ]


class First(Family):
    """The first n lines of a list."""

    name = "first"
    skill = 0.46
    wordings = (
        "save first {n} lines of {f} to {o}",
        "first {n} lines of {f} go to {o}",
        "{o} gets only the first {n} lines of {f}",
    )

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, o, n = names() + ".lst", names() + ".txt", rng.randint(2, 3)
        rows = [names() for _ in range(rng.randint(n + 2, 6))]
        params = {"f": f, "o": o, "n": str(n), "want": tuple(rows[:n])}
        return Draw(params=params, files={f: lines(rows)}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        o, want = quote(goal.params["o"]), goal.params["want"]
        return (
            Check(id="exists", test=f"is_file {o}"),
            Check(id="begins", test=f"slurp {o} && [[ $text == {quote(lines(want[:1]))}* ]]"),
            Check(id="lines", test=f"equals {o} {quote(lines(want))}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["head -n {n} {f} > {o}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, o, n = (goal.params[x] for x in "fon")
        return [
            rng.choice(
                [
                    f"head -n {n} {f}",
                    f"tail -n {n} {f} > {o}",
                    f"head {f} > {o}",
                    f"head -n {n} {f} > {f}",  # empties the input: damage
                ]
            )
        ]


class Copy(Family):
    """A second file with the same content; the first stays."""

    name = "copy"
    skill = 0.52
    wordings = ("copy {f} to {o}", "make {o} a copy of {f}", "{o} must be a copy of {f}")

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, o = names() + ".doc", names() + ".doc"
        rows = [names() for _ in range(rng.randint(2, 3))]
        return Draw(params={"f": f, "o": o, "rows": tuple(rows)}, files={f: lines(rows)}, untouched=(f,))

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        o, rows = quote(goal.params["o"]), goal.params["rows"]
        return (
            Check(id="exists", test=f"is_file {o}"),
            Check(id="begins", test=f"slurp {o} && [[ $text == {quote(lines(rows[:1]))}* ]]"),
            Check(id="same", test=f"equals {o} {quote(lines(rows))}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["cp {f} {o}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, o = goal.params["f"], goal.params["o"]
        mistakes = [f"cat {f}", f"touch {o}", f"cp {o} {f}", f"head -n 1 {f} > {o}", f"mv {f} {o}"]  # mv: damage
        return [rng.choice(mistakes)]
