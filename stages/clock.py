"""λ per token from λ per turn: the token baseline that decays about as fast as TB-GAE does (spec §2.4, §3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from stages.advantage import node_positions
from stages.config import RPRConfig
from stages.domain import Trajectory
from stages.errors import BatchError


def with_token_clock(config: RPRConfig, profiled: Sequence[Trajectory]) -> RPRConfig:
    """λ_token = λ_turn^(1 / mean nodes per turn), from the attempts that profile the stage; unchanged where not asked for.

    Nodes are those of the estimator: sampled tokens for `token_policy`, observations between them too for `token_all`.
    Raises BatchError when no profiling attempt has a turn.
    """
    if config.lambda_token_per_turn is None:
        return config
    nodes = sum(len(node_positions(s.loss_mask, config.estimator)) for t in profiled for s in t.segments)
    turns = sum(len(t.turns) for t in profiled)
    if not nodes or not turns:
        raise BatchError("lambda_token_per_turn needs profiling attempts with turns, and there are none")
    lam = config.lambda_token_per_turn ** (turns / nodes)
    return config.model_copy(update={"lambda_token": lam, "lambda_token_per_turn": None})
