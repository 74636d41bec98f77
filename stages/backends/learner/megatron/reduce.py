"""Sums over ranks: metrics are reduced from sums, never averaged per rank (spec §3.5, §5).

Only the first tensor-parallel rank of the last pipeline stage contributes: the others hold copies or nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from stages.ppo import PolicySums, ValueSums


def contributes() -> bool:
    return mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0


def flat_result(size: int, parts: list[tuple[np.ndarray, torch.Tensor]], device: torch.device) -> np.ndarray:
    """One float32 array over the whole batch from every rank's (slots, values); 0 where nothing was computed."""
    out = torch.zeros(size, dtype=torch.float32, device=device)
    if contributes():
        for slots, values in parts:
            out[torch.from_numpy(slots).to(device)] = values.float()
    dist.all_reduce(out)
    return out.cpu().numpy()


def value_sums(sums: ValueSums, device: torch.device) -> ValueSums:
    return ValueSums(**_reduced(sums, [f.name for f in dataclasses.fields(sums)], device))


def policy_sums(sums: PolicySums, log_ratios: np.ndarray, device: torch.device) -> PolicySums:
    """`log_ratios`: of all masked tokens of the batch, for the exact p99 and maximum."""
    names = [f.name for f in dataclasses.fields(sums) if f.name != "log_ratios"]
    return PolicySums(**_reduced(sums, names, device), log_ratios=[log_ratios])


def _reduced(sums: PolicySums | ValueSums, names: list[str], device: torch.device) -> dict:
    mine = [float(getattr(sums, n) or 0) if contributes() else 0.0 for n in names]
    total = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    kinds = {n: int if isinstance(getattr(sums, n), int) else float for n in names}
    return {n: kinds[n](v) for n, v in zip(names, total.tolist(), strict=True)}
