"""`/trajectories/{id}/tokens?turn=17`: the sampled tokens of one turn, shaded by what the learner made of them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from orchestrator import models as m
from orchestrator.token_view import SampledToken, TurnTokens, turn_tokens
from stages.domain import Phase
from stages.errors import StoreError
from webui import formats, urls
from webui.access import Action, needs
from webui.contexts import Choice, Fact
from webui.contexts.analysis import TokensContext, TokenView
from webui.pages.parts import MAX_ID, missing, queries_of, store_of
from webui.rendering import page

router = APIRouter(dependencies=[Depends(needs(Action.SEE))])
SHOWN = 2000  # tokens on one page
SURPRISE = (0.1, 0.7, 2.3, 4.6)  # −log p: 90, 50, 10 and 1 %
LEVELS = (0.05, 0.25, 0.5, 0.75)  # of the turn's largest


class Shade(StrEnum):
    ADVANTAGE = "advantage"
    VALUE = "value"
    GAP = "gap"  # learner − sampler
    LOG_PROB = "log-prob"


RULES = {
    Shade.ADVANTAGE: "▲ the update makes the token likelier, ▼ less likely; the thicker the bar, the more, against the "
    "turn's largest.",
    Shade.VALUE: "The critic's value before the token, ▲ above and ▼ below 0; the bar against the turn's largest.",
    Shade.GAP: "Learner − sampler log-probability before the update (spec §6.3); 0 when both agree.",
    Shade.LOG_PROB: "The thicker the bar, the less likely the token was: below 90, 50, 10 and 1 %.",
}


@router.get("/trajectories/{trajectory_id}/tokens", response_class=HTMLResponse)
def tokens(
    request: Request,
    trajectory_id: str,
    turn: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    by: Shade | None = None,
    at: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
) -> HTMLResponse:
    """`by`: the quantity that shades tokens. `at`: the first token shown."""
    store = store_of(request)
    row = queries_of(request).trajectory(trajectory_id)
    if row is None:
        raise missing(f"trajectory {trajectory_id[:60]}")
    try:
        found = turn_tokens(store, trajectory_id, turn)
    except StoreError as error:
        raise HTTPException(404, str(error)) from None
    shade = by or (Shade.ADVANTAGE if found.scored else Shade.LOG_PROB)
    detail = store.trajectories.detail(trajectory_id, first_turn=turn, turns=1)
    shown = found.tokens[at : at + SHOWN]
    following = at + SHOWN < len(found.tokens)
    href = urls.token_view(trajectory_id, turn=turn, by=by.value if by else "")
    context = TokensContext(
        title=f"{row.task_id} · attempt {row.attempt} · turn {turn}, tokens",
        section="trajectories",
        trajectory=row,
        turn=turn,
        action=formats.visible(detail.turns[0].action) if detail.turns else "",
        tokens=_views(shown, found.tokens, shade),
        facts=_facts(row, found),
        notes=_notes(row, found),
        shades=[
            Choice(value=s, label=s, href=urls.token_view(trajectory_id, turn=turn, by=s), active=s is shade)
            for s in Shade
        ],
        shade=shade.value,
        previous_href=urls.token_view(trajectory_id, turn=turn - 1, by=by or "") if turn else "",
        next_href=urls.token_view(trajectory_id, turn=turn + 1, by=by or "") if turn + 1 < row.n_turns else "",
        more_href=f"{href}&at={at + SHOWN}" if following else "",
        rule=RULES[shade],
    )
    return page(request, context)


def _figure(token: SampledToken, shade: Shade) -> float | None:
    match shade:
        case Shade.ADVANTAGE:
            return token.advantage
        case Shade.VALUE:
            return token.value
        case Shade.GAP:
            return token.gap
        case Shade.LOG_PROB:
            return token.log_prob


def _views(shown: Sequence[SampledToken], every: Sequence[SampledToken], shade: Shade) -> list[TokenView]:
    largest = max((abs(f) for t in every if (f := _figure(t, shade)) is not None), default=0.0) or 1.0
    out = []
    for t in shown:
        figure = _figure(t, shade)
        strength, levels = (0.0, LEVELS) if figure is None else (abs(figure) / largest, LEVELS)
        if shade is Shade.LOG_PROB and figure is not None:
            strength, levels = -figure, SURPRISE
        signed = shade is not Shade.LOG_PROB and figure is not None and figure != 0
        out.append(
            TokenView(
                position=t.position,
                id=t.id,
                text=f"#{t.id}" if t.text is None else formats.visible(t.text).replace("\n", "⏎").replace(" ", "␣"),
                log_prob=t.log_prob,
                learner_log_prob=t.learner_log_prob,
                gap=t.gap,
                value=t.value,
                advantage=t.advantage,
                trained=t.trained,
                figure=figure,
                heat=sum(strength >= level for level in levels),
                sign=("▲" if (figure or 0) > 0 else "▼") if signed else "",
            )
        )
    return out


def _facts(row: m.Trajectory, found: TurnTokens) -> list[Fact]:
    known = [t.log_prob for t in found.tokens if t.log_prob is not None]
    gaps = [abs(g) for t in found.tokens if (g := t.gap) is not None]
    outcomes = ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in row.boundaries.items())
    return [
        Fact(label="Sampled tokens", value=str(len(found.tokens))),
        Fact(label="In the loss mask", value=str(len(known))),
        Fact(label="Mean log-prob, sampler", value=formats.signed(sum(known) / len(known) if known else None, 3)),
        Fact(label="Mean |gap|", value=formats.signed(sum(gaps) / len(gaps) if gaps else None, 4)),
        Fact(label="Segment", value=str(found.segment)),
        Fact(
            label="Boundary before it",
            value="none" if not found.arrays else "new chunk: a prompt of its own" if found.new_segment else "extended",
        ),
        Fact(label="Boundaries of the attempt", value=outcomes or formats.MISSING),
        Fact(label="Reward", value=formats.number(row.reward)),
        Fact(label="Token drift", value=str(row.drift_tokens)),
    ]


def _notes(row: m.Trajectory, found: TurnTokens) -> list[str]:
    if not found.arrays:
        return ["Its token arrays are not stored: it was imported, or measured without keeping attempts."]
    notes = []
    if not found.scored:
        why = (
            "the step did not take it: surplus of oversampling, no verdict, or it ran before values were kept"
            if row.phase in (Phase.CALIBRATE, Phase.JOINT)
            else f"attempts of the phase {row.phase.value if row.phase else 'import'} are not trained on by PPO"
        )
        notes.append(f"No value and no advantage: {why}.")
    elif not found.learner:
        notes.append(
            "The learner's log-probabilities are not kept; the step's mean |gap| is logged as "
            "train/train_rollout_logprob_abs_diff."
        )
    if found.tokens and found.tokens[0].text is None:
        notes.append("No tokenizer of its model is on this machine: tokens are shown as ids.")
    return notes
