"""Runs megatron-core on CPU and gloo by presenting the CPU as "the current CUDA device".

A no-op where CUDA exists, so the same learner runs on both. Process-global: a process that installs it is a learner
process and nothing else. Call `install()` before anything imports `megatron.core`. Written for 0.16.1.

What it cannot stand in for: Transformer Engine kernels, NCCL, grouped GEMM, communication overlap.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


class _CudaNamesMeanCpu(TorchFunctionMode):
    """`device="cuda"`, `.cuda()`, `.to("cuda")` and the type names that optimisers compare."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def install() -> None:
    """Idempotent; does nothing where a CUDA device is visible."""
    global _mode
    if torch.cuda.is_available() or _mode is not None:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # core's jit_fuser is torch.compile
    from torch import _dynamo

    setattr(_dynamo.config, "disable", True)  # noqa: B010
    _patch_torch_cuda()
    _mode = _CudaNamesMeanCpu()
    _mode.__enter__()
    _patch_core()


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *_: None
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.memory_allocated = cuda.memory_reserved = cuda.max_memory_allocated = lambda *_: 0
    cuda.get_device_capability = lambda *_: (0, 0)


def _patch_core() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    rng: Any = random  # its helpers call torch's C bindings, below torch.cuda
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # core turns all-to-all splits into numpy only when the tensor is a CUDA one
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    setattr(dispatcher, "maybe_move_tensor_to_cpu", to_cpu)  # noqa: B010
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1: the name is undefined without Transformer Engine
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010
