"""A stage's choice of estimator reaches its batches: the values that are asked for, the clocks, and γ = λ = 1."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from stages.advantage import Estimator, node_positions, segment_nodes, trajectory_advantages
from stages.backends.protocols import Learner, TrainSequence
from stages.batch import Batch, score
from stages.clock import with_token_clock
from stages.config import RPRConfig
from stages.domain import Trajectory
from stages.errors import BatchError
from stages.rewards import RewardKind, RewardModel
from tests import factories

REWARD = RewardModel(kind=RewardKind.BINARY)


class Critic:
    """A value of each asked token's position, 0 elsewhere, as a learner gives it."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        self.asked = [s.loss_mask for s in sequences]
        return [np.where(s.loss_mask, np.sin(np.arange(len(s.tokens))), 0).astype(np.float32) for s in sequences]


def attempt(number: int) -> Trajectory:
    t = factories.trajectory(number, tokens=80, passed=True)
    segment = factories.segment(np.random.default_rng(number), 80)
    at = np.flatnonzero(segment.loss_mask)
    turns = np.full(80, -1, dtype=np.int32)
    turns[at] = np.arange(len(at)) // 4  # four sampled tokens a turn
    segment = replace(segment, turn_ids=turns)
    answers = [json.dumps({"segment": 0, "start": int(j), "output_ids": [int(segment.tokens[j])]}) for j in at]
    return replace(t, segments=(segment,), raw_answers=tuple(answers), turns=t.turns[: int(turns.max()) + 1])


def scored(config: RPRConfig) -> tuple[Batch, Critic]:
    critic = Critic()
    return score(cast(Learner, critic), config, [attempt(n) for n in range(3)], REWARD), critic


@pytest.mark.parametrize("estimator", [Estimator.TOKEN_ALL, Estimator.TOKEN_POLICY])
def test_token_estimators_give_what_their_mathematics_says(estimator: Estimator) -> None:
    batch, critic = scored(RPRConfig(estimator=estimator, gamma_token=0.99, lambda_token=0.9))
    for n, (sequence, asked) in enumerate(zip(batch.sequences, critic.asked, strict=True)):
        own = attempt(n).segments[0]
        assert np.flatnonzero(asked).tolist() == node_positions(own.loss_mask, estimator).tolist()
        assert (sequence.loss_mask == own.loss_mask).all()  # what trains are the sampled tokens, whatever the nodes
        values = np.where(asked, np.sin(np.arange(80)), 0).astype(np.float32)
        nodes = segment_nodes(own, values, estimator=estimator)
        found = trajectory_advantages([nodes], reward=1.0, gamma=0.99, lam=0.9, estimator=estimator)
        assert sequence.advantages is not None
        assert sequence.value_targets is not None
        assert np.allclose(sequence.advantages[nodes.positions], found.segments[0].advantages, atol=1e-6)
        assert np.allclose(sequence.value_targets[nodes.positions], found.segments[0].value_targets, atol=1e-6)
    assert batch.metrics["advantage/lambda_token"] == 0.9


def test_at_unit_clocks_every_estimator_trains_on_the_same_numbers() -> None:
    """Why an experiment between them is refused."""
    batches = [scored(RPRConfig(estimator=e))[0] for e in Estimator]
    for one, *others in zip(*(b.sequences for b in batches), strict=True):
        for other in others:
            for name in ("advantages", "value_targets"):
                assert np.allclose(getattr(one, name)[one.loss_mask], getattr(other, name)[one.loss_mask], atol=1e-5)


def test_the_default_is_tb_gae_and_says_nothing_of_token_clocks() -> None:
    batch, critic = scored(RPRConfig(gamma_turn=0.9))
    assert "advantage/lambda_token" not in batch.metrics
    assert [m.sum() for m in critic.asked] == [s.loss_mask.sum() for s in batch.sequences]


@pytest.mark.parametrize("estimator", [Estimator.TOKEN_ALL, Estimator.TOKEN_POLICY])
def test_lambda_per_turn_becomes_a_token_clock_of_equal_mean_decay(estimator: Estimator) -> None:
    attempts = [attempt(n) for n in range(3)]
    config = with_token_clock(RPRConfig(estimator=estimator, lambda_token_per_turn=0.95), attempts)
    nodes = sum(len(node_positions(t.segments[0].loss_mask, estimator)) for t in attempts)
    turns = sum(len(t.turns) for t in attempts)
    assert config.lambda_token ** (nodes / turns) == pytest.approx(0.95, rel=1e-12)
    assert config.lambda_token_per_turn is None
    assert with_token_clock(config, attempts) is config
    with pytest.raises(BatchError, match="there are none"):
        with_token_clock(RPRConfig(estimator=estimator, lambda_token_per_turn=0.95), [])


def test_clocks_that_an_estimator_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="tb_gae has lambda_turn"):
        RPRConfig(lambda_token_per_turn=0.9)
    with pytest.raises(ValueError, match="not both"):
        RPRConfig(estimator=Estimator.TOKEN_ALL, lambda_token_per_turn=0.9, lambda_token=0.9)
