"""R3 through core's RouterReplay, extended to tokens without a route (spec §6.2).

Shapes: t tokens that a router sees on this rank, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from stages.backends.learner.megatron.modules import Backbone
from stages.backends.learner.router_replay import RouteCounts


class PartialReplay(RouterReplay):
    """Replays the given experts; a row of −1 (padding, a sequence without routes) is routed live."""

    def __init__(self, counts: RouteCounts) -> None:
        super().__init__()
        self.counts = counts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None
        values, live_tK = default_compute_topk(scores, topk, num_groups, group_topk)
        first = self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
        if first:
            given = self.target_topk_idx
        elif self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD and self.replay_backward_list:
            given = self.replay_backward_list.pop(0)
        else:
            given = None
        if given is None:
            return values, live_tK
        has = (given >= 0).all(-1, keepdim=True)
        chosen_tK = torch.where(has, given, live_tK)
        if first:
            self.counts.replayed += int(has.sum())
            self.counts.flipped += int((chosen_tK.sort(-1).values != live_tK.sort(-1).values).any(-1).sum())
        return scores.gather(1, chosen_tK), chosen_tK


class ModelReplay:
    """The routers of one model's layers on this pipeline stage."""

    def __init__(self, model: Backbone) -> None:
        self.counts = RouteCounts()
        self._routers: list[tuple[int, PartialReplay]] = []
        for layer in model.decoder.layers:
            router: Any = getattr(layer.mlp, "router", None)
            if router is not None:
                router.router_replay = PartialReplay(self.counts)
                self._routers.append((int(layer.layer_number) - 1, router.router_replay))
        RouterReplay.clear_global_router_replay_instances()  # actor and critic would share core's global list

    @property
    def active(self) -> bool:
        return bool(self._routers)

    def forward(self, routed_tLK: torch.Tensor | None) -> None:
        """Before a micro-batch's forward: its routes, or None for live routing."""
        for layer, router in self._routers:
            if routed_tLK is None:
                router.clear_router_replay_action()
            else:
                router.set_target_indices(routed_tLK[:, layer])
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def backward(self) -> None:
        """After it: a recomputation in backward takes the routes of its own micro-batch, oldest first."""
        for _, router in self._routers:
            if router.router_replay_action is not None:
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def clear(self) -> None:
        for _, router in self._routers:
            router.clear_indices()
            router.clear_router_replay_action()
