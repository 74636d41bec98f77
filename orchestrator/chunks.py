"""The format of a chunk of trajectories: index, token arrays, raw answers. Bytes in, bytes out; no files here.

Arrays of all segments lie end to end: `tokens`, `loss_mask`, `rollout_log_probs`, `turn_ids`, each [total tokens].
Routed experts, which differ in shape, are tensors of their own: `routed.<segment number in the chunk>` [T-1, L, K].
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from stages.domain import (
    Boundary,
    CheckResult,
    CheckRole,
    CheckStatus,
    EndReason,
    Segment,
    Stratum,
    Trajectory,
    Turn,
    Verdict,
)
from stages.errors import StoreError

FORMAT = 1
COLUMNS = {"tokens": np.int32, "loss_mask": np.bool_, "rollout_log_probs": np.float32, "turn_ids": np.int32}
DTYPES = {"I32": np.int32, "BOOL": np.bool_, "F32": np.float32}  # safetensors' names
ROUTED = "rollout_routed_experts"
ENUMS = {"stratum": Stratum, "end_reason": EndReason, "verdict": Verdict}
NESTED = {"turns", "segments", "checks", "boundaries", "flags", "raw_answers"}
SCALARS = [f.name for f in fields(Trajectory) if f.name not in NESTED]
Arrays = Mapping[int, Mapping[str, Any]]  # segment number in the chunk -> its arrays


def pack_arrays(trajectories: Sequence[Trajectory]) -> bytes:
    """Token arrays of all segments as one safetensors file.

    Raises:
        StoreError: arrays of a segment differ in length.
    """
    segments = [(t.id, s) for t in trajectories for s in t.segments]
    for owner, segment in segments:
        lengths = {name: len(getattr(segment, name)) for name in COLUMNS}
        if len(set(lengths.values())) > 1:
            raise StoreError(f"A segment of the trajectory {owner} has arrays of different lengths: {lengths}.")
    tensors = {
        name: np.concatenate([np.asarray(getattr(s, name), dtype) for _, s in segments] or [np.empty(0, dtype)])
        for name, dtype in COLUMNS.items()
    }
    for number, (_, segment) in enumerate(segments):
        if segment.rollout_routed_experts is not None:
            tensors[f"routed.{number}"] = np.ascontiguousarray(segment.rollout_routed_experts, np.int32)
    return save(tensors)


def pack_answers(trajectories: Sequence[Trajectory]) -> bytes:
    """Raw sampler answers: one line per trajectory, in order."""
    return _gzip("\n".join(json.dumps(list(t.raw_answers)) for t in trajectories))


def pack_index(trajectories: Sequence[Trajectory], *, tokens: str, answers: str) -> bytes:
    """Everything else, with the keys of the two other files."""
    return _gzip(
        json.dumps(
            {
                "format": FORMAT,
                "tokens": tokens,
                "answers": answers,
                "turn_fields": _names(Turn),
                "check_fields": _names(CheckResult),
                "trajectories": [_encode(t) for t in trajectories],
            }
        )
    )


@dataclass(frozen=True, slots=True)
class Index:
    """A read index. Trajectories are named by their number in the chunk."""

    tokens: str
    answers: str
    turn_fields: list[str]
    check_fields: list[str]
    entries: list[dict[str, Any]]
    first_segment: list[int]  # per trajectory: number of its first segment
    offsets: list[int]  # per segment, and the end: position of its first token

    @classmethod
    def read(cls, data: bytes) -> Index:
        body = json.loads(gzip.decompress(data))
        if body["format"] != FORMAT:
            raise StoreError(
                f"The chunk has format {body['format']}; this version reads {FORMAT}. Install a newer one."
            )
        first, offsets = [0], [0]
        for entry in body["trajectories"]:
            first.append(first[-1] + len(entry["segments"]))
            for segment in entry["segments"]:
                offsets.append(offsets[-1] + segment["n"])
        return cls(
            tokens=body["tokens"],
            answers=body["answers"],
            turn_fields=body["turn_fields"],
            check_fields=body["check_fields"],
            entries=body["trajectories"],
            first_segment=first,
            offsets=offsets,
        )

    def select(self, key: str, ids: Collection[str] | None) -> list[int]:
        if ids is None:
            return list(range(len(self.entries)))
        found = {entry["id"]: number for number, entry in enumerate(self.entries)}
        if missing := set(ids) - set(found):
            raise StoreError(f"The chunk {key} does not hold the trajectories {sorted(missing)}.")
        return sorted(found[i] for i in set(ids))

    def spans(self, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Segment number -> its first token and one past its last."""
        wanted = (s for n in numbers for s in range(self.first_segment[n], self.first_segment[n + 1]))
        return {s: (self.offsets[s], self.offsets[s + 1]) for s in wanted}

    def build(self, number: int, arrays: Arrays, answers: Mapping[int, Sequence[str]]) -> Trajectory:
        entry = self.entries[number]
        values = {name: entry[name] for name in SCALARS if name in entry}  # absent: written before the field existed
        values |= {name: enum(values[name]) for name, enum in ENUMS.items()}
        segments = tuple(
            Segment(
                kind=s["kind"], weight_versions=tuple(s["weight_versions"]), **arrays[self.first_segment[number] + i]
            )
            for i, s in enumerate(entry["segments"])
        )
        checks = (dict(zip(self.check_fields, row, strict=True)) for row in entry["checks"])
        return Trajectory(
            **values,
            turns=tuple(Turn(**dict(zip(self.turn_fields, row, strict=True))) for row in entry["turns"]),
            segments=segments,
            checks=tuple(
                CheckResult(**(c | {"role": CheckRole(c["role"]), "status": CheckStatus(c["status"])})) for c in checks
            ),
            boundaries={Boundary(name): count for name, count in entry["boundaries"].items()},
            flags=tuple(entry["flags"]),
            raw_answers=tuple(answers[number]),
        )


def read_arrays(data: bytes, spans: Mapping[int, tuple[int, int]]) -> Arrays:
    """Slice a whole token file."""
    tensors = load(data)
    return {
        s: {name: tensors[name][a:b] for name in COLUMNS} | {ROUTED: tensors.get(f"routed.{s}")}
        for s, (a, b) in spans.items()
    }


def read_slices(read: Callable[[int, int], bytes], spans: Mapping[int, tuple[int, int]]) -> Arrays:
    """Read only the given segments of a token file. `read(start, end)` gives bytes of it."""
    head = 8 + int.from_bytes(read(0, 8), "little")  # safetensors: u64 length of a JSON header, then the tensors
    header = json.loads(read(8, head))

    def part(name: str, a: int, b: int, shape: Sequence[int]) -> np.ndarray:
        dtype = np.dtype(DTYPES[header[name]["dtype"]])
        start = head + header[name]["data_offsets"][0]
        data = read(start + a * dtype.itemsize, start + b * dtype.itemsize) if b > a else b""
        return np.frombuffer(data, dtype).reshape(shape)

    result: dict[int, dict[str, Any]] = {}
    for s, (a, b) in spans.items():
        result[s] = {name: part(name, a, b, [b - a]) for name in COLUMNS}
        shape = header.get(f"routed.{s}", {}).get("shape")
        result[s][ROUTED] = part(f"routed.{s}", 0, int(np.prod(shape)), shape) if shape else None
    return result


def read_answers(data: bytes, numbers: Sequence[int]) -> dict[int, list[str]]:
    lines = gzip.decompress(data).split(b"\n")
    return {n: json.loads(lines[n]) for n in numbers}


def _encode(t: Trajectory) -> dict[str, Any]:
    return {
        **{name: getattr(t, name) for name in SCALARS},
        "turns": [[getattr(turn, name) for name in _names(Turn)] for turn in t.turns],
        "segments": [
            {"n": len(s.tokens), "kind": s.kind, "weight_versions": list(s.weight_versions)} for s in t.segments
        ],
        "checks": [[getattr(check, name) for name in _names(CheckResult)] for check in t.checks],
        "boundaries": dict(t.boundaries),
        "flags": list(t.flags),
    }


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def _gzip(text: str) -> bytes:
    # Fixed time stamp: equal content has an equal key. `json.dumps` escapes lone surrogates, so ASCII is enough.
    return gzip.compress(text.encode("ascii"), compresslevel=3, mtime=0)
