"""The learner on one device: any Hugging Face causal language model, torch only (spec §2, §5).

Shapes: B sequences, b rows of a micro-batch, T tokens, N masked tokens, H hidden size, V vocabulary.

Weights, gradients and moments are float32. `dtype="bfloat16"` runs forward and backward under autocast; the float32 weights
are then the master copy. Every update accumulates gradients over micro-batches and divides by the count of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from stages.backends.learner import actor as actor_files
from stages.backends.learner import checkpoint, saving
from stages.backends.learner.critic import Critic, critic_from_actor, load_critic, save_critic
from stages.backends.learner.offload import bring
from stages.backends.learner.optim import Optimizer
from stages.backends.learner.packing import MicroBatch, PackedBatch, check_batch, pack, unpack
from stages.backends.learner.router_replay import RouteCounts, RouteReplay
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import ConfigError, ModelError
from stages.ppo import PolicySums, ValueSums, actor_loss, value_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Metrics = dict[str, float | None]
M = TypeVar("M", bound=nn.Module)


class TorchLearner:
    """Actor and critic with their optimisers on one device. Implements `stages.backends.protocols.Learner`.

    max_tokens_per_gpu: padded tokens of one micro-batch. log_probs_chunk_size: rows of logits that exist at once.
    use_rollout_routing_replay: reuse the sampler's experts where a batch carries them (spec §6.2); dense models: no effect.
    offload: only one of actor and critic is on the device at a time; the other waits in host memory with its moments.
    num_threads: set before every call, for the bits of a CPU run depend on it; None leaves it alone.
    """

    def __init__(
        self,
        *,
        max_tokens_per_gpu: int,
        log_probs_chunk_size: int = 1024,
        dtype: str = "float32",
        device: str = "cpu",
        num_threads: int | None = None,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        offload: bool = False,
        use_rollout_routing_replay: bool = True,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"learner dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if max_tokens_per_gpu < 1 or log_probs_chunk_size < 1:
            raise ConfigError("max_tokens_per_gpu and log_probs_chunk_size must be at least 1")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"learner device {device!r}: no CUDA device is visible; use device 'cpu'")
        self.max_tokens_per_gpu = max_tokens_per_gpu
        self.log_probs_chunk_size = log_probs_chunk_size
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.num_threads = num_threads
        self.gradient_checkpointing = gradient_checkpointing
        self.offload = offload
        self.use_rollout_routing_replay = use_rollout_routing_replay
        self._actor: PreTrainedModel | None = None
        self._replay: RouteReplay | None = None
        self._critic: Critic | None = None
        self._tokenizer: dict[str, bytes] = {}
        self._critic_source: Path | None = None  # the folder that the critic still equals, byte for byte
        self._actor_opt: Optimizer | None = None
        self._critic_opt: Optimizer | None = None
        torch.manual_seed(seed)
        # without it cuBLAS may sum in another order each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # filling every fresh buffer costs time, and nothing here reads one before writing it
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010

    # ------------------------------------------------------------------ models

    @property
    def actor(self) -> PreTrainedModel:
        if self._actor is None:
            raise ModelError("the learner has no actor yet: call load or restore first")
        return self._actor

    @property
    def critic(self) -> Critic:
        if self._critic is None:
            raise ModelError("the learner has no critic yet: call init_critic, or load one")
        return self._critic

    def load(self, actor_dir: Path, critic_dir: Path | None) -> None:
        """Weights only; fresh optimisers (frozen until `start_phase`).

        Raises ModelError or CheckpointError for a folder that cannot be used.
        """
        self._threads()
        actor = actor_files.load_actor(actor_dir)
        critic = load_critic(critic_dir) if critic_dir is not None else None
        if critic is not None:
            critic.check(actor, critic_dir)
        self._tokenizer = actor_files.tokenizer_files(actor_dir)
        self._actor = self._place(actor)
        self._replay = RouteReplay(self._actor.base_model) if self.use_rollout_routing_replay else None
        self._critic = self._place(critic) if critic is not None else None
        self._critic_source = critic_dir
        self._actor_opt = self._critic_opt = None

    def init_critic(self) -> None:
        """Critic = the actor's backbone with a zero value head (spec §2.2)."""
        self._critic = self._place(critic_from_actor(self.actor))
        self._critic_source = None
        self._critic_opt = None

    def start_phase(self, *, actor: OptimConfig | None, critic: OptimConfig | None, keep_moments: bool = False) -> None:
        """New optimiser moments for a phase; None leaves that model frozen.

        keep_moments: carry existing moments into the new settings instead (spec §2.3 option `keep`).
        """
        self._actor_opt = self._phase(self._actor_opt, actor, lambda: self.actor, "actor", keep_moments)
        self._critic_opt = self._phase(self._critic_opt, critic, lambda: self.critic, "critic", keep_moments)

    # ------------------------------------------------------------------ reading

    @torch.no_grad()
    def values(self, batch: Sequence[TrainSequence]) -> list[np.ndarray]:
        """v_j at every masked position, float32 [T] each (0 elsewhere), no gradient."""
        packed = self._pack(batch, self.critic.body)
        return unpack(packed, [self._values(m) for m in packed.micro_batches], batch)

    @torch.no_grad()
    def log_probs(self, batch: Sequence[TrainSequence], *, temperature: float = 1.0) -> list[np.ndarray]:
        """log π_train(y_j|h_j) at every masked position, float32 [T] each, no gradient."""
        packed = self._pack(batch, self.actor)
        found = []
        for m in packed.micro_batches:
            with self._routes(m):
                found.append(self._scores(m, temperature).log_probs_N)
        return unpack(packed, found, batch)

    # ------------------------------------------------------------------ updates

    def distil_step(self, batch: Sequence[TrainSequence], *, lr: float, trajectories: int | None = None) -> Metrics:
        """One update of −Σ_j m_j log π(y_j|h_j): sum over tokens, mean over trajectories (spec §2.1).

        trajectories: how many the batch's segments came from; by default each segment is one.
        Raises BatchError before, UpdateError instead of, an update that cannot be made.
        """
        opt = self._trained(self._actor_opt, "actor")
        packed = self._pack(batch, self.actor)
        count = trajectories or len(batch)

        def loss_sum(m: MicroBatch) -> torch.Tensor:
            return -self._scores(m, 1.0).log_probs_N.sum()

        loss, norm = self._update(packed, opt, loss_sum, count, lr=lr)
        tokens = packed.masked_tokens
        return {
            "distil/loss": loss,
            "distil/loss_per_token": loss * count / tokens,
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "train/tokens": float(tokens),
        }

    def critic_step(self, batch: Sequence[TrainSequence], *, value_clip: float) -> Metrics:
        """One update of the clipped value loss, anchored on the frozen `old_values` (spec §5)."""
        opt = self._trained(self._critic_opt, "critic")
        packed = self._pack(batch, self.critic.body, ("value_targets", "old_values"))
        total = ValueSums()

        def loss_sum(m: MicroBatch) -> torch.Tensor:
            loss, sums = value_loss(
                self._values(m), m.fields["value_targets"], m.fields["old_values"], value_clip=value_clip
            )
            total.merge(sums)
            return loss

        _, norm = self._update(packed, opt, loss_sum, packed.masked_tokens)
        self._critic_source = None
        return {**total.metrics(), "critic/grad_norm": norm, "critic/lr": opt.config.lr}

    def actor_step(
        self, batch: Sequence[TrainSequence], *, eps_clip: float, eps_clip_high: float, temperature: float = 1.0
    ) -> Metrics:
        """One PPO update on `rollout_log_probs` with an asymmetric clip, mean over all masked tokens (spec §5)."""
        opt = self._trained(self._actor_opt, "actor")
        packed = self._pack(batch, self.actor, ("rollout_log_probs", "advantages"))
        total = PolicySums()

        def loss_sum(m: MicroBatch) -> torch.Tensor:
            scores = self._scores(m, temperature)
            loss, sums = actor_loss(
                scores.log_probs_N,
                m.fields["rollout_log_probs"],
                m.fields["advantages"],
                eps_clip=eps_clip,
                eps_clip_high=eps_clip_high,
                entropy=scores.entropy_N,
            )
            total.merge(sums)
            return loss

        _, norm = self._update(packed, opt, loss_sum, packed.masked_tokens)
        return {**total.metrics(), **self._route_metrics(packed), "actor/grad_norm": norm, "actor/lr": opt.config.lr}

    # ------------------------------------------------------------------ checkpoints

    def save(self, path: Path) -> tuple[str, str | None]:
        """Atomic folder {actor/, critic/, optimiser state, state.json, manifest.json}; returns (actor, critic) digests.

        A critic that no update has touched since it was loaded is carried over byte for byte.
        Raises CheckpointError, with an existing `path` intact, when it cannot be written.
        """

        if self._critic is None:
            return self._write(path, None)
        if self._critic_source is not None and self._critic_source.is_dir():
            return self.save_actor_only(path, self._critic_source)
        return self._write(path, functools.partial(save_critic, self._critic))

    def save_actor_only(self, path: Path, critic_from: Path | None) -> tuple[str, str | None]:
        """As `save`, with the critic folder `critic_from` carried over byte for byte (RSR: Δφ = 0), or none."""

        carry = None if critic_from is None else functools.partial(checkpoint.link_or_copy, critic_from)
        return self._write(path, carry)

    def save_midpoint(self, first_actor: Path, second_actor: Path, path: Path, critic_from: Path | None) -> str:
        """Atomic folder whose actor/ holds the mean of two actors' weights (a distillation candidate); its digest.

        Touches no model of this learner. Raises ModelError, or CheckpointError when the two do not fit together.
        """
        return saving.write_midpoint(first_actor, second_actor, path, critic_from)

    def restore(self, path: Path) -> None:
        """Everything that `save` wrote, verified, so that the next step is the one that would have followed.

        Raises CheckpointError that names the file which is missing or damaged.
        """
        state = saving.read_state(path)
        critic_dir = path / "critic"
        self.load(path / "actor", critic_dir if critic_dir.is_dir() else None)
        self._actor_opt = saving.read_optimizer(path, state, "actor", self.actor)
        if self._critic is not None:
            self._critic_opt = saving.read_optimizer(path, state, "critic", self._critic)
        saving.restore_rng(state)

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _write(self, path: Path, critic: Callable[[Path], None] | None) -> tuple[str, str | None]:
        optimizers = {"actor": self._actor_opt, "critic": self._critic_opt if critic is not None else None}
        return saving.write_checkpoint(path, self.actor, self._tokenizer, critic, optimizers)

    # ------------------------------------------------------------------ inner parts

    def _threads(self) -> None:
        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def _wake(self, model: nn.Module) -> None:
        if self.offload:
            wanted = self.actor if model is self._actor else self.critic
            bring(wanted, ((self._actor, self._actor_opt), (self._critic, self._critic_opt)), self.device)

    def _place(self, model: M) -> M:
        model.to("cpu" if self.offload else self.device)
        model.train()  # no dropout is left; some models checkpoint activations in this mode only
        if self.gradient_checkpointing:
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    part.activation_checkpointing_enable({"use_reentrant": False})
        return model

    @staticmethod
    def _phase(
        old: Optimizer | None, config: OptimConfig | None, model: Callable[[], nn.Module], name: str, keep: bool
    ) -> Optimizer | None:
        if config is None:
            return None
        if keep and old is not None:
            old.reconfigure(config)
            return old
        return Optimizer(model(), config, name=name)

    @staticmethod
    def _trained(opt: Optimizer | None, name: str) -> Optimizer:
        if opt is None:
            raise ConfigError(f"the {name} is frozen in this phase: call start_phase({name}=OptimConfig(…)) first")
        return opt

    def _pack(self, batch: Sequence[TrainSequence], model: PreTrainedModel, fields: Sequence[str] = ()) -> PackedBatch:
        self._threads()
        self._wake(model)
        check_batch(batch, context_len=actor_files.context_len(model), vocab_size=int(model.config.vocab_size))
        replay = self._replay if model is self._actor else None
        if replay is not None:
            replay.check(batch)
            replay.counts = RouteCounts()
        return pack(
            batch,
            max_tokens=self.max_tokens_per_gpu,
            fields=fields,
            with_routes=replay is not None and replay.active,
            device=self.device,
        )

    @contextlib.contextmanager
    def _routes(self, m: MicroBatch) -> Iterator[None]:
        if self._replay is None:
            yield
        else:
            with self._replay.using(m.routed_bTLK):
                yield

    def _route_metrics(self, packed: PackedBatch) -> Metrics:
        """Share of input tokens with a replayed route, and of replayed routes that the live router would not take."""
        if self._replay is None or not self._replay.active:
            return {}
        routed = sum(
            int((m.routed_bTLK[:, :, 0, 0] >= 0).sum()) for m in packed.micro_batches if m.routed_bTLK is not None
        )
        return {
            "train/replayed_token_share": routed / packed.input_tokens,
            "train/route_flip_share": self._replay.counts.flip_share,
        }

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.dtype is torch.float32:
            yield
        else:
            with torch.autocast(self.device.type, dtype=self.dtype):
                yield

    def _hidden(self, body: nn.Module, m: MicroBatch) -> torch.Tensor:
        """[N, H]: only the states that a head will read."""
        hidden_bTH = body(input_ids=m.ids_bT, use_cache=False).last_hidden_state
        return hidden_bTH.flatten(0, 1).index_select(0, m.prefix_N)

    def _values(self, m: MicroBatch) -> torch.Tensor:
        with self._precision():
            hidden_NH = self._hidden(self.critic.body, m)
        return self.critic.head(hidden_NH.float()).squeeze(-1)

    def _scores(self, m: MicroBatch, temperature: float) -> actor_files.TokenScores:
        with self._precision():
            hidden_NH = self._hidden(self.actor.base_model, m)
            return actor_files.token_scores(
                hidden_NH,
                m.targets_N,
                self.actor.get_output_embeddings(),
                chunk=self.log_probs_chunk_size,
                temperature=temperature,
            )

    def _update(
        self,
        packed: PackedBatch,
        opt: Optimizer,
        loss_sum: Callable[[MicroBatch], torch.Tensor],
        count: int,
        *,
        lr: float | None = None,
    ) -> tuple[float, float]:
        """One optimiser update; returns (loss, gradient norm before clipping)."""
        opt.zero_grad()
        total = 0.0
        for m in packed.micro_batches:
            with self._routes(m):
                loss = loss_sum(m)
                total += loss.item()
                if not math.isfinite(total):
                    break  # `step` refuses it; no need to walk the rest
                (loss / count).backward()
        return total / count, opt.step(loss=total, lr=lr)
