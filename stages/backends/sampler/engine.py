"""A Qwen3 decoder (dense or mixture of experts) for sampling: fused projections, a cache that survives turns.

Shapes: N packed tokens, B rows of a block, C new columns of a row, E embedding, H query heads, G key/value heads,
R = H/G, D head size, T cached positions, V vocabulary, K experts per token.

Prompts are computed *packed*: matrix products see only real tokens, and only attention uses a padded [B, C] layout. Rotary
embedding is one complex product, because the projections were permuted at load. In the last dense layer only the last
token of a row has a query. A wave is decoded in blocks of rows: large ones, because the long tail of the last unfinished
rows costs a block as much as its middle (measured: 240 rows in one block take 30 % less time than in blocks of 64).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from stages.backends.sampler.cache import SlotCache
from stages.backends.sampler.pool import CachePool
from stages.backends.sampler.weights import Experts, Layer, Mlp, Qwen3Weights

ROWS_PER_BLOCK = 256
PREFILL_TOKENS = 2048  # packed tokens of one pass


@dataclass(slots=True, kw_only=True)
class Block:
    """Rows that are decoded together."""

    order: np.ndarray  # int64 [B], request index of every row
    prompts: list[np.ndarray]  # B of int64 [T]
    cached: list[int]  # prompt tokens of every row that need no computation
    cache: SlotCache | None = None  # None: a decoder without one
    slot: int = 0  # first slot; the rows lie in consecutive slots
    twins: dict[int, list[int]] = field(default_factory=dict)  # row -> rows with the very same new prompt


class CachedDecoder:
    """See `Decoder` in wave.py for the contract."""

    def __init__(
        self, weights: Qwen3Weights, *, context_len: int, max_slots: int, rows_per_block: int = ROWS_PER_BLOCK
    ) -> None:
        self.context_len = context_len
        self.max_slots = max_slots
        self.rows_per_block = rows_per_block
        self.load(weights)

    def load(self, weights: Qwen3Weights) -> None:
        """New weights; every cache is dropped."""
        self.weights = w = weights
        self.vocab_size = w.vocab_size
        self.device = w.embedding.device
        self.routed_shape = (len(w.layers), w.experts_per_token) if w.experts_per_token else None
        frequency = w.rope_theta ** -(
            torch.arange(0, w.head_dim, 2, dtype=torch.float32, device=self.device) / w.head_dim
        )
        angle = torch.outer(torch.arange(self.context_len, dtype=torch.float32, device=self.device), frequency)
        self._eps = torch.tensor(w.eps, device=self.device)
        self._turn = torch.polar(torch.ones_like(angle), angle)  # complex64 [T, D/2]
        self.pool = CachePool(self._new_cache, max_slots=self.max_slots)

    def _new_cache(self) -> SlotCache:
        w = self.weights
        return SlotCache(
            layers=len(w.layers),
            heads=w.kv_heads,
            head_dim=w.head_dim,
            experts_per_token=w.experts_per_token,
            dtype=w.embedding.dtype,
            device=self.device,
        )

    # ------------------------------------------------------------------ a wave

    def open(self, rids: Sequence[str], prompts: Sequence[np.ndarray], room: int) -> list[Block]:
        """Give every request a slot and cut the wave into blocks, longest new prompts first.

        `room` is the number of new tokens to come; up to 256 of them are reserved at once.

        A cache is kept up to the longest common prefix with the new prompt; the last prompt token is always computed.
        """
        by_length = sorted(range(len(rids)), key=lambda i: -len(prompts[i]))
        cache = self.pool.group(rids)
        slots = cache.arrange([rids[i] for i in by_length])
        order = np.array([by_length[s] for s in slots], dtype=np.int64)
        cache.reserve(max(len(p) for p in prompts) + min(room, 256))
        blocks = []
        for lo in range(0, len(order), self.rows_per_block):
            rows = order[lo : lo + self.rows_per_block]
            block = Block(order=rows, prompts=[prompts[i] for i in rows], cached=[], cache=cache, slot=lo)
            for i in rows:
                block.cached.append(_common_prefix(cache.cached_ids(rids[i]), prompts[i][:-1]))
            self._find_twins(block)
            blocks.append(block)
        return blocks

    @torch.inference_mode()
    def prefill(self, block: Block) -> torch.Tensor:
        """Compute what is not cached; returns the logits after every prompt, float [B, V]."""
        twin_of = {t: row for row, twins in block.twins.items() for t in twins}
        todo = [(r, block.cached[r], len(p)) for r, p in enumerate(block.prompts) if r not in twin_of]
        last = torch.empty(len(block.prompts), self.weights.embedding.shape[1], dtype=self.weights.embedding.dtype)
        last = last.to(self.device)
        for piece in _passes(todo):
            rows, hidden = self._prefill_pass(block, piece)
            last[rows] = hidden
        for row, twins in block.twins.items():
            _cache(block).copy(block.slot + row, [block.slot + t for t in twins], len(block.prompts[row]))
            last[twins] = last[row].clone()
            for t in twins:
                block.cached[t] = len(block.prompts[t]) - 1
        return self._logits(last)

    @torch.inference_mode()
    def step(self, block: Block, ids_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Feed one token to every row of the block; returns the next logits, float [B, V]."""
        w, cache = self.weights, _cache(block)
        rows = len(block.order)
        top = int(positions_B.max()) + 1
        cache.reserve(top)
        slots = slice(block.slot, block.slot + rows)
        at = torch.arange(rows, device=self.device)
        blocked = torch.arange(top, device=self.device) > positions_B[:, None]
        mask = torch.zeros(rows, 1, 1, top, dtype=w.embedding.dtype, device=self.device)
        mask.masked_fill_(blocked[:, None, None], -torch.inf)
        turn = self._turn[positions_B][:, None]
        x = w.embedding[ids_B]
        for i, layer in enumerate(w.layers):
            q, k, v = self._qkv(layer, x, turn)
            keys, values = cache.keys[i, slots], cache.values[i, slots]
            keys[at, :, positions_B] = k
            values[at, :, positions_B] = v
            x = torch.addmm(x, self._attend_last(q, keys[:, :, :top], values[:, :, :top], mask), layer.out)
            x, experts = self._mlp(layer, x)
            if cache.routes is not None and experts is not None:
                cache.routes[i, slots][at, 0, positions_B] = experts
        return self._logits(x)

    def compact(self, block: Block, alive_B: np.ndarray, used: int) -> np.ndarray:
        """Drop finished rows; returns which of the old rows the new rows are, int64 [B']. `used` positions are in use."""
        count = int(alive_B.sum())
        order = np.arange(len(alive_B))
        dead = np.flatnonzero(~alive_B[:count])
        movers = count + np.flatnonzero(alive_B[count:])
        _cache(block).compact((block.slot + movers).tolist(), (block.slot + dead).tolist(), used)
        order[dead] = movers
        order = order[:count]
        block.order = block.order[order]
        return order

    def close(self, rid: str, ids: np.ndarray) -> None:
        """The slot of `rid` holds keys of exactly `ids`, int64 [T]."""
        self.pool.of(rid).record(rid, ids)

    def routed_experts(self, rid: str, start: int, end: int) -> np.ndarray | None:
        """Experts chosen at positions [start, end), int32 [end - start, L, K]; None for a dense model."""
        cache = self.pool.of(rid)
        if cache.routes is None:
            return None
        return cache.routes[:, cache.slot(rid), 0, start:end].transpose(0, 1).cpu().numpy().copy()

    def release(self, rids: Sequence[str]) -> None:
        self.pool.release(rids)

    # ------------------------------------------------------------------ one pass over prompts

    def _find_twins(self, block: Block) -> None:
        """Attempts at one task share their first prompt: compute it once."""
        first: dict[bytes, int] = {}
        for row, prompt in enumerate(block.prompts):
            if block.cached[row] == 0:
                leader = first.setdefault(prompt.tobytes(), row)
                if leader != row:
                    block.twins.setdefault(leader, []).append(row)

    def _prefill_pass(self, block: Block, piece: list[tuple[int, int, int]]) -> tuple[list[int], torch.Tensor]:
        """Columns [start, end) of some rows; returns the rows and the hidden state of their last column, [rows, E]."""
        w, cache, device = self.weights, _cache(block), self.device
        rows = [r for r, _, _ in piece]
        counts = np.array([end - start for _, start, end in piece])
        width = int(counts.max())
        top = max(end for _, _, end in piece)
        fresh = all(start == 0 for _, start, _ in piece)
        row_N = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device)
        column = np.concatenate([np.arange(c) for c in counts])
        column_N = torch.from_numpy(column).to(device)
        pos_N = torch.from_numpy(column + np.repeat([start for _, start, _ in piece], counts)).to(device)
        ids_N = torch.from_numpy(np.concatenate([block.prompts[r][a:b] for r, a, b in piece])).to(device)
        slots = torch.tensor([block.slot + r for r in rows], device=device)
        slot_N = slots[row_N]
        view = slice(block.slot + rows[0], block.slot + rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else slots
        last = torch.from_numpy(np.cumsum(counts) - 1).to(device)
        full = bool((counts == width).all())
        mask = None if fresh else self._mask(piece, width, top)
        last_mask = self._mask([(r, end - 1, end) for r, _, end in piece], 1, top)
        turn = self._turn[pos_N][:, None]
        x = w.embedding[ids_N]

        def pad(t: torch.Tensor) -> torch.Tensor:  # [N, heads, D] -> [rows, heads, C, D]
            if full:
                return t.view(len(rows), width, *t.shape[1:]).transpose(1, 2)
            padded = t.new_empty(len(rows), width, *t.shape[1:])
            padded[row_N, column_N] = t
            return padded.transpose(1, 2)

        for i, layer in enumerate(w.layers):
            q, k, v = self._qkv(layer, x, turn)
            cache.keys[i][slot_N, :, pos_N] = k
            cache.values[i][slot_N, :, pos_N] = v
            keys, values = cache.keys[i][view][:, :, :top], cache.values[i][view][:, :, :top]
            if i + 1 == len(w.layers) and isinstance(layer.mlp, Mlp):
                x = torch.addmm(x[last], self._attend_last(q[last], keys, values, last_mask), layer.out)
                return rows, self._mlp(layer, x)[0]
            a = F.scaled_dot_product_attention(
                pad(q), keys, values, attn_mask=mask, is_causal=fresh, scale=1.0, enable_gqa=w.query_heads != w.kv_heads
            )
            a = a.transpose(1, 2).reshape(len(rows), width, -1)
            a = a.view(-1, a.shape[-1]) if full else a[row_N, column_N]
            x, experts = self._mlp(layer, torch.addmm(x, a, layer.out))
            if cache.routes is not None and experts is not None:
                cache.routes[i][slot_N, 0, pos_N] = experts
        return rows, x[last]

    def _mask(self, piece: list[tuple[int, int, int]], width: int, top: int) -> torch.Tensor:
        """Additive causal mask [rows, 1, C, T]: a column sees the positions up to its own."""
        starts = torch.tensor([start for _, start, _ in piece], device=self.device)
        own = starts[:, None] + torch.arange(width, device=self.device)
        blocked = torch.arange(top, device=self.device) > own[:, :, None]
        mask = torch.zeros(len(piece), 1, width, top, dtype=self.weights.embedding.dtype, device=self.device)
        return mask.masked_fill_(blocked[:, None], -torch.inf)

    # ------------------------------------------------------------------ layers

    def _qkv(
        self, layer: Layer, x_NE: torch.Tensor, turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised and rotated q [N, H, D], k [N, G, D]; v [N, G, D]."""
        w = self.weights
        heads = (self._norm(x_NE) @ layer.qkv).view(len(x_NE), -1, w.head_dim)
        qk = self._norm(heads[:, : w.query_heads + w.kv_heads]) * layer.qk_norm
        pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
        qk = torch.view_as_real(pairs * turn).flatten(-2).to(x_NE.dtype)
        return qk[:, : w.query_heads], qk[:, w.query_heads :], heads[:, w.query_heads + w.kv_heads :]

    def _attend_last(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """One query a row: q [B, H, D], keys and values [B, G, T, D], mask [B, 1, 1, T]; returns [B, H D].

        The R heads of a group are the rows of one small product, so no key is repeated or read twice.
        """
        groups = q.view(len(q), self.weights.kv_heads, -1, q.shape[-1])
        scores = (groups @ keys.transpose(-1, -2)).add_(mask)
        return (scores.softmax(-1) @ values).view(len(q), -1)

    def _mlp(self, layer: Layer, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x + MLP(norm(x)), and the experts chosen, int32 [N, K], best first (as SGLang orders them)."""
        h = self._norm(x_NE)
        mlp = layer.mlp
        if isinstance(mlp, Mlp):
            gate, up = (h @ mlp.gate_up).chunk(2, -1)
            return torch.addmm(x_NE, F.silu(gate).mul_(up), mlp.down), None
        return self._route(mlp, x_NE, h)

    def _route(self, mlp: Experts, x_NE: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.softmax(h @ mlp.router, -1, dtype=torch.float32)
        weight, chosen = probs.topk(mlp.top_k, -1)
        if mlp.normalise:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight.to(h.dtype)
        out = x_NE.clone()
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (h[token] @ mlp.gate_up[expert]).chunk(2, -1)
            out.index_add_(0, token, (F.silu(gate) * up) @ mlp.down[expert] * weight[token, rank, None])
        return out, chosen.to(torch.int32)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm without its gain, which is folded into the next projection."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()).to(x.dtype)

    def _logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        return (self._norm(x_BE) @ self.weights.head).float()


def _cache(block: Block) -> SlotCache:
    assert block.cache is not None, "a block of another decoder"
    return block.cache


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _passes(todo: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Group rows (row, start, end) into passes of at most PREFILL_TOKENS tokens; a longer row is cut into several."""
    group: list[tuple[int, int, int]] = []
    size = 0
    for row, start, end in todo:
        while end - start > PREFILL_TOKENS:
            if group:
                yield group
                group, size = [], 0
            yield [(row, start, start + PREFILL_TOKENS)]
            start += PREFILL_TOKENS
        if group and size + end - start > PREFILL_TOKENS:
            yield group
            group, size = [], 0
        group.append((row, start, end))
        size += end - start
    if group:
        yield group
