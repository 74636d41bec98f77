"""A parameter's float32 master and Adam moments, wherever core's optimisers keep them.

Without the distributed optimiser every rank has them whole; with it each data-parallel rank has a piece of the flattened
parameter. `read` and `write` speak of whole tensors (this rank's tensor-parallel cut) in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import nn

MASTER = "param"  # core's own name for it
MOMENTS = ("exp_avg", "exp_avg_sq")


class Masters:
    """Over the optimisers of one model. `read` is collective: all ranks ask for the same parameters in the same order."""

    def __init__(self, optimizers: Sequence[Any], *, sharded: bool) -> None:
        self._optimizers, self._sharded = optimizers, sharded

    @torch.no_grad()
    def read(self, p: nn.Parameter, what: str) -> torch.Tensor:
        """`what`: MASTER or one of MOMENTS; float32, shaped as `p`."""
        if not self._sharded:
            return self._whole(p, what).float()
        flat = torch.zeros(p.numel(), dtype=torch.float32, device=p.device)
        for at, piece in self._pieces(p, what):
            flat[at] = piece.flatten().float().to(p.device)
        expert = not getattr(p, "allreduce", True)  # core's mark of an expert's parameter
        group = (
            mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(flat, group=group)
        return flat.view_as(p)

    @torch.no_grad()
    def write(self, p: nn.Parameter, what: str, tensor: torch.Tensor) -> None:
        """Each rank keeps what it owns of `tensor`."""
        if not self._sharded:
            self._whole(p, what).copy_(tensor)
            return
        for at, piece in self._pieces(p, what):
            piece.copy_(tensor.flatten()[at].view_as(piece))

    def _whole(self, p: nn.Parameter, what: str) -> torch.Tensor:
        master = getattr(p, "main_param", None)
        master = p if master is None else master
        if what == MASTER:
            return master
        return next(o.optimizer.state[master][what] for o in self._optimizers if master in o.optimizer.state)

    def _pieces(self, p: nn.Parameter, what: str) -> list[tuple[slice, torch.Tensor]]:
        """This rank's share of the flattened parameter: none or one."""
        found = []
        for o in self._optimizers:
            if p in o.model_param_group_index_map:
                own = o._get_model_param_range_map(p)["param"]
                found.append((slice(own.start, own.end), o._get_main_param_and_optimizer_states(p)[what]))
        return found
