"""Checkpoints of a parallel learner: Hugging Face folders for the weights, dist_checkpointing for the optimisers.

The folder is the one-device learner's (`actor/`, `critic/`, `state.json`, `manifest.json`), with `actor_optimizer/` and
`critic_optimizer/` in core's torch_dist format: moments and float32 master weights, loadable in another layout. That format
holds pickles of torch's own; the manifest's digests are checked before any of them is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from safetensors.torch import save_file

from stages.backends.learner import checkpoint, saving
from stages.backends.learner.megatron import weights
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.parallel_model import ParallelModel
from stages.backends.protocols import OptimConfig
from stages.errors import CheckpointError

RESHARD = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(
    path: Path,
    *,
    actor: ParallelModel,
    critic: ParallelModel | None,
    carried: Path | None,
    tokenizer: dict[str, bytes],
    config: bytes,
) -> tuple[str, str | None]:
    """Collective and atomic; (actor digest, critic digest) on every rank.

    critic: written from memory; `carried`: this folder is carried over byte for byte instead; both None: no critic.
    Raises CheckpointError on every rank, with an existing `path` intact, when any rank cannot write.
    """
    models = {"actor": actor} | ({"critic": critic} if critic is not None else {})
    steps: list[Callable[[Path], None]] = [
        lambda folder: _write_weights(folder, models),
        lambda folder: _write_optimizers(folder, models),
    ]
    folder = path.with_name(f"tmp_{path.name}")  # where `write_folder` fills

    def parts() -> None:
        for step in steps:
            _together(step, folder)

    def fill(folder: Path) -> None:
        (folder / "actor").mkdir()
        for name, content in {**tokenizer, "config.json": config}.items():
            (folder / "actor" / name).write_bytes(content)
        if critic is not None:
            (folder / "critic").mkdir()
            (folder / "critic/config.json").write_text(_critic_config(config, actor.facts.hidden_size))
        elif carried is not None:
            checkpoint.link_or_copy(carried, folder / "critic")
        _agree(None)
        parts()
        for name in models:
            weights.write_index(folder / name)
        (folder / saving.STATE).write_text(json.dumps(_state(models), indent=1, sort_keys=True) + "\n")

    if dist.get_rank() == 0:
        try:
            checkpoint.write_folder(path, fill)
        except _Elsewhere:  # every rank has raised it
            raise
        except Exception as e:  # the others wait in an `_agree`, before or after `parts`
            _agree(str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}")
        _agree(None)
    else:
        _agree(None)
        parts()
        _agree(None)
    has_critic = (path / "critic").is_dir()
    return (
        checkpoint.digest_weights(path / "actor"),
        checkpoint.digest_weights(path / "critic") if has_critic else None,
    )


class _Elsewhere(CheckpointError):
    """Some rank failed and every rank knows."""


def _agree(error: str | None) -> None:
    """A barrier that carries errors: raises `_Elsewhere` on every rank when any rank brings one."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise _Elsewhere(f"rank {rank}: {found}; earlier checkpoints are intact")


def _together(step: Callable[[Path], None], folder: Path) -> None:
    error = None
    try:
        step(folder)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    _agree(error)


def _write_weights(folder: Path, models: dict[str, ParallelModel]) -> None:
    for name, model in models.items():
        prefix = "model." if name == "actor" else "body."
        tensors = weights.export(model.raw, vocab_size=model.facts.vocab_size, prefix=prefix)
        if tensors:
            save_file(tensors, folder / name / f"rank-{dist.get_rank():05d}.safetensors", metadata={"format": "pt"})


def _write_optimizers(folder: Path, models: dict[str, ParallelModel]) -> None:
    for name, model in models.items():
        if model.optim is None:
            continue
        target = folder / f"{name}_optimizer"
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        dist_checkpointing.save(_sharded(model), str(target))


def _sharded(model: ParallelModel, *, loading: bool = False) -> dict[str, Any]:
    metadata = RESHARD if model.layout.distributed_optimizer else None
    return {
        "optimizer": model.optimizer.sharded_state_dict(
            model.raw.sharded_state_dict(), is_loading=loading, metadata=metadata
        )
    }


def _state(models: dict[str, ParallelModel]) -> dict[str, Any]:
    layout = next(iter(models.values())).layout
    return {
        "learner": "megatron",
        "layout": {"expert": layout.expert, "distributed_optimizer": layout.distributed_optimizer},
        "optimizers": {
            name: {"updates": m.updates, "config": saving.plain(m.optim)}
            for name, m in models.items()
            if m.optim is not None
        },
    }


def _critic_config(actor_config: bytes, hidden_size: int) -> str:
    config = json.loads(actor_config)
    config["architectures"] = ["ValueModel"]
    config["value_head"] = {"in_features": hidden_size, "bias": True}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def read_state(path: Path, layout: Layout) -> dict[str, Any]:
    """Verified `state.json`. Raises CheckpointError for moments that this layout cannot take."""
    error = None
    if dist.get_rank() == 0:
        try:
            saving.read_state(path)
        except CheckpointError as e:
            error = str(e)
    _agree(error)
    state = json.loads((path / saving.STATE).read_text())
    if state.get("learner") != "megatron":
        raise CheckpointError(
            f"{path} was written by the torch learner: its weights load here (`load`), its optimiser state does not"
        )
    saved = state["layout"]
    if saved["expert"] != layout.expert:
        raise CheckpointError(
            f"{path}: optimiser state saved with EP{saved['expert']} cannot be loaded with EP{layout.expert} "
            "(a limit of megatron-core 0.16); keep EP, or `load` the weights and start a phase"
        )
    if saved["distributed_optimizer"] != layout.distributed_optimizer:
        raise CheckpointError(
            f"{path}: it was saved with distributed_optimizer={saved['distributed_optimizer']}; use the same"
        )
    return state


def restore_optimizer(path: Path, state: dict[str, Any], model: ParallelModel) -> None:
    saved = state["optimizers"].get(model.name)
    if saved is None:
        return
    model.start_phase(OptimConfig(**{**saved["config"], "betas": tuple(saved["config"]["betas"])}))
    loaded = dist_checkpointing.load(_sharded(model, loading=True), str(path / f"{model.name}_optimizer"))
    model.optimizer.load_state_dict(loaded["optimizer"])
    model.updates = saved["updates"]
