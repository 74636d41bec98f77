"""`/trajectories/{id}`: one attempt turn by turn, with folds and permalinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from orchestrator import models as m
from orchestrator.review_look import readable
from webui import formats, urls
from webui.access import Action, needs, viewer_of
from webui.contexts import Choice, Fact, TrajectoryContext, TurnView
from webui.pages.parts import MAX_ID, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
TURNS = 500  # on one page
LONG_CHARS, LONG_LINES = 1200, 16  # a longer observation starts folded


@router.get("/trajectories/{trajectory_id}", response_class=HTMLResponse)
def trajectory(
    request: Request,
    trajectory_id: str,
    first: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    turn: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
    q: str = "",
) -> Response:
    """`first`: index of the first turn shown. `turn`: the page that holds it. `q`: words to look for in all turns."""
    store, queries = store_of(request), queries_of(request)
    if queries.trajectory(trajectory_id) is None:
        raise missing(f"trajectory {trajectory_id[:60]}")
    if turn is not None:
        here = urls.trajectory(trajectory_id, turn=turn, first=turn // TURNS * TURNS, q=q)
        return RedirectResponse(here, status_code=303)
    detail = store.trajectories.detail(trajectory_id, first_turn=first, turns=TURNS)
    row = detail.trajectory
    viewer, every = viewer_of(request), queries.runbooks_from(trajectory_id)
    written = [i for i in every if not viewer.blind or readable(store, i.runbook.id, viewer.login)]
    cited = {turn for info in written for line in info.runbook.lines for turn in line["cites"]}
    hits = list(store.trajectories.search_turns(trajectory_id, q)) if q else []
    context = TrajectoryContext(
        title=f"{row.task_id} · attempt {row.attempt}",
        section="trajectories",
        trajectory=row,
        instruction=queries.instruction(row.task_id, row.suite),
        facts=_facts(row),
        checks=detail.checks,
        segments=detail.segments,
        turns=_turns(detail.turns, cited, set(hits)),
        runbook=queries.runbook(row.runbook_id) if row.runbook_id else None,
        written=written,
        replay=queries.replay(trajectory_id),
        boundaries=[Fact(label=k.replace("_", " "), value=str(n)) for k, n in row.boundaries.items()],
        query=q,
        hits=hits,
        hit_links=[(h, urls.trajectory(trajectory_id, turn=h, first=h // TURNS * TURNS, q=q)) for h in hits[:200]],
        first=first,
        pages=[
            Choice(
                value=str(start),
                label=f"{start}–{min(start + TURNS, row.n_turns) - 1}",
                href=urls.trajectory(trajectory_id, first=start, q=q),
                active=start == first,
            )
            for start in range(0, row.n_turns, TURNS)
        ]
        if row.n_turns > TURNS
        else [],
        verifier_log=row.verifier_log,
    )
    return page(request, context)


def _turns(rows: Sequence[m.Turn], cited: set[int], hits: set[int]) -> list[TurnView]:
    views = []
    segment = rows[0].segment if rows else 0
    for row in rows:
        views.append(
            TurnView(
                index=row.index,
                action=formats.visible(row.action),
                observation=formats.visible(row.observation),
                exit_code=row.exit_code,
                timed_out=row.timed_out,
                segment=row.segment,
                new_segment=row.segment != segment,
                duration_s=row.duration_s,
                tokens=row.end - row.start,
                long=len(row.observation) > LONG_CHARS or row.observation.count("\n") > LONG_LINES,
                cited=row.index in cited,
                hit=row.index in hits,
            )
        )
        segment = row.segment
    return views


def _task_href(row: m.Trajectory) -> str:
    return urls.task(row.suite, row.task_id) if row.suite else urls.trajectories(task=row.task_id)


def _facts(row: m.Trajectory) -> list[Fact]:
    facts = [
        Fact(label="Task", value=row.task_id, href=_task_href(row), mono=True),
        Fact(label="Suite", value=row.suite or "—", href=urls.trajectories(suite=row.suite) if row.suite else ""),
        Fact(label="Family", value=row.family, href=urls.trajectories(family=row.family)),
        Fact(label="Stratum", value=row.stratum.value),
        Fact(label="Attempt", value=str(row.attempt)),
        Fact(label="Ended by", value=row.end_reason.value.replace("_", " ")),
        Fact(label="Progress", value=f"{row.progress}/{row.n_checks} checks"),
        Fact(label="Reward", value=formats.number(row.reward)),
        Fact(label="Turns", value=str(row.n_turns)),
        Fact(label="Tokens", value=f"{formats.tokens(row.n_tokens)}, {formats.number(row.n_sampled)} sampled"),
        Fact(label="Token drift", value=str(row.drift_tokens)),
        Fact(label="Time", value=formats.duration(row.duration_s)),
        Fact(label="Seed", value=str(row.seed), mono=True),
    ]
    if row.cycle_id is not None:
        facts.insert(0, Fact(label="Cycle", value=f"cycle {row.cycle_id}", href=urls.cycle(row.cycle_id)))
        if row.phase:
            where = f"{row.phase.value}, step {row.step}" if row.step else row.phase.value
            facts.insert(1, Fact(label="Phase", value=where))
    if row.checkpoint_id is not None:
        facts.insert(2, Fact(label="Checkpoint", value=str(row.checkpoint_id), href=urls.checkpoint(row.checkpoint_id)))
    return facts
