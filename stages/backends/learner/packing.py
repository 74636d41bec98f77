"""Micro-batches of a training batch, cut by a token budget.

Shapes: B sequences, b rows of one micro-batch, T padded length, N masked tokens of one micro-batch, L layers, K experts.

Rows are right-padded and carry no attention mask: under causal attention no real token can see a pad behind it, and only
hidden states at real positions are read. A sequence is cut after the prefix of its last masked token, for what follows
influences no loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.backends.protocols import TrainSequence
from stages.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward and backward pass."""

    ids_bT: torch.Tensor  # int64, right-padded
    prefix_N: torch.Tensor  # int64, flat index row * T + (j - 1): the hidden state that predicts token j
    targets_N: torch.Tensor  # int64, y_j
    places: tuple[tuple[int, np.ndarray], ...]  # per row: index in the batch, its masked positions j
    fields: dict[str, torch.Tensor] = field(default_factory=dict)  # float32 [N] each
    routed_bTLK: torch.Tensor | None = None  # int64; None: no routes to replay

    @property
    def padded_tokens(self) -> int:
        return self.ids_bT.numel()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    micro_batches: tuple[MicroBatch, ...]
    masked_tokens: int  # over the whole batch: the denominator of every mean
    input_tokens: int  # read by the model, pads excluded
    padded_tokens: int  # read by the model, pads included


def check_batch(batch: Sequence[TrainSequence], *, context_len: int, vocab_size: int) -> None:
    """Refuses a batch before anything is computed.

    Raises BatchError for an empty batch, arrays of different lengths, a mask on the first token (it has no prefix), ids
    outside the vocabulary, or a sequence over the context (spec §7).
    """
    if not batch:
        raise BatchError("the batch is empty: there is nothing to train on")
    for i, seq in enumerate(batch):
        length = len(seq.tokens)
        if length > context_len:
            raise BatchError(
                f"sequence {i} has {length} tokens but the model's context holds {context_len}; "
                "lower the harness's token cap or use compaction"
            )
        for name in ("loss_mask", "rollout_log_probs", "advantages", "value_targets", "old_values"):
            array = getattr(seq, name)
            if array is not None and len(array) != length:
                raise BatchError(f"sequence {i}: {name} has {len(array)} entries for {length} tokens")
        if length and seq.loss_mask[0]:
            raise BatchError(f"sequence {i}: the first token is in the loss mask but has no prefix")
        if length and (int(seq.tokens.min()) < 0 or int(seq.tokens.max()) >= vocab_size):
            raise BatchError(f"sequence {i} holds a token id outside the model's vocabulary of {vocab_size}")
        routed = seq.rollout_routed_experts
        if routed is not None and len(routed) < length - 1:
            raise BatchError(f"sequence {i}: {len(routed)} routed rows for {length} tokens (needs {length - 1})")


def pack(
    batch: Sequence[TrainSequence],
    *,
    max_tokens: int,
    fields: Sequence[str] = (),
    with_routes: bool = False,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Cuts a checked batch into micro-batches of at most `max_tokens` padded tokens.

    Longest first, ties by index, so the result depends on the batch alone. A sequence over the budget goes alone with a
    warning (spec §7). Sequences without a masked token are left out. `fields` names the per-token arrays to carry.

    Raises BatchError when no token is masked in the whole batch, or a named field is missing.
    """
    masked = [np.flatnonzero(seq.loss_mask) for seq in batch]
    # Token j is read at hidden state j-1: the last masked token itself need not be an input.
    lengths = [int(m[-1]) if len(m) else 0 for m in masked]
    order = sorted((i for i in range(len(batch)) if lengths[i]), key=lambda i: (-lengths[i], i))
    if not order:
        raise BatchError("no token of the batch is in the loss mask: there is nothing to train on")
    for i in order:
        for name in fields:
            if getattr(batch[i], name) is None:
                raise BatchError(f"sequence {i} has no {name}, which this update needs")
    over = [i for i in order if lengths[i] > max_tokens]
    if over:
        warnings.warn(
            f"{len(over)} sequence(s) exceed max_tokens_per_gpu={max_tokens} (longest {lengths[over[0]]}) "
            "and go alone in their micro-batch",
            stacklevel=2,
        )
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    micro = tuple(_micro_batch(batch, g, masked, lengths, fields, with_routes, device) for g in groups)
    return PackedBatch(
        micro_batches=micro,
        masked_tokens=sum(len(masked[i]) for i in order),
        input_tokens=sum(lengths[i] for i in order),
        padded_tokens=sum(m.padded_tokens for m in micro),
    )


def _micro_batch(
    batch: Sequence[TrainSequence],
    group: list[int],
    masked: list[np.ndarray],
    lengths: list[int],
    fields: Sequence[str],
    with_routes: bool,
    device: torch.device | str,
) -> MicroBatch:
    width = lengths[group[0]]
    ids = np.zeros((len(group), width), np.int64)
    for row, i in enumerate(group):
        ids[row, : lengths[i]] = batch[i].tokens[: lengths[i]]
    prefix = np.concatenate([row * width + masked[i] - 1 for row, i in enumerate(group)])
    targets = np.concatenate([batch[i].tokens[masked[i]] for i in group]).astype(np.int64)
    carried = {
        name: torch.from_numpy(
            np.concatenate([np.asarray(getattr(batch[i], name), np.float32)[masked[i]] for i in group])
        ).to(device)
        for name in fields
    }
    return MicroBatch(
        ids_bT=torch.from_numpy(ids).to(device),
        prefix_N=torch.from_numpy(prefix).to(device),
        targets_N=torch.from_numpy(targets).to(device),
        places=tuple((i, masked[i]) for i in group),
        fields=carried,
        routed_bTLK=_routes(batch, group, lengths, width, device) if with_routes else None,
    )


def _routes(
    batch: Sequence[TrainSequence], group: list[int], lengths: list[int], width: int, device: torch.device | str
) -> torch.Tensor | None:
    """int64 [b, T, L, K]; -1 where there is nothing to replay (pads, sequences without routes)."""
    given = [batch[i].rollout_routed_experts for i in group]
    shape = next((r.shape[1:] for r in given if r is not None), None)
    if shape is None:
        return None
    routes = np.full((len(group), width, *shape), -1, np.int64)
    for row, (i, rows) in enumerate(zip(group, given, strict=True)):
        if rows is None:
            continue
        if rows.shape[1:] != shape:
            raise BatchError(f"sequence {i}: routed experts are {rows.shape[1:]} per token, another has {shape}")
        routes[row, : lengths[i]] = rows[: lengths[i]]
    return torch.from_numpy(routes).to(device)


def unpack(
    packed: PackedBatch, per_micro_N: Sequence[torch.Tensor], batch: Sequence[TrainSequence]
) -> list[np.ndarray]:
    """Scatters one value per masked token back to float32 [T] arrays in batch order, 0 elsewhere."""
    out = [np.zeros(len(seq.tokens), np.float32) for seq in batch]
    for micro, flat in zip(packed.micro_batches, per_micro_N, strict=True):
        values, at = flat.float().cpu().numpy(), 0
        for i, positions in micro.places:
            out[i][positions] = values[at : at + len(positions)]
            at += len(positions)
    return out
