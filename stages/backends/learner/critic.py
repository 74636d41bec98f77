"""The critic: the actor's backbone and a scalar head (spec §2.2).

Shapes: b rows, T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from stages.backends.learner.actor import disable_dropout, experts
from stages.errors import CheckpointError

WEIGHTS = "model.safetensors"
ONE_EXPERT = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")


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

    def check(self, actor: PreTrainedModel, folder: Path | None) -> None:
        """Raises CheckpointError when this critic, read from `folder`, has another architecture than the actor."""
        for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
            theirs, ours = getattr(self.body.config, name), getattr(actor.config, name)
            if theirs != ours:
                raise CheckpointError(
                    f"{folder} is a critic of another architecture than the actor: its {name} is {theirs}, not {ours}"
                )


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
    weights = split_experts(critic.state_dict())
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def split_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`…experts.gate_up_proj` [E, 2I, H] and `…experts.down_proj` [E, H, I] as one tensor per expert and projection.

    The names are those that an actor's folder has on disk, so that every learner reads every critic.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = gate.clone(), up.clone()
        elif name.endswith(".experts.down_proj"):
            for e, down in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down.clone()
        else:
            out[name] = tensor
    return out


def fuse_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `split_experts`."""
    single = {k for k in weights if ONE_EXPERT.search(k)}
    out = {k: v for k, v in weights.items() if k not in single}
    stems = sorted({k.rsplit(".", 3)[0] for k in single})
    for stem in stems:  # "….mlp.experts"
        n = sum(k.startswith(f"{stem}.") and k.endswith(".down_proj.weight") for k in weights)
        part = lambda e, name, stem=stem: weights[f"{stem}.{e}.{name}_proj.weight"]  # noqa: E731
        out[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([part(e, "gate"), part(e, "up")]) for e in range(n)])
        out[f"{stem}.down_proj"] = torch.stack([part(e, "down") for e in range(n)])
    return out


def load_critic(folder: Path, *, attn_implementation: str = "sdpa") -> Critic:
    """Raises CheckpointError when the folder is incomplete or belongs to another architecture."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a critic: it needs config.json and {WEIGHTS} (or shards of it)")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not hasattr(config, "value_head"):
        raise CheckpointError(f"{folder / 'config.json'} has no value_head: this is an actor's folder, not a critic's")
    with torch.random.fork_rng(devices=[]):
        body = AutoModel.from_config(config, attn_implementation=attn_implementation, **experts(config))
        critic = Critic(body)
    weights = fuse_experts({k: v for shard in shards for k, v in load_file(shard).items()})
    wanted = critic.state_dict()
    odd = sorted(set(weights) ^ set(wanted)) or [k for k, v in wanted.items() if weights[k].shape != v.shape]
    if odd:
        raise CheckpointError(f"the weights of {folder} do not fit its config.json (first difference: {odd[0]})")
    critic.load_state_dict(weights)
    disable_dropout(critic)
    return critic.float()
