"""`/trajectories`: attempts, newest first, narrowed by filters that stand in the address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from orchestrator.store import TrajectoryFilter
from orchestrator.store.trajectories import COUNT_CAP
from stages.domain import EndReason, Phase, Stratum, Verdict
from webui import urls
from webui.access import Action, needs
from webui.contexts import Choice, TrajectoriesContext
from webui.pages.parts import MAX_ID, Before, QueryId, choices, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE = 50
COSTLY = 100  # most expensive unsolved attempts shown
ACTING = (
    Phase.EXPLORE,
    Phase.REPLAY,
    Phase.PROFILE,
    Phase.CALIBRATE,
    Phase.CALIBRATE_SURPLUS,
    Phase.JOINT,
    Phase.JOINT_SURPLUS,
    Phase.VALIDATE,
    Phase.EVALUATE,
)
FIXED: tuple[tuple[str, str, Iterable[StrEnum]], ...] = (
    ("verdict", "verdict", Verdict),
    ("phase", "phase", ACTING),
    ("stratum", "stratum", Stratum),
    ("end", "ended by", EndReason),
)
E = TypeVar("E", bound=StrEnum)


def trajectory_filter(
    cycle: QueryId = None,
    stage: QueryId = None,
    step: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
    checkpoint: QueryId = None,
    phase: str = "",
    suite: str = "",
    task: str = "",
    family: str = "",
    stratum: str = "",
    verdict: str = "",
    end: str = "",
    runbook: str = "",
    gate: bool = False,
    flagged: bool = False,
) -> TrajectoryFilter:
    """A dependency: what the address narrows the list to. `gate`: only the gate check failed. Raises 422."""
    return TrajectoryFilter(
        cycle_id=cycle,
        stage_id=stage,
        step=step,
        checkpoint_id=checkpoint,
        phase=_word("phase", Phase, phase),
        suite=suite or None,
        task_id=task.strip() or None,
        family=family.strip() or None,
        stratum=_word("stratum", Stratum, stratum),
        verdict=_word("verdict", Verdict, verdict),
        end_reason=_word("end", EndReason, end),
        runbook_id=runbook or None,
        only_gate_failed=True if gate else None,
        flagged=True if flagged else None,
    )


@router.get("/trajectories", response_class=HTMLResponse)
def trajectories(
    request: Request,
    where: Annotated[TrajectoryFilter, Depends(trajectory_filter)],
    costly: bool = False,
    before: Before = None,
) -> HTMLResponse:
    """`costly`: unsolved attempts by sampled tokens instead of by time."""
    store, queries = store_of(request), queries_of(request)
    gate, flagged = bool(where.only_gate_failed), bool(where.flagged)
    count = store.trajectories.count(where)
    if costly:
        rows, following = store.trajectories.expensive_failures(where, limit=COSTLY, count=count), None
    else:
        found = store.trajectories.list(where, before=before, limit=PAGE, count=count)
        rows, following = found.items, found.next
    query = request.query_params

    def without(**changes: object) -> str:
        return urls.with_query("/trajectories", query, before=None, **changes)

    context = TrajectoriesContext(
        title="Trajectories",
        section="trajectories",
        rows=rows,
        filters=[
            (
                label,
                choices([(w.value, w.value.replace("_", " ")) for w in words], query.get(name, ""), _href(name, query)),
            )
            for name, label, words in FIXED
        ],
        active=_active(request),
        hidden=[(k, v) for k, v in query.items() if k not in ("task", "family", "before") and v],
        task=where.task_id or "",
        family=where.family or "",
        count=min(count, COUNT_CAP),
        count_capped=count > COUNT_CAP,
        next_href=urls.with_query("/trajectories", query, before=following) if following else "",
        empty=not rows and not queries.any_trajectory(),
        costly=choices(
            [("1", "most expensive unsolved")], query.get("costly", ""), lambda v: without(costly=v), every="newest"
        ),
        flags=[
            Choice(value="gate", label="only the gate failed", href=without(gate="" if gate else 1), active=gate),
            Choice(value="flagged", label="flagged", href=without(flagged="" if flagged else 1), active=flagged),
        ],
    )
    return page(request, context)


def _href(name: str, query: object) -> object:
    return lambda value: urls.with_query("/trajectories", query, before=None, **{name: value})  # type: ignore[arg-type]


def _active(request: Request) -> Sequence[Choice]:
    """What narrows the list now, each with an address that drops it."""
    query = request.query_params
    shown = [(k, v) for k, v in query.items() if v and k not in ("before", "costly")]
    return [
        Choice(
            value=v,
            label=k if v == "1" and k in ("gate", "flagged") else f"{k} {v}",
            href=urls.with_query("/trajectories", query, before=None, **{k: None}),
            active=True,
        )
        for k, v in shown
    ]


def _word(name: str, words: type[E], value: str) -> E | None:
    """A word of a fixed list; the empty choice of a form is none."""
    if not value:
        return None
    try:
        return words(value)
    except ValueError:
        allowed = ", ".join(words)
        raise HTTPException(422, f"{name} cannot be {value[:40]!r}; it is one of {allowed}") from None
