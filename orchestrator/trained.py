"""What a step trained on, token by token: values and advantages of a batch as one file, read back for one attempt.

The file is safetensors; `ID/SEGMENT/values`, `…/advantages` and, where kept, `…/log_probs` are float32 [T].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from orchestrator.artifacts import ArtifactStore
from stages.records import TrainedOn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentScores:
    """Frozen before the update, float32 [T] of one segment."""

    values: np.ndarray
    advantages: np.ndarray
    log_probs: np.ndarray | None  # the learner's; None: not kept


def pack(attempts: Sequence[TrainedOn]) -> bytes:
    """Arrays of a batch. Attempts that nothing was trained on have none."""
    return save(
        {
            f"{a.trajectory_id}/{segment}/{name}": np.asarray(array, np.float32)
            for a in attempts
            for name, arrays in (("values", a.values), ("advantages", a.advantages), ("log_probs", a.log_probs))
            for segment, array in enumerate(arrays)
        }
    )


def read(artifacts: ArtifactStore, key: str, trajectory_id: str) -> dict[int, SegmentScores]:
    """Segment -> its arrays, reading only them. Raises StoreError when the file is gone."""
    head = 8 + int.from_bytes(artifacts.read_range(key, 0, 8), "little")
    header = json.loads(artifacts.read_range(key, 8, head))

    def array(name: str) -> np.ndarray:
        start, end = header[name]["data_offsets"]
        return np.frombuffer(artifacts.read_range(key, head + start, head + end) if end > start else b"", np.float32)

    own = [n.removesuffix("values") for n in header if n.startswith(f"{trajectory_id}/") and n.endswith("/values")]
    return {
        int(name.split("/")[1]): SegmentScores(
            values=array(f"{name}values"),
            advantages=array(f"{name}advantages"),
            log_probs=array(f"{name}log_probs") if f"{name}log_probs" in header else None,
        )
        for name in own
    }
