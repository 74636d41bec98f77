"""`/cycles/{id}/logs`: the whole log, narrowed by filters that stand in the address; its live end; its download."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from orchestrator import models as m
from orchestrator.store import Store
from webui import formats, urls
from webui.access import Action, needs
from webui.contexts import Choice
from webui.contexts.lead import LogsContext
from webui.pages.parts import LIVE, Before, RowId, choices, missing, queries_of, store_of
from webui.pages.standing import tabs
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
LINES = 500
LEVELS = (("20", "info"), ("30", "warnings"), ("40", "errors"))


@router.get("/cycles/{cycle_id:int}/logs", response_class=HTMLResponse)
def logs(
    request: Request,
    cycle_id: RowId,
    level: Annotated[int, Query(ge=0, le=50)] = 0,
    stage: str = "",
    q: str = "",
    before: Before = None,
) -> HTMLResponse:
    """`level`: lowest level shown, as in `logging`; `before`: lines older than this id."""
    store = store_of(request)
    after = store.events.last_id()
    row = queries_of(request).cycle(cycle_id)
    if row is None:
        raise missing(f"cycle {cycle_id}")
    stages = store.stages.of_cycle(cycle_id)
    chosen = store.stages.named(cycle_id, stage) if stage else None
    if stage and chosen is None:
        raise missing(f"stage {stage} in cycle {cycle_id}")
    stage_id = chosen.id if chosen else None
    found = store.logs.read(cycle_id, stage_id=stage_id, min_level=level, text=q, before=before, limit=LINES + 1)
    more, lines = len(found) > LINES, found[-LINES:]
    newest = (lines[-1].id or 0) if lines else 0
    error = store.logs.first_error(cycle_id)
    open_end = row.state in LIVE or row.state in (m.CycleState.SUSPENDED, m.CycleState.PAUSED)
    stream = ""
    if open_end and before is None:
        stream = urls.events(
            cycle=cycle_id, after=after, log_after=newest, log_level=level or None, log_stage=stage_id, log_q=q
        )

    def here(**changes: object) -> str:
        kept: dict[str, object] = {"level": level or None, "stage": stage, "q": q}
        return urls.cycle_logs(cycle_id, **(kept | changes))

    context = LogsContext(
        title=f"Log of cycle {cycle_id}",
        section="cycles",
        events_after=after,
        cycle=row,
        tabs=tabs(cycle_id, stages, "logs"),
        log=lines,
        levels=choices(LEVELS, str(level or ""), lambda v: here(level=v or None)),
        stages=_stages(stages, stage, lambda v: here(stage=v)),
        level=level,
        stage=stage,
        query=q,
        first_error=error,
        error_href=urls.cycle_logs(cycle_id, before=(error.id or 0) + 1) if error else "",
        earlier_href=here(before=lines[0].id) if more else "",
        newest_href=here() if before is not None else "",
        stream=stream,
    )
    return page(request, context)


def _stages(stages: Sequence[m.Stage], active: str, href: Callable[[str], str]) -> list[Choice]:
    names = [s.name for s in stages if s.arm == "main"]
    return choices(((n.lower(), n) for n in names), active.lower(), href)


@router.get("/cycles/{cycle_id:int}/log.txt", include_in_schema=False)
def log(request: Request, cycle_id: RowId) -> StreamingResponse:
    """The whole log as text."""
    store = store_of(request)
    if queries_of(request).cycle(cycle_id) is None:
        raise missing(f"cycle {cycle_id}")
    headers = {"Content-Disposition": f'attachment; filename="cycle-{cycle_id}.log"'}
    return StreamingResponse(_log_text(store, cycle_id), media_type="text/plain; charset=utf-8", headers=headers)


def _log_text(store: Store, cycle_id: int) -> Iterator[str]:
    for line in store.logs.everything(cycle_id):
        yield f"{formats.iso(line.created_at)} {line.level:2d} {line.logger}: {line.text}\n"
