"""Checkpoints of a parallel learner: the one-device learner's folder, written in shards by all ranks.

`actor/`, `critic/`, `{actor,critic}_optimizer*.safetensors`, `state.json`, `manifest.json`: Hugging Face names throughout and
float32 masters, so a folder loads in any layout and in either learner. Safetensors and JSON only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from stages.backends.learner import checkpoint, saving
from stages.backends.learner.megatron import weights
from stages.backends.learner.megatron.masters import MASTER, MOMENTS
from stages.backends.learner.megatron.parallel_model import ParallelModel
from stages.errors import CheckpointError

PREFIXES = {"actor": "model.", "critic": "body."}
LONGEST_ERROR = 4096  # bytes that ranks exchange


def save(
    path: Path,
    *,
    awake: Callable[[ParallelModel], None],
    actor: ParallelModel,
    critic: ParallelModel | None,
    carried: Path | None,
    tokenizer: dict[str, bytes],
    config: bytes,
) -> tuple[str, str | None]:
    """Collective and atomic; (actor digest, critic digest) on every rank. `awake(model)` is called before it is read.

    critic: written from memory; `carried`: this folder is carried over byte for byte instead; both None: no critic.
    Raises CheckpointError on every rank, with an existing `path` intact, when any rank cannot write.
    """
    models = {"actor": actor} | ({"critic": critic} if critic is not None else {})
    steps = [functools.partial(_write, name=name, model=model, awake=awake) for name, model in models.items()]
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
        alive = {n: (m.updates, m.optim) for n, m in models.items() if m.optim is not None}
        state = saving.optimizer_state(alive)
        (folder / saving.STATE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")

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
    size, at = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    text = (error or "").encode()[:LONGEST_ERROR]
    mine = torch.tensor([error is not None, *text, *bytes(LONGEST_ERROR - len(text))], dtype=torch.uint8, device=at)
    all_ranks = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(all_ranks, mine)
    for rank, (failed, *found) in enumerate(t.tolist() for t in all_ranks):
        if failed:
            words = bytes(found).rstrip(b"\0").decode(errors="replace")
            raise _Elsewhere(f"rank {rank}: {words}; earlier checkpoints are intact")


def _together(step: Callable[[Path], None], folder: Path) -> None:
    error = None
    try:
        step(folder)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    _agree(error)


def _write(folder: Path, *, name: str, model: ParallelModel, awake: Callable[[ParallelModel], None]) -> None:
    """This rank's shards of one model and its moments."""
    awake(model)
    rank, prefix = dist.get_rank(), PREFIXES[name]
    if tensors := model.export(MASTER, prefix=prefix):
        save_file(tensors, folder / name / f"rank-{rank:05d}.safetensors", metadata={"format": "pt"})
    if model.optim is None:
        return
    moments = {f"{m}.{k}": t for m in MOMENTS for k, t in model.export(m, prefix=prefix).items()}
    if moments:
        save_file(moments, folder / f"{name}_optimizer-{rank:05d}.safetensors")


def _critic_config(actor_config: bytes, hidden_size: int) -> str:
    config = json.loads(actor_config)
    config["architectures"] = ["ValueModel"]
    config["value_head"] = {"in_features": hidden_size, "bias": True}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def read_state(path: Path) -> dict[str, Any]:
    """`state.json`, after rank 0 has compared every file with the manifest."""
    error = None
    if dist.get_rank() == 0:
        try:
            saving.read_state(path)
        except CheckpointError as e:
            error = str(e)
    _agree(error)
    return json.loads((path / saving.STATE).read_text())


def restore_optimizer(path: Path, state: dict[str, Any], model: ParallelModel) -> None:
    """Raises CheckpointError for moments of another model."""
    saved = state["optimizers"].get(model.name)
    if saved is None:
        return
    model.start_phase(saving.read_optim(saved))
    if saved["updates"]:  # else every moment is zero
        for moment in MOMENTS:
            files = saving.moment_files(path, model.name)
            with weights.Reader(files, prefix=PREFIXES[model.name], stem=f"{moment}.") as read:
                model.load_moment(moment, read)
    model.set_updates(saved["updates"])
