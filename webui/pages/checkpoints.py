"""`/checkpoints` and `/checkpoints/{id}`."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from orchestrator.lineage import CriticProof, Proof, ancestors, compare_critics
from webui import formats, urls
from webui.access import Action, needs
from webui.charts.dag import colour_of, dag
from webui.contexts import CheckpointContext, CheckpointsContext, Fact, Parent
from webui.pages.parts import (
    Before,
    QueryId,
    RowId,
    best_scores,
    checkpoint_rows,
    column_flags,
    missing,
    queries_of,
    store_of,
    suites_of,
)
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
PAGE = 50


@router.get("/checkpoints", response_class=HTMLResponse)
def checkpoints(
    request: Request, cycle: QueryId = None, candidates: bool = False, before: Before = None
) -> HTMLResponse:
    """`candidates`: also those of single steps."""
    store, queries = store_of(request), queries_of(request)
    after = store.events.last_id()
    found = queries.checkpoint_page(cycle_id=cycle, candidates=candidates, before=before, limit=PAGE)
    scores = best_scores(queries.scores(checkpoint_ids=[c.id for c in found.items if c.id is not None]))
    suites = suites_of(scores)
    names = queries.cycle_names(sorted({c.cycle_id for c in found.items if c.cycle_id is not None}))
    rows = checkpoint_rows(store, found.items, scores, suites, names)
    context = CheckpointsContext(
        title="Checkpoints" if cycle is None else f"Checkpoints of cycle {cycle}",
        section="checkpoints",
        events_after=after,
        rows=rows,
        suites=suites,
        suite_flags=column_flags(rows, suites),
        cycle=queries.cycle(cycle) if cycle is not None else None,
        candidates=candidates,
        toggle_href=urls.checkpoints(cycle=cycle, candidates=not candidates),
        next_href=urls.checkpoints(cycle=cycle, candidates=candidates, before=found.next) if found.next else "",
    )
    return page(request, context)


@router.get("/checkpoints/{checkpoint_id:int}", response_class=HTMLResponse)
def checkpoint(request: Request, checkpoint_id: RowId) -> HTMLResponse:
    store, queries = store_of(request), queries_of(request)
    row = queries.checkpoint(checkpoint_id)
    if row is None:
        raise missing(f"checkpoint {checkpoint_id}")
    known = store.checkpoints.many([i for i in (row.actor_parent_id, row.critic_parent_id) if i is not None])
    actor, critic = known.get(row.actor_parent_id or 0), known.get(row.critic_parent_id or 0)
    proof = compare_critics(row, critic)
    context = CheckpointContext(
        title=f"{row.name} · checkpoint {checkpoint_id}",
        section="checkpoints",
        checkpoint=row,
        colour=colour_of(row.name),
        facts=_facts(row),
        parents=[
            Parent(
                side="actor",
                parent=actor,
                before=actor.actor_digest if actor else None,
                after=row.actor_digest,
                statement=_actor_statement(row, actor),
            ),
            Parent(
                side="critic",
                parent=critic,
                before=proof.before,
                after=proof.after,
                statement=critic_statement(proof),
            ),
        ],
        proof=proof,
        children=store.checkpoints.children(checkpoint_id),
        scores=queries.scores(checkpoint_ids=[checkpoint_id]),
        metrics=[
            Fact(label=k, value=formats.number(v) if isinstance(v, int | float) else str(v))
            for k, v in sorted(row.metrics.items())
        ],
        dag=dag(ancestors(store, [checkpoint_id]), current=checkpoint_id),
    )
    return page(request, context)


def critic_statement(proof: CriticProof) -> str:
    """What the two digests prove (design: invariant 1)."""
    match proof.proof:
        case Proof.UNCHANGED:
            return "Δφ = 0 verified: the recorded SHA-256 of the critic is equal before and after"
        case Proof.CHANGED:
            return "Δφ ≠ 0: the critic was trained"
        case Proof.NO_CRITIC:
            return "no critic yet"
        case Proof.NEW:
            return "new critic: there was none before"
        case Proof.DROPPED:
            return "critic missing: the parent has one, this checkpoint has none"


def _actor_statement(row: m.Checkpoint, parent: m.Checkpoint | None) -> str:
    if parent is None:
        return "no parent: the loop starts here"
    if parent.actor_digest == row.actor_digest:
        return "Δθ = 0: the actor is unchanged" + (" (the stage's result was discarded)" if row.parent_kept else "")
    return "Δθ ≠ 0: the actor was trained"


def _facts(row: m.Checkpoint) -> list[Fact]:
    facts = [
        Fact(label="Cycle", value=f"cycle {row.cycle_id}", href=urls.cycle(row.cycle_id))
        if row.cycle_id
        else Fact(label="Cycle", value="imported"),
        Fact(label="Arm", value=row.arm),
        Fact(label="Step", value=formats.MISSING if row.step is None else str(row.step)),
        Fact(label="Kept", value="yes" if row.retained or row.step is None else "no, a candidate"),
        Fact(label="Saved", value=formats.when(row.created_at)),
        Fact(label="Folder", value=row.path or formats.MISSING, mono=True),
        Fact(label="Manifest", value=formats.digest(row.manifest_digest), mono=True),
    ]
    if row.parent_kept:
        facts.append(Fact(label="Note", value="parent kept: the stage's result was discarded on validation"))
    return facts
