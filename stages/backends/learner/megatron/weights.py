"""Weights between Hugging Face folders (Qwen3 dense and MoE) and this rank's Megatron parameters, both ways.

A `Piece` says which Hugging Face tensors make one Megatron parameter and how tensor parallelism cuts it. Loading and
exporting walk the same list. Shapes in comments are [out, in] as torch's Linear has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from torch import nn

from stages.backends.learner.megatron.modules import Backbone
from stages.errors import ModelError

Tensors = list[torch.Tensor]
VOCAB_MULTIPLE = 128  # every tensor-parallel size must divide it


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Megatron parameter of this rank and the Hugging Face tensors that it holds."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    join: Callable[[Tensors], torch.Tensor]  # Hugging Face tensors -> whole Megatron tensor
    split: Callable[[torch.Tensor], Tensors]  # ... and back
    dim: int | None = None  # cut by tensor parallelism along it
    halves: bool = False  # gate and up projections lie one above the other in every rank's cut
    expert: bool = False


class Reader:
    """Tensors of some files by name, whichever holds them. Raises ModelError that names the missing tensor."""

    def __init__(self, files: Sequence[Path], *, prefix: str, stem: str = "") -> None:
        """`prefix`: "model." for an actor's files, "body." for a critic's; `stem`: what stands before every name."""
        self.place, self.prefix, self.stem = files[0].parent if files else Path(), prefix, stem
        self._stack = ExitStack()
        self._where = {}
        for path in files:
            f = self._stack.enter_context(safe_open(path, "pt"))
            self._where.update(dict.fromkeys(f.keys(), f))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, name: str) -> torch.Tensor:
        f, key = self._find(name)
        return f.get_tensor(key)

    def outline(self, name: str) -> torch.Tensor:
        """The tensor's shape, without its contents."""
        f, key = self._find(name)
        return torch.empty(f.get_slice(key).get_shape(), device="meta")

    def _find(self, name: str) -> tuple[Any, str]:
        key = self.stem + named(name, self.prefix)
        if key not in self._where:
            raise ModelError(f"{self.place} lacks the tensor {key}: it is another architecture than its config says")
        return self._where[key], key


def named(name: str, prefix: str) -> str:
    """A Hugging Face name in an actor's ("model.") or a critic's ("body.") folder."""
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def pieces(model: Backbone, *, vocab_size: int) -> Iterator[Piece]:
    """Every parameter of this pipeline stage, in an order that all ranks of a tensor-parallel group share.

    Raises ModelError for a parameter that no rule covers, so that no weight is ever left at its random start.
    """
    params = dict(model.named_parameters())
    taken: set[str] = set()

    def piece(alternatives: str | tuple[str, ...], names: tuple[str, ...], **rule: object) -> Piece:
        for name in (alternatives,) if isinstance(alternatives, str) else alternatives:
            if name in params:
                taken.add(name)
                return Piece(parameter=params[name], names=names, **{**ONE, **rule})  # type: ignore[arg-type]
        raise ModelError(f"the Megatron model has no parameter {alternatives}: layer specification and mapping differ")

    vocabulary = {"join": lambda ts: _pad_rows(ts[0]), "split": lambda t: [t[:vocab_size]], "dim": 0}
    if model.pre_process:
        yield piece("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), **vocabulary)
    for i, layer in enumerate(model.decoder.layers):
        yield from _layer(model, i, layer, piece)
    if model.post_process:
        yield piece("decoder.final_layernorm.weight", ("model.norm.weight",))
        if isinstance(model.output_layer, nn.Linear):
            yield piece("output_layer.weight", ("head.weight",))
            yield piece("output_layer.bias", ("head.bias",))
        elif "output_layer.weight" in params:  # a later stage keeps its own copy of tied embeddings
            tied = model.share_embeddings_and_output_weights
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            yield piece("output_layer.weight", (name,), **vocabulary)
    if missing := sorted(set(params) - taken):
        raise ModelError(f"no Hugging Face weight is known for the Megatron parameter {missing[0]}")


def _layer(model: Backbone, i: int, layer: nn.Module, piece: Callable[..., Piece]) -> Iterator[Piece]:
    config = model.config
    m, h = f"decoder.layers.{i}.", f"model.layers.{int(layer.layer_number) - 1}."  # type: ignore[arg-type]
    groups, width = config.num_query_groups, config.kv_channels
    per_group = config.num_attention_heads // groups

    def join_qkv(ts: Tensors) -> torch.Tensor:  # Megatron keeps each group's queries beside its key and value
        return torch.cat([t.view(groups, -1, width, t.shape[-1]) for t in ts], 1).reshape(-1, ts[0].shape[-1])

    def split_qkv(t: torch.Tensor) -> Tensors:
        parts = t.view(groups, per_group + 2, width, -1).split([per_group, 1, 1], 1)
        return [p.reshape(-1, t.shape[-1]) for p in parts]

    def join_glu(ts: Tensors) -> torch.Tensor:
        return torch.cat(ts)

    def split_glu(t: torch.Tensor) -> Tensors:
        return list(t.chunk(2))

    glu = {"join": join_glu, "split": split_glu, "dim": 0, "halves": True}
    # Transformer Engine fuses a norm into the projection that follows it
    yield piece(
        (m + "input_layernorm.weight", m + "self_attention.linear_qkv.layer_norm_weight"),
        (h + "input_layernorm.weight",),
    )
    yield piece(
        m + "self_attention.linear_qkv.weight",
        tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv"),
        join=join_qkv,
        split=split_qkv,
        dim=0,
    )
    yield piece(m + "self_attention.linear_proj.weight", (h + "self_attn.o_proj.weight",), dim=1)
    if config.qk_layernorm:
        for x in "qk":
            yield piece(f"{m}self_attention.{x}_layernorm.weight", (f"{h}self_attn.{x}_norm.weight",))
    yield piece(
        (m + "pre_mlp_layernorm.weight", m + "mlp.linear_fc1.layer_norm_weight"),
        (h + "post_attention_layernorm.weight",),
    )
    if not config.num_moe_experts:
        up = tuple(f"{h}mlp.{x}_proj.weight" for x in ("gate", "up"))
        yield piece(m + "mlp.linear_fc1.weight", up, **glu)
        yield piece(m + "mlp.linear_fc2.weight", (h + "mlp.down_proj.weight",), dim=1)
        return
    yield piece(m + "mlp.router.weight", (h + "mlp.gate.weight",))
    local = config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
    first = mpu.get_expert_model_parallel_rank() * local
    for e in range(local):
        hf, own = f"{h}mlp.experts.{first + e}.", f"{m}mlp.experts."
        up = tuple(f"{hf}{x}_proj.weight" for x in ("gate", "up"))
        fc1 = (f"{own}local_experts.{e}.linear_fc1.weight", f"{own}linear_fc1.weight{e}")
        fc2 = (f"{own}local_experts.{e}.linear_fc2.weight", f"{own}linear_fc2.weight{e}")
        yield piece(fc1, up, **glu, expert=True)
        yield piece(fc2, (hf + "down_proj.weight",), dim=1, expert=True)


ONE: dict[str, object] = {"join": lambda ts: ts[0], "split": lambda t: [t]}


def _pad_rows(t: torch.Tensor) -> torch.Tensor:
    """The added vocabulary rows are zero and never sampled (`scores.OUT_OF_VOCABULARY`)."""
    return nn.functional.pad(t, (0, 0, 0, padded_vocab(len(t)) - len(t)))


def padded_vocab(vocab_size: int) -> int:
    """The same for every layout: core's checkpoints corrupt moments when the padding differs between two of them."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _cut(p: Piece) -> tuple[int, int, dist.ProcessGroup]:
    """(ways, rank, group) of the tensor parallelism that cuts this piece."""
    if p.expert:
        return (
            mpu.get_expert_tensor_parallel_world_size(),
            mpu.get_expert_tensor_parallel_rank(),
            mpu.get_expert_tensor_parallel_group(),
        )
    return (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_group(),
    )


def cuts(
    model: Backbone, read: Callable[[str], torch.Tensor], *, vocab_size: int
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter of this rank and its share of what `read` has under the Hugging Face names.

    Raises ModelError for a tensor of another shape.
    """
    for p in pieces(model, vocab_size=vocab_size):
        whole = p.join([read(name) for name in p.names])
        ways, rank, _ = _cut(p)
        if p.dim is not None:
            halves = whole.chunk(2, p.dim) if p.halves else (whole,)
            whole = torch.cat([half.chunk(ways, p.dim)[rank] for half in halves], p.dim)
        if whole.shape != p.parameter.shape:
            raise ModelError(
                f"{p.names[0]} makes {tuple(whole.shape)} where the model has {tuple(p.parameter.shape)}: "
                "the files are of another architecture"
            )
        yield p.parameter, whole


def _copies(p: Piece) -> tuple[int, int]:
    """(ranks that hold the same cut of this piece, this one's number among them)."""
    if p.expert:
        return mpu.get_expert_data_parallel_world_size(), mpu.get_expert_data_parallel_rank()
    return mpu.get_data_parallel_world_size(with_context_parallel=True), mpu.get_data_parallel_rank(
        with_context_parallel=True
    )


@torch.no_grad()
def export(
    model: Backbone,
    *,
    vocab_size: int,
    prefix: str,
    read: Callable[[nn.Parameter], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors that this rank must write; collective over tensor-parallel groups.

    read: what to take of each parameter: its float32 master, or a tensor of the same shape that belongs to it (a moment).

    Each tensor comes from exactly one rank of the world; those that hold the same take turns.
    """
    out: dict[str, torch.Tensor] = {}
    for turn, p in enumerate(pieces(model, vocab_size=vocab_size)):
        ways, own, group = _cut(p)
        copies, copy = _copies(p)
        whole = read(p.parameter).detach()
        if p.dim is not None and ways > 1:
            cuts = [torch.empty_like(whole) for _ in range(ways)]
            dist.all_gather(cuts, whole.contiguous(), group=group)
            halves = [c.chunk(2, p.dim) if p.halves else (c,) for c in cuts]
            whole = torch.cat([h[k] for k in range(len(halves[0])) for h in halves], p.dim)
        tied_copy = p.names == ("model.embed_tokens.weight",) and not model.pre_process
        if own == 0 and copy == turn % copies and not tied_copy:
            for name, tensor in zip(p.names, p.split(whole), strict=True):
                out[named(name, prefix)] = tensor.cpu().clone().contiguous()
    return out


def write_index(folder: Path) -> None:
    """One shard: plain `model.safetensors`. Several: Hugging Face's index over them."""
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
        return
    where, total = {}, 0
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.rename(folder / name)
        with safe_open(folder / name, "pt") as f:
            for key in f.keys():  # noqa: SIM118  # not a dict
                where[key] = name
                total += f.get_tensor(key).nbytes
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n")
