"""TB-GAE over turns against a masked loop over tokens and a chunked scan over tokens.

    python benchmarks/advantage.py            # 32 × 65,536 and 256 × 131,072 tokens, 20 % of them sampled
    python benchmarks/advantage.py --small    # 4 × 8,192, a few seconds, for a quick check

Both rivals are written here from their definition: the masked loop walks the tokens backwards, all rows at once, and
skips observation tokens (as verl does); the chunked scan multiplies chunks of 128 tokens with a triangular matrix and
carries a state between chunks (as slime does). At γ = λ = 1 all three define the same advantage of a sampled token
(spec §3.2), so there they must agree to 1e-9. All return dense [B, T] float64 advantages and value targets; ours writes
to buffers that are kept from step to step, as a learner would, and finds the turns in dense ids each time. One thread
each; CPU seconds count, so that a busy machine changes little. Exits with 1 when a claim of the table does not hold.

Shapes: B trajectories, T tokens.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from stages.advantage_batch import turn_boundary_gae_batch

CHUNK_TOKENS = 128


def masked_loop(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token GAE over sampled tokens, one Python step per token."""
    next_value = torch.zeros(len(values_BT), dtype=values_BT.dtype)
    last = torch.zeros_like(next_value)
    reversed_advantages = []
    for t in reversed(range(values_BT.shape[1])):
        mask = mask_BT[:, t]
        delta = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        candidate = delta + gamma * lam * last
        next_value = values_BT[:, t] * mask + (1 - mask) * next_value
        last = candidate * mask + (1 - mask) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values_BT


def chunked_scan(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token GAE over all tokens: a triangular product inside each chunk, a carried state between chunks."""
    b, t = values_BT.shape
    following = torch.cat([values_BT[:, 1:], torch.zeros(b, 1, dtype=values_BT.dtype)], dim=1)
    backwards = torch.flip(rewards_BT + gamma * following - values_BT, dims=[1])
    backwards = torch.nn.functional.pad(backwards, (0, -t % CHUNK_TOKENS)).view(b, -1, CHUNK_TOKENS)
    steps = torch.arange(CHUNK_TOKENS)
    gap = steps[None, :] - steps[:, None]
    weight = float(gamma * lam)
    triangle = torch.where(gap >= 0, weight ** gap.clamp(min=0).double(), 0.0)
    out = backwards @ triangle
    decay = weight ** (steps + 1).double()
    state = torch.zeros(b, dtype=values_BT.dtype)
    for chunk in range(out.shape[1]):
        out[:, chunk] += state[:, None] * decay
        state = out[:, chunk, -1]
    advantages = torch.flip(out.reshape(b, -1)[:, :t], dims=[1])
    return advantages, advantages + values_BT


def batch(b: int, t: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """values [B, T], turn ids [B, T] (−1 outside sampled tokens, 20 % are sampled) and terminal rewards [B]."""
    rng = np.random.default_rng(seed)
    turn_ids = np.full((b, t), -1, dtype=np.int32)
    for row in range(b):
        at = turn = 0
        while at < t:
            sampled = int(rng.integers(60, 460))
            turn_ids[row, at : at + sampled] = turn
            at += sampled + int(rng.integers(240, 1840))
            turn += 1
    return rng.normal(size=(b, t)), turn_ids, rng.normal(size=b)


def best_of(runs: int, work: Callable[[], object]) -> tuple[float, float, object]:
    """(CPU seconds and wall seconds of the fastest run, its result)"""
    cpu, wall, result = float("inf"), float("inf"), None
    for _ in range(runs):
        result = None  # the last result is freed before the next is made
        start, start_cpu = time.perf_counter(), time.process_time()
        result = work()
        cpu = min(cpu, time.process_time() - start_cpu)
        wall = min(wall, time.perf_counter() - start)
    return cpu, wall, result


def measure(b: int, t: int, runs: int) -> bool:
    values, turn_ids, rewards = batch(b, t, seed=0)
    node = turn_ids >= 0
    last = t - 1 - np.argmax(node[:, ::-1], axis=1)
    dense = np.zeros((b, t))
    dense[np.arange(b), last] = rewards
    rewards_t, values_t, mask_t = torch.from_numpy(dense), torch.from_numpy(values), torch.from_numpy(node).double()
    # Token GAE over all tokens ends at the last sampled one; what follows is not part of the response.
    after = np.arange(t)[None, :] > last[:, None]
    values_all_t = torch.from_numpy(np.where(after, 0.0, values))

    kept = np.zeros((b, t)), np.zeros((b, t))

    def ours(lam: float) -> tuple[np.ndarray, np.ndarray]:
        got = turn_boundary_gae_batch(values, turn_ids, rewards, 1.0, lam, out=kept[0])
        return got.advantages, got.value_targets(kept[1])

    cpu, wall, _ = best_of(runs, lambda: ours(0.95))
    at_one = ours(1.0)
    print(f"{b} x {t:,} tokens, {node.mean():.1%} sampled, {int((turn_ids.max(axis=1) + 1).sum()):,} turns")
    print(
        f"  turn-boundary GAE {1e3 * cpu:9.1f} ms CPU {1e3 * wall:9.1f} ms wall   {b * t / cpu / 1e6:5.0f} M tokens/s"
    )
    held = True
    for name, wanted, times, work in (
        ("chunked scan", 3.0, 2, lambda: chunked_scan(rewards_t, values_all_t, 1.0, 1.0)),
        ("masked loop", 100.0, 1, lambda: masked_loop(rewards_t, values_t, mask_t, 1.0, 1.0)),
    ):
        their_cpu, their_wall, result = best_of(times, work)
        gap = _largest_gap(at_one, result, node)
        ok = their_cpu >= wanted * cpu and gap <= 1e-9
        held = held and ok
        print(
            f"  {name:17s} {1e3 * their_cpu:9.1f} ms CPU {1e3 * their_wall:9.1f} ms wall   "
            f"{their_cpu / cpu:5.0f} times (>= {wanted:g})   largest gap {gap:.1e}   {'ok' if ok else 'FAILED'}"
        )
        del result
    return held


def _largest_gap(ours: object, theirs: object, node: np.ndarray) -> float:
    """Largest absolute difference of advantages and value targets over sampled tokens."""
    gap = 0.0
    for mine, other in zip(ours, theirs, strict=True):  # type: ignore[call-overload]
        for row in range(len(node)):
            at = node[row]
            gap = max(gap, float(np.abs(mine[row][at] - other[row].numpy()[at]).max()))
    return gap


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="4 x 8,192 tokens only; its ratios are not checked")
    parser.add_argument("--runs", type=int, default=7, help="runs of the fast ones; the best counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, torch threads {torch.get_num_threads()}, numpy {np.__version__}, torch {torch.__version__}"
    )
    if args.small:
        measure(4, 8192, args.runs)
        return 0
    held = [measure(b, t, args.runs) for b, t in ((32, 65_536), (256, 131_072))]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
