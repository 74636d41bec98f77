"""Families that write or change the text of one file: create, append, setkey."""

from __future__ import annotations

import random

from stages.tasks.families.base import Check, Draw, Family, Subgoal, lines, quote
from stages.tasks.names import NameSource


class Create(Family):
    """A new file with one given line."""

    name = "create"
    skill = 0.62
    wordings = ("create file {f} with text {w}", "write text {w} to new file {f}", "make {f} containing {w}")

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        return Draw(params={"f": names() + ".txt", "w": names()})

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        f, w = quote(goal.params["f"]), goal.params["w"]
        return (
            Check(id="exists", test=f"is_file {f}"),
            Check(id="holds-word", test=f"has {f} {quote(w)}"),
            Check(id="text", test=f"equals {f} {quote(lines([w]))}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["echo {w} > {f}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        p = goal.params
        stem = p["f"].partition(".")[0]
        return [
            rng.choice(
                [f"touch {p['f']}", f"echo {p['w']}", f"echo {p['f']} > {p['w']}", f"echo {p['w']} > {stem}.log"]
            )
        ]


class Append(Family):
    """One more line at the end of a log; writing with `>` instead of `>>` destroys it."""

    name = "append"
    skill = 0.45
    wordings = ("append line {w} to {f}", "add {w} at the end of {f}", "{f} needs one more line {w}")

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f, w = names() + ".log", names()
        old = lines([names(), names()])
        return Draw(params={"f": f, "w": w, "old": old}, files={f: old})

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        f, w, old = quote(goal.params["f"]), goal.params["w"], goal.params["old"]
        return (
            Check(id="grew", test=f"slurp {f} && [[ $text == {quote(old)}?* ]]"),
            Check(id="ends", test=f"slurp {f} && [[ $text == *{quote(lines([w]))} ]]"),
            Check(id="text", test=f"equals {f} {quote(old + lines([w]))}"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["echo {w} >> {f}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, w = goal.params["f"], goal.params["w"]
        return [rng.choice([f"echo {w} > {f}", f"echo {w} > {f}", f"echo {w}", f"cat {f}"])]


class SetKey(Family):
    """One key of a three-line configuration file gets a new value; the other two stay."""

    name = "setkey"
    skill = 0.36
    wordings = ("set key {k} to {v} in {f}", "in {f} change {k} to {v}", "config {f} key {k} must be {v}")

    def draw(self, rng: random.Random, names: NameSource) -> Draw:
        f = names() + ".conf"
        keys, values = [names() for _ in range(3)], [names() for _ in range(3)]
        i = rng.randrange(3)
        rows = [f"{k}={v}" for k, v in zip(keys, values, strict=True)]
        params = {"f": f, "k": keys[i], "v": names(), "others": tuple(r for j, r in enumerate(rows) if j != i)}
        return Draw(params=params, files={f: lines(rows)})

    def checks(self, goal: Subgoal) -> tuple[Check, ...]:
        p = goal.params
        f, new = quote(p["f"]), f"{p['k']}={p['v']}"
        both = " ".join(quote(row) for row in p["others"])
        size = sum(len(row) + 1 for row in (new, *p["others"]))
        return (
            Check(id="set", test=f"has_lines {f} {quote(new)}"),
            Check(id="others-kept", test=f"has_lines {f} {quote(new)} {both}"),
            Check(id="nothing-else", test=f"has_lines {f} {quote(new)} {both} && ((${{#text}} == {size}))"),
        )

    def right(self, goal: Subgoal, rng: random.Random) -> list[str]:
        return ["sed -i 's/^{k}=.*/{k}={v}/' {f}".format(**goal.params)]

    def wrong(self, goal: Subgoal, rng: random.Random) -> list[str]:
        f, k, v = (goal.params[x] for x in "fkv")
        return [
            rng.choice(
                [
                    f"echo {k}={v} >> {f}",
                    f"echo {k}={v} > {f}",
                    f"sed -i 's/{k}/{v}/' {f}",
                    f"sed 's/^{k}=.*/{k}={v}/' {f}",
                ]
            )
        ]
