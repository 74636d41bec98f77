"""Log-probabilities and entropies over a vocabulary that is split across tensor-parallel ranks.

Shapes: N masked tokens, H hidden size, C tokens of one chunk, V vocabulary entries of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch.utils.checkpoint import checkpoint

OUT_OF_VOCABULARY = -1e9  # logit of the entries that only pad the vocabulary to a multiple of TP


def token_scores(
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    chunk: int,
    temperature: float,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability, entropy) of each target in float32, `chunk` rows of logits at a time; entropy has no gradient."""
    rank = mpu.get_tensor_model_parallel_rank()
    own = max(0, min(len(weight_VH), vocab_size - rank * len(weight_VH)))

    def score(h_CH: torch.Tensor, y_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = F.linear(h_CH, weight_VH).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        if own < len(weight_VH):
            logits_CV = torch.cat([logits_CV[:, :own], torch.full_like(logits_CV[:, own:], OUT_OF_VOCABULARY)], 1)
        entropy_C = _entropy(logits_CV.detach())
        # core's cross entropy overwrites its input
        return -vocab_parallel_cross_entropy(logits_CV.clone()[:, None], y_C[:, None])[:, 0], entropy_C

    parts = []
    for i in range(0, len(targets_N), chunk):
        h, y = hidden_NH[i : i + chunk], targets_N[i : i + chunk]
        if torch.is_grad_enabled() and len(targets_N) > chunk:
            parts.append(checkpoint(score, h, y, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(score(h, y))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@torch.no_grad()
def _entropy(logits_CV: torch.Tensor) -> torch.Tensor:
    group = mpu.get_tensor_model_parallel_group()
    top_C = logits_CV.max(-1).values
    dist.all_reduce(top_C, dist.ReduceOp.MAX, group=group)
    e_CV = (logits_CV - top_C[:, None]).exp()
    sums_2C = torch.stack([e_CV.sum(-1), (e_CV * logits_CV).sum(-1)])
    dist.all_reduce(sums_2C, group=group)
    return sums_2C[0].log() + top_C - sums_2C[1] / sums_2C[0]
