"""`/tasks/{pool}/{task}`: one task across checkpoints: outcomes, attempts, checks, versions, and what it cost in vain."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from orchestrator.store import TrajectoryFilter
from orchestrator.store.task_queries import TaskQueries
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.dag import colour_of
from webui.contexts import Fact
from webui.contexts.analysis import CheckRate, TaskContext, TaskOutcome
from webui.pages.parts import QueryId, missing, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
ATTEMPTS, EXPENSIVE = 60, 5
CHECKED = 300  # newest attempts whose checks are counted


@router.get("/tasks/{pool}/{task_id:path}", response_class=HTMLResponse)
def task(request: Request, pool: str, task_id: str, checkpoint: QueryId = None) -> HTMLResponse:
    """`checkpoint`: whose outcome the reader came for."""
    store = store_of(request)
    where = TrajectoryFilter(suite=pool, task_id=task_id)
    versions = TaskQueries(store).versions(pool, task_id)
    measured = [(e, t) for e, t in store.evaluations.of_task(task_id) if e.suite == pool]
    attempts = store.trajectories.list(where, limit=ATTEMPTS)
    if not versions and not measured and not attempts.items:
        raise missing(f"task {task_id[:80]} in {pool[:80]}")
    acted = TaskQueries(store).attempts_of(pool, task_id, [e.checkpoint_id for e, _ in measured if e.checkpoint_id])
    checks, counted = TaskQueries(store).check_rates(pool, task_id, within=CHECKED)
    own = versions[0][1] if versions else None
    first = {e.checkpoint_id: e.id for e, _ in reversed(measured)}
    context = TaskContext(
        title=task_id,
        section="compare",
        pool=pool,
        task=own,
        task_id=task_id,
        instruction=formats.visible(own.instruction) if own else "",
        facts=_facts(pool, own, measured),
        versions=versions,
        outcomes=[
            TaskOutcome(
                evaluation=e,
                result=t,
                name=e.checkpoint,
                colour=colour_of(e.checkpoint),
                attempts=acted.get(e.checkpoint_id or 0, ()),
                wanted=e.checkpoint_id is not None and e.checkpoint_id == checkpoint,
                anchor=f"e{e.id}"
                if e.checkpoint_id is None or e.id != first[e.checkpoint_id]
                else f"c{e.checkpoint_id}",
            )
            for e, t in measured
        ],
        checks=[CheckRate(id=name, role=role, passed=p, failed=f, not_run=n) for name, role, p, f, n in checks],
        check_attempts=counted,
        attempts=attempts.items,
        expensive=store.trajectories.expensive_failures(where, limit=EXPENSIVE),
        more_href=urls.trajectories(suite=pool, task=task_id) if attempts.next else "",
    )
    return page(request, context)


def _facts(pool: str, own: m.Task | None, measured: Sequence[tuple[m.Evaluation, m.EvaluationTask]]) -> list[Fact]:
    facts = [Fact(label="Pool", value=pool, href=urls.trajectories(suite=pool))]
    family = own.family if own else measured[0][1].family if measured else ""
    stratum = own.stratum if own else measured[0][1].stratum if measured else None
    if family:
        facts.append(Fact(label="Family", value=family, href=urls.trajectories(family=family)))
    if stratum:
        facts.append(Fact(label="Stratum", value=stratum.value))
    if own is not None:
        facts += [
            Fact(label="Categories", value=", ".join(own.categories) or formats.MISSING),
            Fact(label="Checks", value=str(len(own.checks)) if own.checks else "as the verifier reports"),
            Fact(label="Passed by doing nothing", value=str(own.nop_progress)),
            Fact(label="Digest", value=formats.digest(own.digest), mono=True),
        ]
    return facts
