"""Groups of caches: requests that came in one wave stay together, whatever other waves do meanwhile.

Several waves may be in flight, one decoding while the shells of another run. Which one calls next depends on timing, and
must not reach the numbers: a wave's rows lie in its own group, so their order depends on the wave's own history only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stages.backends.sampler.cache import SlotCache
from stages.errors import SamplerError

EMPTY_KEPT = 4  # emptied groups whose memory is kept for the next waves


class CachePool:
    """All groups of one decoder."""

    def __init__(self, make: Callable[[], SlotCache], *, max_slots: int) -> None:
        self._make = make
        self._max_slots = max_slots
        self._group_of: dict[str, SlotCache] = {}  # insertion order is age
        self._empty: list[SlotCache] = []

    def group(self, rids: Sequence[str]) -> SlotCache:
        """The group that holds, or will hold, all of `rids`. Idle caches are evicted, oldest first, when slots run out.

        Raises SamplerError when a wave is larger than `max_slots`.
        """
        if len(rids) > self._max_slots:
            raise SamplerError(
                f"a wave of {len(rids)} requests exceeds max_slots={self._max_slots}; send fewer or raise max_slots"
            )
        wanted = set(rids)
        idle = [r for r in self._group_of if r not in wanted]
        self.release(idle[: max(0, len(idle) + len(wanted) - self._max_slots)])
        homes = [self._group_of[r] for r in rids if r in self._group_of]
        home = max(homes, key=homes.count) if homes else (self._empty.pop() if self._empty else self._make())
        for rid in rids:
            old = self._group_of.get(rid)
            if old is not None and old is not home:
                home.adopt(rid, old)
                self._retire(old)
            self._group_of[rid] = home
        return home

    def cached_ids(self, rid: str) -> np.ndarray:
        """Token ids whose keys are cached, int64 [T]; empty for an unknown rid."""
        group = self._group_of.get(rid)
        return np.empty(0, dtype=np.int64) if group is None else group.cached_ids(rid)

    def of(self, rid: str) -> SlotCache:
        return self._group_of[rid]

    def release(self, rids: Sequence[str]) -> None:
        """Unknown rids are ignored."""
        for rid in rids:
            group = self._group_of.pop(rid, None)
            if group is not None:
                group.release([rid])
                self._retire(group)

    def _retire(self, group: SlotCache) -> None:
        if len(group) == 0 and group not in self._empty and len(self._empty) < EMPTY_KEPT:
            self._empty.append(group)
