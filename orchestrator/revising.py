"""An edit of a runbook: a new revision, re-checked by the rules at once; and how two revisions differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from orchestrator import gate, reviewing
from orchestrator import models as m
from orchestrator.review_sources import review_context
from orchestrator.settings import Settings
from orchestrator.store import Store
from stages.domain import Decision, Review, Runbook, RunbookLine
from stages.review import review_runbook

_CITES = re.compile(r"\s*\[turns?\s+(\d+(?:\s*,\s*\d+)*)\]\s*$")


def as_text(lines: Sequence[dict[str, Any]]) -> str:
    """A runbook as people edit it: one line each, the cited turns in brackets behind it."""
    return "\n".join(
        line["text"].replace("\n", " ") + (f"  [turn {', '.join(map(str, line['cites']))}]" if line["cites"] else "")
        for line in lines
    )


def from_text(text: str) -> list[RunbookLine]:
    """What `as_text` wrote, after an edit. Empty lines are dropped."""
    lines = []
    for raw in text.replace("\r\n", "\n").split("\n"):
        cites = _CITES.search(raw)
        words = raw[: cites.start()] if cites else raw
        if words.strip():
            turns = tuple(dict.fromkeys(int(t) for t in cites[1].split(","))) if cites else ()
            lines.append(RunbookLine(text=words.rstrip(), cites=turns))
    return lines


def changes(before: m.Runbook, after: m.Runbook) -> list[tuple[str, str]]:
    """("+", "-" or " ", line) from one revision to another."""
    old, new = (as_text(book.lines).split("\n") for book in (before, after))
    return [(line[0], line[2:]) for line in difflib.ndiff(old, new) if line[0] in "+- "]


def revise(
    store: Store,
    runbook_id: str,
    login: str,
    lines: Sequence[RunbookLine],
    *,
    revision: int,
    settings: Settings | None = None,
) -> Review:
    """Store a new revision by `login`, re-checked by the rules at once; verdicts on older ones no longer count.

    `revision`: the one that was edited. Returns the rules' verdict. Raises ReviewRefused when nothing changed, when
    somebody revised it meanwhile, or for a planted leak; TaskError when the rules cannot run on this machine.
    """
    kept = tuple(line for line in lines if line.text.strip())
    if not kept:
        raise reviewing.ReviewRefused("a runbook needs at least one line", "lines")
    row, planted = store.runbooks.get(runbook_id), store.review_queue.planted(runbook_id)
    _refuse_edit(store, row, kept, revision)
    if planted is not None:
        # No copy of it may be mended into the gate; refusing at once would reveal it, so the edit counts as a rejection.
        with store.transaction():
            reviewing.verdict_on_planted(store, planted, login, Decision.REJECT, "revised")
        raise reviewing.ReviewRefused(
            f"this was a known-leak item: {planted.truth}. Your edit counts as having found it"
        )
    with store.transaction():
        book = gate.open_runbook(store, runbook_id)
        row = book.row
        _refuse_edit(store, row, kept, revision)
        new = Runbook(
            id=row.id,
            task_id=row.task_id,
            source_trajectory_id=row.source_trajectory_id,
            planner=row.planner,
            lines=kept,
            revision=row.revision + 1,
        )
        store.runbooks.write(new, cycle_id=row.cycle_id, stage_id=row.stage_id, author=login)
        rules = review_runbook(new, review_context(store, row, book.stage), book.policy)
        store.reviews.add(rules)
        fresh = gate.OpenRunbook(row=store.runbooks.get(row.id), stage=book.stage, policy=book.policy)
        store.runbooks.set_state(row.id, new.revision, gate.stored_state(gate.state_of(store, fresh)))
        gate.queue_changed(store, book.stage)
        reviewing.log(store, login, "revise", row.id, {"revision": new.revision, "findings": len(rules.findings)})
    gate.go_on(store, book.stage, login, settings=settings)
    return rules


def _refuse_edit(store: Store, row: m.Runbook, lines: Sequence[RunbookLine], revision: int) -> None:
    """Raises ReviewRefused for an edit that nobody can make, of a planted leak neither: else it would cost nothing to probe."""
    if row.revision != revision:
        raise reviewing.ReviewRefused(f"somebody has revised it meanwhile: edit revision {row.revision}", "revision")
    if [(line.text, list(line.cites)) for line in lines] == [(x["text"], list(x["cites"])) for x in row.lines]:
        raise reviewing.ReviewRefused("nothing was changed", "lines")
    turns = store.trajectories.get(row.source_trajectory_id).n_turns
    if wrong := sorted({c for line in lines for c in line.cites if not 0 <= c < turns}):
        raise reviewing.ReviewRefused(
            f"there is no turn {wrong[0]}; the trajectory has turns 0 to {turns - 1}", "lines"
        )
