"""A batch reports the hand-over where attempts were summarised, and nothing of it where none was."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from stages.backends.protocols import Learner, TrainSequence
from stages.batch import score, with_log_probs
from stages.config import RPRConfig
from stages.domain import Trajectory
from stages.rewards import RewardKind, RewardModel
from tests import factories


class Values:
    """Any critic: a value of each token's position."""

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        return [np.sin(np.arange(len(s.tokens), dtype=np.float32)) for s in sequences]

    def log_probs(self, sequences: Sequence[TrainSequence], *, temperature: float = 1.0) -> list[np.ndarray]:
        return [np.where(s.loss_mask, s.rollout_log_probs + 0.25, 0).astype(np.float32) for s in sequences]


def attempt(number: int, segments: int) -> Trajectory:
    t = factories.trajectory(number, tokens=60)
    own = [factories.segment(np.random.default_rng(number + 100 * s), 60) for s in range(segments)]
    cut = [replace(s, turn_ids=np.where(s.loss_mask, i, -1).astype(np.int32)) for i, s in enumerate(own)]
    answers = [
        json.dumps({"segment": i, "start": int(j), "output_ids": [int(s.tokens[j])]})
        for i, s in enumerate(cut)
        for j in np.flatnonzero(s.loss_mask)
    ]
    return replace(t, segments=tuple(cut), raw_answers=tuple(answers))


def metrics(segments: int) -> dict[str, float | None]:
    batch = [attempt(n, segments) for n in range(4)]
    learner = cast(Learner, Values())
    return score(learner, RPRConfig(), batch, RewardModel(kind=RewardKind.BINARY)).metrics


def test_handover_metrics_only_where_there_is_a_boundary() -> None:
    assert not [name for name in metrics(1) if name.startswith("handover/")]
    found = metrics(2)
    assert found["handover/boundaries"] == 4.0
    assert found["handover/value_gap_rms"] is not None
    assert found["handover/full/advantage_mean"] != found["handover/value_only/advantage_mean"]


def test_a_batch_keeps_what_each_attempt_was_trained_on() -> None:
    """Per attempt its reward and, per segment, the frozen values, the advantages and the learner's log-probabilities."""
    batch = [attempt(n, segments) for n, segments in ((0, 1), (1, 3), (2, 2))]
    learner = cast(Learner, Values())
    scored = score(learner, RPRConfig(), batch, RewardModel(kind=RewardKind.BINARY))
    assert [t.trajectory_id for t in scored.trained_on] == [t.id for t in batch]
    assert [t.reward for t in scored.trained_on] == [float(t.strict) for t in batch]
    assert all(t.log_probs == () for t in scored.trained_on)
    sequences = iter(scored.sequences)
    for t, kept in zip(batch, with_log_probs(learner, scored).trained_on, strict=True):
        assert len(kept.values) == len(kept.advantages) == len(kept.log_probs) == len(t.segments)
        for s, v, a, p in zip(t.segments, kept.values, kept.advantages, kept.log_probs, strict=True):
            own = next(sequences)
            assert own.old_values is v
            assert own.advantages is a
            np.testing.assert_allclose(p[s.loss_mask] - s.rollout_log_probs[s.loss_mask], 0.25, rtol=1e-5)
