"""Where the key/value caches of a group of attempts live between their turns.

Shapes: L layers, S slots, H key/value heads, T positions, D head size, K experts per token.

One slot is one request id. A wave works on a contiguous range of slots through views, so the token loop copies nothing;
`arrange` and `compact` move whole slots instead, which is rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

SLOT_BUCKET = 32
LENGTH_BUCKET = 32


class SlotCache:
    """Keys, values and routes [L, S, H, T, D] with the ids that they were computed from."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        experts_per_token: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = 0
        self.length = 0
        shape = (layers, 0, heads, 0, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.routes: torch.Tensor | None = None
        if experts_per_token:
            self.routes = torch.zeros((layers, 0, 1, 0, experts_per_token), dtype=torch.int32, device=device)
        self._rid_at: list[str | None] = []
        self._slot_of: dict[str, int] = {}
        self._ids: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def release(self, rids: Sequence[str]) -> None:
        for rid in rids:
            slot = self._slot_of.pop(rid, None)
            if slot is not None:
                self._rid_at[slot] = None
                del self._ids[rid]

    def cached_ids(self, rid: str) -> np.ndarray:
        """Token ids whose keys are in the cache, int64 [T]; empty for an unknown rid."""
        return self._ids.get(rid, _NONE)

    def record(self, rid: str, ids: np.ndarray) -> None:
        """State which ids the slot of `rid` now holds."""
        self._ids[rid] = ids

    def slot(self, rid: str) -> int:
        return self._slot_of[rid]

    def arrange(self, rids: Sequence[str]) -> list[int]:
        """Bring `rids` into slots 0 … n-1; returns, slot by slot, the index into `rids`.

        Those that are cached move only if they must; new ones take the free slots in the order given.
        """
        n = len(rids)
        wanted = set(rids)
        self._grow(slots=len(wanted | set(self._slot_of)))
        holes = [s for s in range(n) if self._rid_at[s] not in wanted]
        movers = sorted(self._slot_of[r] for r in wanted if r in self._slot_of and self._slot_of[r] >= n)
        self.swap(movers, holes[: len(movers)])
        free = [s for s in range(n) if self._rid_at[s] not in wanted]
        for rid in rids:
            if rid not in self._slot_of:
                slot = free.pop(0)
                self._vacate(slot)
                self._rid_at[slot], self._slot_of[rid], self._ids[rid] = rid, slot, _NONE
        index = {rid: i for i, rid in enumerate(rids)}
        return [index[r] for r in self._rid_at[:n] if r is not None]

    def swap(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Exchange the slots `left[i]` and `right[i]`; no slot may be named twice."""
        if not left:
            return
        names = self._rid_at
        used = max((len(self._ids[r]) for s in (*left, *right) if (r := names[s]) is not None), default=0)
        self._exchange(left, right, min(self.length, used))

    def _exchange(self, left: Sequence[int], right: Sequence[int], used: int) -> None:
        device = self.keys.device
        to = torch.tensor([*left, *right], device=device)
        source = torch.tensor([*right, *left], device=device)
        for t in self._tensors():
            t[:, to, :, :used] = t[:, source, :, :used]
        for a, b in zip(left, right, strict=True):
            names = self._rid_at
            names[a], names[b] = names[b], names[a]
            for s in (a, b):
                if (rid := names[s]) is not None:
                    self._slot_of[rid] = s

    def compact(self, alive: Sequence[int], dead: Sequence[int], used: int) -> None:
        """In the middle of a wave: exchange finished slots with living ones; `used` positions are in use."""
        if alive:
            self._exchange(alive, dead, used)

    def adopt(self, rid: str, other: SlotCache) -> None:
        """Take `rid` over from another group."""
        ids = other.cached_ids(rid)
        self._grow(slots=len(self) + 1, length=len(ids))
        slot, old = self._rid_at.index(None), other.slot(rid)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine[:, slot, :, : len(ids)] = theirs[:, old, :, : len(ids)]
        other.release([rid])
        self._rid_at[slot], self._slot_of[rid], self._ids[rid] = rid, slot, ids

    def copy(self, source: int, targets: Sequence[int], used: int) -> None:
        """Fill `targets` with the first `used` positions of `source` (attempts that share a prompt)."""
        to = torch.tensor(list(targets), device=self.keys.device)
        for t in self._tensors():
            t[:, to, :, :used] = t[:, source : source + 1, :, :used]

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a slot, growing by a quarter at least."""
        if length > self.length:
            self._grow(length=max(length, min(self.length + self.length // 4, self.length + 1024)))

    def _vacate(self, slot: int) -> None:
        """Move an idle cache that sits in the wave's range to a free slot behind it."""
        if self._rid_at[slot] is not None:
            spare = next(s for s in range(self.slots - 1, -1, -1) if self._rid_at[s] is None)
            self.swap([slot], [spare])

    def _grow(self, *, slots: int = 0, length: int = 0) -> None:
        new_slots = max(self.slots, -(-slots // SLOT_BUCKET) * SLOT_BUCKET)
        new_length = max(self.length, -(-length // LENGTH_BUCKET) * LENGTH_BUCKET)
        if (new_slots, new_length) == (self.slots, self.length):
            return
        self.keys, self.values = (self._grown(t, new_slots, new_length) for t in (self.keys, self.values))
        if self.routes is not None:
            self.routes = self._grown(self.routes, new_slots, new_length)
        self._rid_at += [None] * (new_slots - self.slots)
        self.slots, self.length = new_slots, new_length

    def _grown(self, old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
        layers, _, heads, _, width = old.shape
        new = old.new_zeros((layers, slots, heads, length, width))
        new[:, : self.slots, :, : self.length] = old
        return new

    def _tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values] + ([] if self.routes is None else [self.routes])


_NONE = np.empty(0, dtype=np.int64)
