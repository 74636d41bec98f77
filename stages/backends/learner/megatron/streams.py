"""Packed streams: what one data-parallel and context-parallel rank reads in one micro-batch.

Shapes: n tokens of a stream over all context-parallel ranks, s = n / CP of this rank, N masked tokens, L layers, K experts.
Unlike the one-device learner's rows, sequences lie end to end and are told apart by their ends (Megatron's `thd`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.backends.protocols import TrainSequence
from stages.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """One micro-batch of this rank."""

    ids_s: torch.Tensor  # int64
    positions_s: torch.Tensor  # int64
    ends: torch.Tensor  # int32 [sequences + 1], over all context-parallel ranks
    longest: int
    rows_N: torch.Tensor  # int64: this rank's tokens whose next token is masked
    targets_N: torch.Tensor  # int64
    slots_N: np.ndarray  # where each belongs in the batch's flat result
    fields: dict[str, torch.Tensor] = field(default_factory=dict)  # float32 [N] each
    routed_sLK: torch.Tensor | None = None  # int64, −1: no route given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Every rank computes the same plan from the same batch."""

    groups: tuple[tuple[int, ...], ...]  # sequences of each micro-batch; empty: padding only
    lengths: tuple[int, ...]  # inputs read of each sequence
    masked_tokens: int
    input_tokens: int
    offsets: np.ndarray  # start of each sequence in the flat result
    align: int


def plan(batch: Sequence[TrainSequence], *, budget: int, align: int, ways: int) -> Plan:
    """Cuts a checked batch into micro-batches of at most `budget` tokens, a multiple of `ways` of them.

    `align`: every sequence is padded to a multiple. `ways`: data-parallel ranks, which must all do as many.
    Raises BatchError when no token is masked.
    """
    masked = [np.flatnonzero(s.loss_mask) for s in batch]
    lengths = tuple(int(m[-1]) if len(m) else 0 for m in masked)
    order = sorted((i for i in range(len(batch)) if lengths[i]), key=lambda i: (-lengths[i], i))
    if not order:
        raise BatchError("no token of the batch is in the loss mask: there is nothing to train on")
    if lengths[order[0]] > budget:
        warnings.warn(
            f"longest sequence ({lengths[order[0]]} tokens) exceeds max_tokens_per_gpu × CP = {budget}: it goes alone",
            stacklevel=2,
        )
    groups: list[list[int]] = []
    used = 0
    for i in order:
        size = _padded(lengths[i], align)
        if groups and used + size <= budget:
            groups[-1].append(i)
            used += size
        else:
            groups.append([i])
            used = size
    groups += [[]] * (-len(groups) % ways)
    return Plan(
        groups=tuple(map(tuple, groups)),
        lengths=lengths,
        masked_tokens=sum(map(len, masked)),
        input_tokens=sum(lengths),
        offsets=np.concatenate([[0], np.cumsum([len(s.tokens) for s in batch])]),
        align=align,
    )


def streams(
    batch: Sequence[TrainSequence],
    plan: Plan,
    mine: Sequence[int],
    *,
    context: int,
    context_rank: int,
    total_multiple: int,
    equal: bool,
    fields: Sequence[str],
    with_routes: bool,
    device: torch.device,
) -> list[Stream]:
    """The micro-batches `mine` as this rank reads them.

    total_multiple: a stream's length must divide by it. equal: pad all to one length (pipeline stages exchange fixed shapes).
    """
    sizes = [sum(_padded(plan.lengths[i], plan.align) for i in plan.groups[g]) for g in mine]
    unit = math.lcm(total_multiple, plan.align)
    full = [max(unit, _padded(n, unit)) for n in sizes]
    if equal:
        full = [max(full)] * len(full)
    return [
        _stream(batch, plan, plan.groups[g], n, context, context_rank, fields, with_routes, device)
        for g, n in zip(mine, full, strict=True)
    ]


def _stream(
    batch: Sequence[TrainSequence],
    plan: Plan,
    group: Sequence[int],
    total: int,
    context: int,
    rank: int,
    fields: Sequence[str],
    with_routes: bool,
    device: torch.device,
) -> Stream:
    ids, positions, targets, slots, ends = [], [], [], [], [0]
    values: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    routes: list[np.ndarray] = []
    shape = _route_shape(batch) if with_routes else None
    for i in [*group, -1]:  # −1: one more sequence of nothing but padding
        seq, n = (batch[i], plan.lengths[i]) if i >= 0 else (None, 0)
        width = _padded(n, plan.align) if seq is not None else total - ends[-1]
        if not width:
            continue
        take = _zigzag(width, context, rank)
        ends.append(ends[-1] + width)
        ids.append(_filled(width, 0, seq.tokens[:n] if seq is not None else None, np.int64)[take])
        positions.append(take)
        next_masked = seq.loss_mask[1 : n + 1] if seq is not None else np.zeros(0, bool)
        at = np.arange(1, n + 1)
        slot = np.where(next_masked, plan.offsets[i] + at, -1) if seq is not None else None
        slots.append(_filled(width, -1, slot, np.int64)[take])
        targets.append(_filled(width, 0, seq.tokens[1 : n + 1] if seq is not None else None, np.int64)[take])
        for name in fields:
            array = None
            if seq is not None:
                array = getattr(seq, name)
                if array is None:
                    raise BatchError(f"sequence {i} has no {name}, which this update needs")
                array = array[1 : n + 1]
            values[name].append(_filled(width, 0, array, np.float32)[take])
        if shape is not None:
            given = seq.rollout_routed_experts if seq is not None else None
            padded = np.full((width, *shape), -1, np.int64)
            if given is not None:
                padded[:n] = given[:n]
            routes.append(padded[take])
    slot_s = np.concatenate(slots)
    rows = np.flatnonzero(slot_s >= 0)
    put = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
    return Stream(
        ids_s=put(np.concatenate(ids)),
        positions_s=put(np.concatenate(positions)),
        ends=torch.tensor(ends, dtype=torch.int32, device=device),
        longest=max(b - a for a, b in itertools.pairwise(ends)),
        rows_N=put(rows),
        targets_N=put(np.concatenate(targets)[rows]),
        slots_N=slot_s[rows],
        fields={name: put(np.concatenate(parts)[rows]) for name, parts in values.items()},
        routed_sLK=put(np.concatenate(routes)) if routes else None,
    )


def split(flat: np.ndarray, plan: Plan) -> list[np.ndarray]:
    """A flat result as one float32 [T] array per sequence of the batch."""
    return [flat[a:b].astype(np.float32) for a, b in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]


def _route_shape(batch: Sequence[TrainSequence]) -> tuple[int, ...] | None:
    return next((s.rollout_routed_experts.shape[1:] for s in batch if s.rollout_routed_experts is not None), None)


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _filled(width: int, fill: int, head: np.ndarray | None, dtype: type) -> np.ndarray:
    out: np.ndarray = np.full(width, fill, dtype)
    if head is not None:
        out[: len(head)] = head
    return out


def _zigzag(length: int, context: int, rank: int) -> np.ndarray:
    """As `modules.zigzag`, without torch."""
    if context == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * context, -1)
    return np.concatenate([chunks[rank], chunks[2 * context - 1 - rank]])
