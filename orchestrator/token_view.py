"""The sampled tokens of one turn, with everything that is stored about each: what the token view shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchestrator import trained
from orchestrator.store import Store
from stages.errors import StoreError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    position: int  # in its segment
    id: int
    text: str | None  # None: no tokenizer of its model is at hand
    log_prob: float | None  # the sampler's; None outside the loss mask
    learner_log_prob: float | None  # before the update; None: not kept
    value: float | None
    advantage: float | None
    trained: bool  # inside the loss mask

    @property
    def gap(self) -> float | None:
        """log π_train − log π_infer (spec §6.3)."""
        if self.learner_log_prob is None or self.log_prob is None:
            return None
        return self.learner_log_prob - self.log_prob


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    tokens: tuple[SampledToken, ...]
    segment: int
    new_segment: bool  # its prompt does not extend the turn before
    arrays: bool  # False: the trajectory has no token arrays
    scored: bool  # values and advantages are stored
    learner: bool  # so are the learner's log-probabilities


NOTHING = TurnTokens(tokens=(), segment=0, new_segment=False, arrays=False, scored=False, learner=False)


def turn_tokens(store: Store, trajectory_id: str, turn: int) -> TurnTokens:
    """Tokens of a turn in order. Raises StoreError for an unknown trajectory or turn, or when a named file is gone."""
    row = store.trajectories.get(trajectory_id)
    if not 0 <= turn < row.n_turns:
        raise StoreError(f"The trajectory {trajectory_id} has no turn {turn}; it has {row.n_turns}.")
    if row.artifact is None:
        return NOTHING
    whole = store.trajectories.whole(trajectory_id)
    found = whole.turns[turn]
    segment = whole.segments[found.segment]
    inside = np.arange(len(segment.tokens))
    at = np.flatnonzero((segment.turn_ids == turn) | ((inside >= found.start) & (inside < found.end)))
    scores = trained.read(store.artifacts, row.trained_on, trajectory_id) if row.trained_on else {}
    own = scores.get(found.segment)
    texts = _texts(store, row.checkpoint_id, row.cycle_id, segment.tokens[at].tolist())
    tokens = []
    for j, text in zip(at.tolist(), texts, strict=True):
        mine = bool(segment.loss_mask[j])
        tokens.append(
            SampledToken(
                position=j,
                id=int(segment.tokens[j]),
                text=text,
                log_prob=float(segment.rollout_log_probs[j]) if mine else None,
                learner_log_prob=float(own.log_probs[j]) if own and own.log_probs is not None and mine else None,
                value=float(own.values[j]) if own and mine else None,
                advantage=float(own.advantages[j]) if own and mine else None,
                trained=mine,
            )
        )
    return TurnTokens(
        tokens=tuple(tokens),
        segment=found.segment,
        new_segment=turn > 0 and whole.turns[turn - 1].segment != found.segment,
        arrays=True,
        scored=own is not None,
        learner=own is not None and own.log_probs is not None,
    )


def _texts(store: Store, checkpoint_id: int | None, cycle_id: int | None, ids: list[int]) -> list[str | None]:
    """Each token's text by the tokenizer of the model that sampled it, or of another checkpoint of its cycle."""
    rows = list(store.checkpoints.many([checkpoint_id]).values()) if checkpoint_id is not None else []
    rows += store.checkpoints.of_cycle(cycle_id) if cycle_id is not None else []
    for row in rows:
        for file in (Path(row.path) / "actor" / "tokenizer.json", Path(row.path) / "tokenizer.json"):
            if row.path and file.is_file():
                tokenizer = _tokenizer(file, file.stat().st_mtime_ns)
                return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return [None] * len(ids)


@lru_cache(maxsize=4)
def _tokenizer(file: Path, changed: int) -> Tokenizer:
    from tokenizers import Tokenizer  # loads without transformers and torch

    return Tokenizer.from_file(str(file))
