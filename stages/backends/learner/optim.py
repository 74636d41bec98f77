"""AdamW with its moments as plain tensors, and the guards around one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stages.backends.learner.critic import fuse_experts, split_experts
from stages.backends.protocols import OptimConfig
from stages.errors import CheckpointError, UpdateError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """One model's optimiser for one phase (spec §2.3: Adam, constant learning rate, no weight decay by default)."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, name: str) -> None:
        self.name = name
        self.config = config
        self.updates = 0
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._adam = torch.optim.AdamW(
            self._params.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def step(self, *, loss: float, lr: float | None = None) -> float:
        """Clips, checks and updates; returns the gradient norm before clipping.

        Raises UpdateError, with the weights unchanged, when the loss or the gradient is not finite.
        """
        if not math.isfinite(loss):
            self.zero_grad()
            raise UpdateError(f"the {self.name} loss is {loss}; the update was refused and no weight changed")
        for p in self._params.values():
            if p.grad is None:  # an expert that no token reached: its moments decay like everyone else's
                p.grad = torch.zeros_like(p)
        norm = float(nn.utils.clip_grad_norm_(self._params.values(), self.config.clip_grad))
        if not math.isfinite(norm):
            self.zero_grad()
            raise UpdateError(
                f"the {self.name} gradient norm is {norm}; the update was refused and no weight changed. "
                "Check the batch's log-probabilities and advantages"
            )
        for group in self._adam.param_groups:
            group["lr"] = self.config.lr if lr is None else lr
        self._adam.step()
        self.zero_grad()
        self.updates += 1
        return norm

    def reconfigure(self, config: OptimConfig) -> None:
        """Another phase's settings on the moments that exist."""
        self.config = config
        for group in self._adam.param_groups:
            group.update(lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)

    def relocate(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every moment by what `move` makes of it."""
        for state in self._adam.state.values():
            state.update({name: move(t) for name, t in state.items()})

    def save(self, path: Path) -> None:
        """Moments under the names that the weights have on disk, so that every learner reads every learner's file."""
        tensors: dict[str, torch.Tensor] = {}
        for moment in MOMENTS:
            found = {n: self._adam.state[p][moment] for n, p in self._params.items() if p in self._adam.state}
            tensors |= {f"{moment}.{n}": t.contiguous() for n, t in split_experts(found).items()}
        save_file(tensors, path)

    def load(self, files: Sequence[Path], *, updates: int) -> None:
        """Moments after `updates` updates. Raises CheckpointError when they do not belong to this model."""
        tensors = {n: t for f in files for n, t in load_file(f).items()}
        self.updates = updates
        if not tensors:
            return  # saved before its first update
        found = {}
        for moment in MOMENTS:
            stem = f"{moment}."
            named = fuse_experts({n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)})
            if odd := sorted(set(named) ^ set(self._params)):
                raise CheckpointError(
                    f"{files[0]}: the optimiser state does not fit this model (first difference: {moment} of {odd[0]})"
                )
            found[moment] = named
        for n, p in self._params.items():
            state = {moment: found[moment][n] for moment in MOMENTS}
            for moment, t in state.items():
                if t.shape != p.shape:
                    raise CheckpointError(f"{files[0]}: {moment} of {n} is {tuple(t.shape)}, not {tuple(p.shape)}")
            step = torch.tensor(float(updates), device=p.device)
            self._adam.state[p] = {**{k: t.to(p.device) for k, t in state.items()}, "step": step}
