"""Two colocated models on one device: the one that does not compute waits in host memory, its optimiser with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stages.backends.learner.optim import Optimizer

Move = Callable[[torch.Tensor], torch.Tensor]


def relocate(model: nn.Module, optimizer: Optimizer | None, move: Move) -> None:
    """Replaces every weight, buffer and moment by what `move` makes of it.

    Parameters stay the objects that they are, so that the optimiser and the hooks keep hold of them.
    """
    for p in model.parameters():
        p.data = move(p.data)
        p.grad = None if p.grad is None else move(p.grad)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = move(buffer)
    if optimizer is not None:
        optimizer.relocate(move)


def bring(wanted: nn.Module, models: Sequence[tuple[nn.Module | None, Optimizer | None]], device: torch.device) -> None:
    """`wanted` goes to the device after all others have gone to host memory."""
    for model, optimizer in sorted(models, key=lambda pair: pair[0] is wanted):
        place = device if model is wanted else torch.device("cpu")
        if model is not None and next(model.parameters()).device.type != place.type:
            relocate(model, optimizer, functools.partial(torch.Tensor.to, device=place))
