"""The two operators that a mixture of experts and seeded sampling need on a CPU, in torch and numpy."""

import numpy as np
import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)"
)
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def topk_softmax(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate weights float32 [T, K] and experts int32 [T, K]; a correction bias chooses, and does not weigh."""
    scores = torch.softmax(gating_output.float(), dim=-1)
    ids = torch.topk(scores if correction_bias is None else scores + correction_bias, topk, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.float(), ids.to(torch.int32)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of (seed, position, column): uint32 [rows, columns], from which the noise is drawn.

    SGLang compiles the caller: constants are local, for the compiler cannot guard numpy scalars of a module.
    """
    low = np.uint64(0xFFFFFFFF)
    seeds = _words(seed.view(torch.int64)).reshape(-1, 1)
    at = _words(positions.to(torch.int64)).reshape(-1, 1) & low
    columns = _words(col_indices.to(torch.int64)).reshape(1, -1) & low
    found = np.zeros((seeds.shape[0], columns.shape[1]), dtype=np.uint64)
    for word in (seeds & low, (seeds >> np.uint64(32)) & low, at, columns):
        found = _mixed(found, word)
    found = found ^ np.uint64(16)  # bytes that went in
    found = found ^ (found >> np.uint64(16))
    found = (found * np.uint64(0x85EBCA6B)) & low
    found = found ^ (found >> np.uint64(13))
    found = (found * np.uint64(0xC2B2AE35)) & low
    found = found ^ (found >> np.uint64(16))
    return torch.from_numpy(found.astype(np.uint32))


def _words(numbers: torch.Tensor) -> np.ndarray:
    return numbers.numpy().view(np.uint64)


def _mixed(found: np.ndarray, word: np.ndarray) -> np.ndarray:
    low = np.uint64(0xFFFFFFFF)
    word = (word * np.uint64(0xCC9E2D51)) & low
    word = ((word << np.uint64(15)) | (word >> np.uint64(17))) & low
    word = (word * np.uint64(0x1B873593)) & low
    found = found ^ word
    found = ((found << np.uint64(13)) | (found >> np.uint64(19))) & low
    return (found * np.uint64(5) + np.uint64(0xE6546B64)) & low


class _NoCudart:
    """The capture of routed experts registers its host buffer with CUDA; there is none."""

    def cudaHostRegister(self, *args: object) -> int:
        return 0

    def cudaHostUnregister(self, *args: object) -> int:
        return 0


_library.impl("topk_softmax_cpu", topk_softmax, "CPU")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
if not torch.version.cuda:
    torch.cuda.cudart = _NoCudart
