"""Parts that several pages show: strips of nodes, rows of checkpoints, choices of filters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from fastapi import HTTPException, Path, Query, Request

from orchestrator import models as m
from orchestrator.lineage import compare_critics
from orchestrator.store import Store
from orchestrator.store.console_queries import ConsoleQueries, CycleSummary, Score
from webui.charts.dag import colour_of
from webui.charts.palette import colour_index
from webui.contexts import CheckpointRow, Choice, Node

MAX_ID = 2**31 - 1  # of an integer key in Postgres
RowId = Annotated[int, Path(ge=1, le=MAX_ID)]
QueryId = Annotated[int | None, Query(ge=1, le=MAX_ID)]
Before = Annotated[int | None, Query(ge=0, le=2**63 - 1)]

LIVE = frozenset(
    {
        m.CycleState.QUEUED,
        m.CycleState.RUNNING,
        m.CycleState.PAUSING,
        m.CycleState.RESUMING,
        m.CycleState.CANCELLING,
    }
)


def store_of(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


def queries_of(request: Request) -> ConsoleQueries:
    return ConsoleQueries(store_of(request))


async def form_of(request: Request) -> dict[str, str]:
    """What a form sent, as text. Raises 422 for a NUL, which Postgres cannot hold."""
    sent = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    if any("\0" in part for item in sent.items() for part in item):
        raise HTTPException(status_code=422, detail="The form holds a NUL character")
    return sent


def no_nul(request: Request) -> None:
    """A NUL in an address is no text that Postgres could hold, so nothing can be found for it."""
    if "\0" in request.url.path or "%00" in request.url.query or "\0" in str(request.path_params):
        raise HTTPException(status_code=422, detail="The address holds a NUL character")


def missing(what: str) -> HTTPException:
    return HTTPException(status_code=404, detail=f"There is no {what}")


def best_scores(scores: Iterable[Score]) -> dict[int, dict[str, Score]]:
    """Checkpoint id -> suite -> its largest evaluation, the newest of equals."""
    found: dict[int, dict[str, Score]] = {}
    for score in scores:
        if score.checkpoint_id is None or score.reference_only:
            continue
        mine = found.setdefault(score.checkpoint_id, {})
        if score.suite not in mine or score.attempts >= mine[score.suite].attempts:
            mine[score.suite] = score
    return found


def suites_of(scores: Mapping[int, Mapping[str, Score]]) -> list[str]:
    """Suites in the order in which they were first measured."""
    order: dict[str, int] = {}
    for by_suite in scores.values():
        for suite, score in by_suite.items():
            order[suite] = min(order.get(suite, score.evaluation_id), score.evaluation_id)
    return sorted(order, key=lambda s: order[s])


def strip(
    summary: CycleSummary,
    checkpoints: Sequence[m.Checkpoint],
    scores: Mapping[int, Mapping[str, Score]],
    suite: str,
) -> list[Node]:
    """The nodes of a cycle's main arm, then those of other arms."""
    by_stage = {c.stage_id: c for c in sorted(checkpoints, key=lambda c: c.retained)}  # the retained one comes last
    nodes = []
    for stage in summary.stages:
        saved = by_stage.get(stage.id)
        notes = []
        if saved is not None and saved.parent_kept:
            notes.append("parent kept")
        if stage.attempt > 1:
            notes.append(f"attempt {stage.attempt}")
        if stage.arm != "main":
            notes.append(f"arm {stage.arm}")
        nodes.append(
            Node(
                index=colour_index(stage.index),
                name=stage.name,
                state=stage.state,
                phase=stage.phase.value if stage.phase and stage.state is not m.StageState.DONE else "",
                done=stage.progress_done,
                total=stage.progress_total,
                text=stage.progress_text,
                stage_id=stage.id,
                checkpoint=saved,
                score=scores.get(saved.id or 0, {}).get(suite) if saved else None,
                note=", ".join(notes),
            )
        )
    return nodes


def strips(queries: ConsoleQueries, summaries: Sequence[CycleSummary]) -> dict[int, Sequence[Node]]:
    """Cycle id -> its strip, scored on the first suite that each cycle measured."""
    ids = [s.cycle.id for s in summaries if s.cycle.id is not None]
    checkpoints = queries.main_checkpoints(ids)
    found = best_scores(queries.scores(cycle_ids=ids))
    out: dict[int, Sequence[Node]] = {}
    for summary in summaries:
        mine = {c.id: found[c.id] for c in checkpoints[summary.cycle.id or 0] if c.id in found}
        suites = suites_of(mine)
        out[summary.cycle.id or 0] = strip(
            summary, checkpoints[summary.cycle.id or 0], found, suites[0] if suites else ""
        )
    return out


def checkpoint_rows(
    store: Store,
    rows: Sequence[m.Checkpoint],
    scores: Mapping[int, Mapping[str, Score]],
    suites: Sequence[str],
    names: Mapping[int, str] | None = None,
) -> list[CheckpointRow]:
    parents = store.checkpoints.many([c.critic_parent_id for c in rows if c.critic_parent_id is not None])
    return [
        CheckpointRow(
            checkpoint=c,
            colour=colour_of(c.name),
            proof=compare_critics(c, parents.get(c.critic_parent_id or 0)),
            scores=[scores.get(c.id or 0, {}).get(suite) for suite in suites],
            cycle_name=(names or {}).get(c.cycle_id or 0, ""),
        )
        for c in rows
    ]


def choices(values: Iterable[tuple[str, str]], active: str, href: object, *, every: str = "all") -> list[Choice]:
    """Options of one filter, "all" first. `href` makes an address from a value."""
    assert callable(href)
    options = [("", every), *values]
    return [Choice(value=v, label=label, href=href(v), active=v == active) for v, label in options]


def column_flags(rows: Sequence[CheckpointRow], suites: Sequence[str]) -> list[str]:
    """What makes the scores of a suite's column not comparable, one text per suite; empty when nothing does."""
    flags = []
    for number in range(len(suites)):
        column = [s for row in rows if (s := row.scores[number]) is not None]
        differs = [
            what
            for what, values in (
                ("suite version", {s.suite_digest for s in column}),
                ("denominators", {s.verdicts for s in column}),
                ("harness or sampling", {repr(sorted(s.settings.items())) for s in column}),
            )
            if len(values) > 1
        ]
        flags.append(f"{' and '.join(differs)} differ" if differs else "")
    return flags
