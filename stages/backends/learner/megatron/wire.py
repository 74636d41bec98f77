"""Commands from rank 0 to its followers: a JSON header and safetensors bytes, broadcast. No pickles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from stages.backends.protocols import OptimConfig, TrainSequence

ARRAYS = tuple(f.name for f in dataclasses.fields(TrainSequence))


def encode(name: str, kwargs: Mapping[str, Any]) -> bytes:
    """One command: 8 bytes of header length, the header, the arrays."""
    arrays: dict[str, np.ndarray] = {}
    plain: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key == "batch":
            plain[key] = {"sequences": len(value)}
            for i, seq in enumerate(value):
                found = {n: getattr(seq, n) for n in ARRAYS}
                arrays |= {f"{i}.{n}": np.ascontiguousarray(a) for n, a in found.items() if a is not None}
        elif isinstance(value, Path):
            plain[key] = {"path": str(value)}
        elif isinstance(value, OptimConfig):
            plain[key] = {"optim": dataclasses.asdict(value)}
        else:
            plain[key] = {"value": value}
    header = json.dumps({"name": name, "kwargs": plain}).encode()
    return len(header).to_bytes(8, "little") + header + (save(arrays) if arrays else b"")


def decode(data: bytes) -> tuple[str, dict[str, Any]]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    arrays = load(data[8 + size :]) if len(data) > 8 + size else {}
    kwargs: dict[str, Any] = {}
    for key, value in header["kwargs"].items():
        if "sequences" in value:
            each = [{n: arrays[f"{i}.{n}"] for n in ARRAYS if f"{i}.{n}" in arrays} for i in range(value["sequences"])]
            kwargs[key] = [TrainSequence(**one) for one in each]
        elif "path" in value:
            kwargs[key] = Path(value["path"])
        elif "optim" in value:
            kwargs[key] = OptimConfig(**{**value["optim"], "betas": tuple(value["optim"]["betas"])})
        else:
            kwargs[key] = value["value"]
    return header["name"], kwargs


def send(data: bytes, device: torch.device) -> None:
    dist.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=device), src=0)
    dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), src=0)


def receive(device: torch.device) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return data.cpu().numpy().tobytes()
