"""R3: the training forward uses the experts that the sampler chose, with gate weights from live scores (spec §6.2).

Shapes: b rows, T tokens, L decoder layers (dense ones included, as SGLang counts), K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.backends.protocols import TrainSequence
from stages.errors import BatchError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    layer: int  # decoder layer
    module: nn.Module
    top_k: int
    experts: int
    normalised: bool  # gate weights of the chosen experts sum to 1


@dataclass(slots=True)
class RouteCounts:
    """What replay did, over (token, router) pairs that had a route to replay."""

    replayed: int = 0
    flipped: int = 0  # the live top-k was another set of experts

    @property
    def flip_share(self) -> float | None:
        return self.flipped / self.replayed if self.replayed else None


class RouteReplay:
    """Hooks on the routers of one mixture-of-experts backbone. A dense backbone has none: everything is a no-op.

    Raises ModelError when the backbone has experts but no router that is "softmax over all experts, then top-k".
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.counts = RouteCounts()
        self._routes_tokens_LK: torch.Tensor | None = None
        self._routers = list(_find(backbone))
        self._layers = len(backbone.layers) if self._routers else 0  # type: ignore[arg-type]
        for router in self._routers:
            router.module.register_forward_hook(self._hook(router))

    @property
    def active(self) -> bool:
        return bool(self._routers)

    def check(self, batch: Sequence[TrainSequence]) -> None:
        """Raises BatchError for routes of another model: wrong layers, experts per token or expert ids."""
        if not self._routers:
            return
        want = (self._layers, self._routers[0].top_k)
        for i, seq in enumerate(batch):
            routes = seq.rollout_routed_experts
            if routes is None or not len(routes):
                continue
            if routes.shape[1:] != want:
                raise BatchError(
                    f"sequence {i}: routed experts have (layers, experts per token) {routes.shape[1:]}, the model {want}; "
                    "sampler and learner hold different models"
                )
            if routes.min() < 0 or routes.max() >= self._routers[0].experts:
                raise BatchError(f"sequence {i}: a routed expert is outside 0…{self._routers[0].experts - 1}")

    @contextlib.contextmanager
    def using(self, routed_bTLK: torch.Tensor | None) -> Iterator[None]:
        """Replays these routes (−1: route live) in every forward inside, recomputation in backward included."""
        self._routes_tokens_LK = None if routed_bTLK is None else routed_bTLK.flatten(0, 1)
        try:
            yield
        finally:
            self._routes_tokens_LK = None

    def _hook(self, router: _Router) -> Callable[..., object]:
        checked = False

        def replay(module: nn.Module, args: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> object:
            nonlocal checked
            if self._routes_tokens_LK is None:
                return None
            logits, scores, live = output
            if not checked:
                with torch.no_grad():  # nothing may be saved here that a recomputation would not save
                    softmax = torch.allclose(_gate_weights(logits, live, router), scores, atol=1e-5)
                if not softmax:
                    raise ModelError(f"{type(module).__name__} does not gate by softmax: its routes cannot be replayed")
                checked = True
            given = self._routes_tokens_LK[:, router.layer]
            has = (given >= 0).all(-1, keepdim=True)
            chosen = torch.where(has, given, live)
            with torch.no_grad():
                self.counts.replayed += int(has.sum())
                self.counts.flipped += int((chosen.sort(-1).values != live.sort(-1).values).any(-1).sum())
            return logits, _gate_weights(logits, chosen, router), chosen

        return replay


def _gate_weights(logits: torch.Tensor, chosen: torch.Tensor, router: _Router) -> torch.Tensor:
    """Live scores of the chosen experts: the router stays trainable."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _find(backbone: nn.Module) -> Iterator[_Router]:
    config = getattr(backbone, "config", None)
    if not getattr(config, "num_experts", None) and not getattr(config, "num_local_experts", None):
        return
    found = False
    layers: nn.ModuleList = backbone.layers  # type: ignore[assignment]
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__.endswith("TopKRouter"):
                found = True
                router: Any = module
                yield _Router(
                    layer=index,
                    module=module,
                    top_k=int(router.top_k),
                    experts=int(router.num_experts),
                    normalised=bool(getattr(router, "norm_topk_prob", True)),
                )
    if not found:
        raise ModelError(
            f"{type(backbone).__name__} has experts but no top-k router module that replay knows; "
            "set use_rollout_routing_replay = false"
        )
