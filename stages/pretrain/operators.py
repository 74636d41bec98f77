"""Scripted operators of mixed quality: what people who know bash half well would type.

Their transcripts teach the tiny base model what commands look like and what follows them, not how to solve tasks: an
operator gets a subgoal right at first with the family's `skill` (.34-.62), repairs one mistake in five, and sometimes gives up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from stages.tasks.chains import TaskSpec
from stages.tasks.families import FAMILIES

DONE = "done"
"""The command by which an operator, and later the agent, says that it has finished."""

LOOK_RATE = 0.10  # looks around before a subgoal
REPAIR_RATE = 0.20  # notices a mistake and does it right
GIVE_UP_RATE = 0.10  # stops after a subgoal that is not the last
GOOD_SKILL = 0.75  # of operators whose successes a planner restates
MESS_RATE = 0.30  # of those, how many repeat a command somewhere
FOLLOW_RATE = 0.94  # a runbook's lines for a subgoal are followed as they stand
FOLLOW_REPAIR_RATE = 0.50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an operator is going to type, and which right commands it uses for each subgoal that it gets right."""

    commands: tuple[str, ...]  # `done` is the last
    right: dict[int, tuple[str, ...]]  # subgoal index -> its right commands


def act(spec: TaskSpec, rng: random.Random, skill: float | None = None) -> Plan:
    """Work through the subgoals in order; `skill` overrides the families' own."""
    commands: list[str] = []
    right: dict[int, tuple[str, ...]] = {}
    for i, goal in enumerate(spec.goals):
        family = FAMILIES[goal.family]
        if rng.random() < LOOK_RATE:
            commands.append("ls")
        good = rng.random() < (family.skill if skill is None else skill)
        if not good:
            commands += family.wrong(goal, rng)
        if good or rng.random() < REPAIR_RATE:
            right[i] = tuple(family.right(goal, rng))
            commands += right[i]
        if i + 1 < len(spec.goals) and rng.random() < GIVE_UP_RATE:
            break
    return Plan(commands=(*commands, DONE), right=right)


def messy_act(spec: TaskSpec, rng: random.Random) -> Plan:
    """A good operator's transcript, often with a command typed once too often."""
    plan = act(spec, rng, GOOD_SKILL)
    commands = list(plan.commands[:-1])
    if rng.random() < MESS_RATE:
        commands.insert(rng.randrange(len(commands) + 1), rng.choice(commands) if commands else "ls")
    return Plan(commands=(*commands, DONE), right=plan.right)


def runbook_of(spec: TaskSpec, plan: Plan, rng: random.Random) -> tuple[str, ...]:
    """The reference runbook of a successful plan: its right commands in the form in which it used them."""
    lines: list[str] = []
    for i, goal in enumerate(spec.goals):
        family = FAMILIES[goal.family]
        lines += [family.line(goal, c) for c in plan.right.get(i) or family.right(goal, rng)]
    return tuple(lines)


def follow(spec: TaskSpec, rng: random.Random) -> tuple[tuple[str, ...], Plan]:
    """(runbook, what an operator types who has it before him and slips now and then)."""
    lines: list[str] = []
    commands: list[str] = []
    right: dict[int, tuple[str, ...]] = {}
    for i, goal in enumerate(spec.goals):
        family = FAMILIES[goal.family]
        right[i] = tuple(family.right(goal, rng))
        lines += [family.line(goal, c) for c in right[i]]
        slips = rng.random() >= FOLLOW_RATE
        if slips:
            commands += family.wrong(goal, rng)
        if not slips or rng.random() < FOLLOW_REPAIR_RATE:
            commands += right[i]
    return tuple(lines), Plan(commands=(*commands, DONE), right=right)
