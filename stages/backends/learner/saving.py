"""What a learner's checkpoint folder holds: actor/, critic/, optimiser moments, state.json, manifest.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.backends.learner import actor as actor_files
from stages.backends.learner import checkpoint
from stages.backends.learner.optim import Optimizer
from stages.backends.protocols import OptimConfig
from stages.errors import CheckpointError

STATE = "state.json"


def write_checkpoint(
    path: Path,
    actor: PreTrainedModel,
    tokenizer: dict[str, bytes],
    critic: Callable[[Path], None] | None,
    optimizers: Mapping[str, Optimizer | None],
) -> tuple[str, str | None]:
    """Atomic; returns (actor digest, critic digest). `critic(folder)` writes the critic's folder, None: there is none.

    Raises CheckpointError, with an existing `path` intact, when it cannot be written.
    """

    def fill(folder: Path) -> None:
        actor_files.save_actor(actor, folder / "actor", tokenizer)
        if critic is not None:
            critic(folder / "critic")
        alive = {name: o for name, o in optimizers.items() if o is not None}
        for name, o in alive.items():
            o.save(folder / f"{name}_optimizer.safetensors")
        state = {
            **optimizer_state({name: (o.updates, o.config) for name, o in alive.items()}),
            "rng": bytes(torch.get_rng_state().numpy()).hex(),
        }
        (folder / STATE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")

    checkpoint.write_folder(path, fill)
    critic_digest = checkpoint.digest_weights(path / "critic") if critic is not None else None
    return checkpoint.digest_weights(path / "actor"), critic_digest


def read_state(path: Path) -> dict:
    """`state.json` of a verified checkpoint. Raises CheckpointError that names what is missing or damaged."""
    checkpoint.recover(path)
    checkpoint.verify_manifest(path)
    try:
        return json.loads((path / STATE).read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{path / STATE} cannot be read ({e}); take an earlier checkpoint") from e


def read_optimizer(path: Path, state: dict, name: str, model: torch.nn.Module) -> Optimizer | None:
    """The optimiser of "actor" or "critic" as it was saved; None when it was frozen."""
    saved = state["optimizers"].get(name)
    if saved is None:
        return None
    opt = Optimizer(model, read_optim(saved), name=name)
    opt.load(moment_files(path, name), updates=saved["updates"])
    return opt


def moment_files(path: Path, name: str) -> list[Path]:
    """One file of the one-device learner, or one of each rank of the parallel one. Raises CheckpointError without any."""
    files = sorted(path.glob(f"{name}_optimizer*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: {STATE} names {name} moments, but no {name}_optimizer*.safetensors is there")
    return files


def restore_rng(state: dict) -> None:
    if "rng" not in state:  # the parallel learner wrote it: nothing of it is random
        return
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["rng"]), dtype=torch.uint8))


def write_midpoint(first: Path, second: Path, path: Path, critic_from: Path | None) -> str:
    """Atomic folder whose actor/ holds the mean of two actors' weights, `critic_from` beside it byte for byte.

    Returns the actor's digest.

    Raises ModelError, or CheckpointError when the two do not fit together or the folder cannot be written.
    """
    actor, other = actor_files.load_actor(first), actor_files.load_actor(second)
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if name not in theirs or theirs[name].shape != p.shape:
                raise CheckpointError(f"{second} and {first} differ in {name}: no mean of them exists")
            p.lerp_(theirs[name], 0.5)
    tokenizer = actor_files.tokenizer_files(first)

    def fill(folder: Path) -> None:
        actor_files.save_actor(actor, folder / "actor", tokenizer)
        if critic_from is not None:
            checkpoint.link_or_copy(critic_from, folder / "critic")

    checkpoint.write_folder(path, fill)
    return checkpoint.digest_weights(path / "actor")


def optimizer_state(alive: Mapping[str, tuple[int, OptimConfig]]) -> dict:
    """The part of `state.json` that both learners write: (updates so far, settings) of each optimiser."""
    return {"optimizers": {n: {"updates": updates, "config": asdict(config)} for n, (updates, config) in alive.items()}}


def read_optim(saved: dict) -> OptimConfig:
    """The settings in one entry of `optimizer_state`."""
    return OptimConfig(**{**saved["config"], "betas": tuple(saved["config"]["betas"])})
