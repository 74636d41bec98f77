"""Commands and answers as bytes: a JSON header and safetensors. Broadcast between ranks, framed on a socket. No pickles."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from stages import errors
from stages.backends.protocols import OptimConfig, TrainSequence

ARRAYS = tuple(f.name for f in dataclasses.fields(TrainSequence))


def encode(name: str, kwargs: Mapping[str, Any]) -> bytes:
    """One command."""
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
    return _joined({"name": name, "kwargs": plain}, arrays)


def decode(data: bytes) -> tuple[str, dict[str, Any]]:
    header, arrays = _parted(data)
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


def encode_answer(value: Any) -> bytes:
    """What a learner's method returned: None, metrics, digests, or one array per sequence."""
    if isinstance(value, list):
        return _joined({"arrays": len(value)}, {str(i): np.ascontiguousarray(a) for i, a in enumerate(value)})
    return _joined({"value": list(value) if isinstance(value, tuple) else value, "tuple": isinstance(value, tuple)}, {})


def encode_error(error: BaseException, *, ours: bool) -> bytes:
    """`ours`: one of `stages.errors`, after which the learner lives on."""
    kinds = [c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__ or not ours]
    return _joined({"error": kinds[0], "message": str(error), "ours": ours}, {})


def decode_answer(data: bytes) -> Any:
    """The value. Raises the error that was sent, as the class of `stages.errors` that it was."""
    header, arrays = _parted(data)
    if "error" in header:
        kind, message = header["error"], header["message"]
        if header["ours"]:
            raise getattr(errors, kind, errors.LearnerError)(message)
        raise errors.LearnerError(f"{kind}: {message}")
    if "arrays" in header:
        return [arrays[str(i)] for i in range(header["arrays"])]
    return tuple(header["value"]) if header["tuple"] else header["value"]


def _joined(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """8 bytes of header length, the header, the arrays."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + (save(arrays) if arrays else b"")


def _parted(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), load(data[8 + size :]) if len(data) > 8 + size else {}


# --------------------------------------------------------------------------- on a socket


def put(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(8, "little") + data)


def take(of: socket.socket) -> bytes | None:
    """One frame; None when the other side is gone."""
    size = _exactly(of, 8)
    return None if size is None else _exactly(of, int.from_bytes(size, "little"))


def _exactly(of: socket.socket, n: int) -> bytes | None:
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = of.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(data)


# --------------------------------------------------------------------------- between ranks


def send(data: bytes, device: torch.device) -> None:
    dist.broadcast(torch.tensor([len(data)], dtype=torch.int64, device=device), src=0)
    dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), src=0)


def receive(device: torch.device) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return data.cpu().numpy().tobytes()
