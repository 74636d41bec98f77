"""Known-leak items: copies of clean runbooks with a leak that we planted, mixed into the queue to measure reviewers.

A planted copy belongs to no stage and no cycle, so no gate, quota, replay or training meets it. It is planted so that
the rules let it through to people: what the rules stop by themselves measures nobody.
"""

from __future__ import annotations

import hashlib
import random
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator import models as m
from orchestrator.review_sources import review_context
from orchestrator.store import Store
from orchestrator.store.runbooks import to_domain
from stages.domain import Decision, Runbook, RunbookLine, Turn
from stages.errors import RsiError
from stages.leaks import ReviewContext
from stages.review import PolicyMode, ReviewPolicy, review_runbook

_REDIRECT = re.compile(r">>?\s*([\w./-]+)\s*$")
MAX_TYPED = 60  # characters of an output that a planted line types


@dataclass(frozen=True, slots=True, kw_only=True)
class Planting:
    """A runbook with one leak more than its original."""

    kind: str
    lines: tuple[RunbookLine, ...]
    line: int  # 0-based, the leaking one
    truth: str


def value_instead_of_reading(book: Runbook, context: ReviewContext) -> Iterator[Planting]:
    """A line becomes the command of its turn, with the value that the attempt had to read."""
    turns = _turns(context)
    for at, line in enumerate(book.lines):
        for action in (turns[c].action.strip() for c in line.cites if c in turns):
            if action and "\n" not in action and action != line.text.strip():
                yield Planting(
                    kind="value instead of reading",
                    lines=_with(book, at, action),
                    line=at,
                    truth=f"the line is the attempt's own command with the value it had read; the original says {line.text!r}",
                )


def output_typed(book: Runbook, context: ReviewContext) -> Iterator[Planting]:
    """A line that computes something into a file becomes one that types the result."""
    outputs = {t.action: t.observation.strip() for t in _turns(context).values()}
    for at, line in enumerate(book.lines):
        if not (goes := _REDIRECT.search(line.text)):
            continue
        shown = next((o for a, o in outputs.items() if goes[1] in a.split() and ">" not in a and o), "")
        if shown and "\n" not in shown and len(shown) <= MAX_TYPED and shown not in line.text:
            yield Planting(
                kind="output typed",
                lines=_with(book, at, f"echo {shlex.quote(shown)} > {goes[1]}"),
                line=at,
                truth=f"the result {shown!r} is typed instead of computed; the original says {line.text!r}",
            )


def speaks_of_the_judge(book: Runbook, context: ReviewContext) -> Iterator[Planting]:
    """A line that tells that somebody judges, and what pleases."""
    for words in ("the grader looks for this", "the checker script wants this", "the verifier is content with this"):
        cites = book.lines[-1].cites if book.lines else ()
        text = f"echo {words}" if context.harness.literal_lines else f"Then stop: {words}."
        yield Planting(
            kind="speaks of the judge",
            lines=(*book.lines, RunbookLine(text=text, cites=cites)),
            line=len(book.lines),
            truth="the last line tells how the work is judged, which no public text does",
        )


PLANTERS: Sequence[Callable[[Runbook, ReviewContext], Iterator[Planting]]] = (
    value_instead_of_reading,
    output_typed,
    speaks_of_the_judge,
)
"""In order of preference: a value in place of reading is the harder find."""


def plant(store: Store, stage: m.Stage, policy: ReviewPolicy, rate: float) -> int:
    """Mix known-leak items into the queue of a stage that waits for people; returns how many.

    `rate`: planted items per runbook that waits, 0 to 1. Planted once for a stage; the choice derives from the stage's id.
    A runbook whose task's folder or trajectory cannot be read is left out.
    """
    assert stage.id is not None
    if policy.mode is not PolicyMode.HUMAN or rate <= 0 or store.review_queue.planted_in(stage.id):
        return 0
    rows = [r for r in store.runbooks.list(stage_id=stage.id, limit=5000).items if r.state is m.RunbookState.WAITING]
    wanted = int(rate * len(rows) + 0.5)
    rng = random.Random(f"known leaks of stage {stage.id}")
    rng.shuffle(rows)
    planted = 0
    for row in rows:
        if planted >= wanted:
            break
        if store.reviews.findings(row.id, row.revision):
            continue  # not clean
        try:
            context = review_context(store, row, stage)
        except RsiError:
            continue
        planted += _plant_one(store, stage, row, context, policy, rng)
    return planted


def _plant_one(
    store: Store, stage: m.Stage, row: m.Runbook, context: ReviewContext, policy: ReviewPolicy, rng: random.Random
) -> bool:
    """Store the first planting that the rules do not stop."""
    book = to_domain(row)
    for planter in PLANTERS:
        for planting in planter(book, context):
            name = hashlib.sha256(f"{stage.id}/{row.id}/{planting.kind}/{rng.random()}".encode()).hexdigest()[:24]
            copy = replace(book, id=name, revision=1, lines=planting.lines, raw_text="")
            rules = review_runbook(copy, context, policy)
            if rules.decision is Decision.REJECT:
                continue
            with store.transaction():
                store.runbooks.write(copy)
                store.runbooks.set_created(name, row.created_at)
                store.reviews.add(rules)
                store.runbooks.settle(name, 1, m.RunbookState.WAITING)
                store.review_queue.plant(
                    m.KnownLeak(
                        runbook_id=name,
                        stage_id=stage.id or 0,
                        copy_of=row.id,
                        kind=planting.kind,
                        line=planting.line,
                        truth=planting.truth,
                    )
                )
            return True
    return False


def _turns(context: ReviewContext) -> dict[int, Turn]:
    return {t.index: t for t in context.source.turns} if context.source else {}


def _with(book: Runbook, at: int, text: str) -> tuple[RunbookLine, ...]:
    line = RunbookLine(text=text, cites=book.lines[at].cites)
    return (*book.lines[:at], line, *book.lines[at + 1 :])
