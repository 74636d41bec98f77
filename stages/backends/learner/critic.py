"""The critic: the actor's backbone and a scalar head (spec §2.2).

Shapes: b rows, T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from stages.backends.learner.actor import disable_dropout, experts
from stages.errors import CheckpointError

WEIGHTS = "model.safetensors"


class Critic(nn.Module):
    """v_j = head(body(prefix before token j))."""

    body: PreTrainedModel

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(int(body.config.hidden_size), 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def hidden_size(self) -> int:
        return self.head.in_features


def critic_from_actor(actor: PreTrainedModel) -> Critic:
    """A copy of the actor's backbone with a zero head: every value is exactly 0 before the first update."""
    with torch.random.fork_rng(devices=[]):  # the head's default initialisation must not move the seed
        body: PreTrainedModel = copy.deepcopy(actor.base_model)  # type: ignore[assignment]  # typed as Module
        return Critic(body).to(actor.device)


def save_critic(critic: Critic, folder: Path) -> None:
    """Writes `config.json` (the backbone's, marked) and `model.safetensors`."""
    folder.mkdir(parents=True)
    config = critic.body.config.to_dict()
    config.pop("_name_or_path", None)  # where it was loaded from is no part of the model
    config["architectures"] = ["ValueModel"]
    config["value_head"] = {"in_features": critic.hidden_size, "bias": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    save_file({k: v.contiguous() for k, v in critic.state_dict().items()}, folder / WEIGHTS, metadata={"format": "pt"})


def load_critic(folder: Path, *, attn_implementation: str = "sdpa") -> Critic:
    """Raises CheckpointError when the folder is incomplete or belongs to another architecture."""
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not a critic: {name} is missing")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not hasattr(config, "value_head"):
        raise CheckpointError(f"{folder / 'config.json'} has no value_head: this is an actor's folder, not a critic's")
    with torch.random.fork_rng(devices=[]):
        body = AutoModel.from_config(config, attn_implementation=attn_implementation, **experts(config))
        critic = Critic(body)
    weights = load_file(folder / WEIGHTS)
    wanted = critic.state_dict()
    odd = sorted(set(weights) ^ set(wanted)) or [k for k, v in wanted.items() if weights[k].shape != v.shape]
    if odd:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit its config.json (first difference: {odd[0]})")
    critic.load_state_dict(weights)
    disable_dropout(critic)
    return critic.float()
