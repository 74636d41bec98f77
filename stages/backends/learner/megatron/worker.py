"""The learner on one rank. Every public method is collective and gives the same answer everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from stages.backends.learner import actor as actor_files
from stages.backends.learner.megatron import folders, reduce, scores, streams, weights
from stages.backends.learner.megatron.facts import ModelFacts, read_facts
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.parallel_model import ParallelModel
from stages.backends.learner.packing import check_batch
from stages.backends.learner.router_replay import RouteCounts
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import CheckpointError, ConfigError, ModelError
from stages.ppo import PolicySums, ValueSums, actor_loss, value_loss

Metrics = dict[str, float | None]


class Worker:
    """Needs `torch.distributed` to be initialised. Owns Megatron's process groups until `close`."""

    def __init__(
        self,
        *,
        layout: Layout,
        max_tokens_per_gpu: int,
        log_probs_chunk_size: int = 1024,
        dtype: str = "float32",
        seed: int = 0,
        gradient_checkpointing: bool = False,
        offload: bool = False,
        use_rollout_routing_replay: bool = True,
        transformer_engine: bool = False,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"learner dtype {dtype!r} is unknown; use float32 or bfloat16")
        if offload and layout.distributed_optimizer and dtype == "float32":
            raise ConfigError(
                "learner.offload with the distributed optimiser needs dtype bfloat16: in float32 the moments' weights "
                "are views of the model's and would be torn from it"
            )
        world = dist.get_world_size()
        if world % layout.model_parallel:
            raise ConfigError(
                f"layout {layout} needs a multiple of {layout.model_parallel} processes (GPUs), but there are {world}"
            )
        self.layout = layout
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._budget = max_tokens_per_gpu * layout.context
        self._chunk = log_probs_chunk_size
        self._model_options = {
            "bf16": dtype == "bfloat16",
            "recompute": gradient_checkpointing,
            "transformer_engine": transformer_engine,
            "device": self.device,
        }
        self._offload = offload
        self._use_replay = use_rollout_routing_replay
        self._actor: ParallelModel | None = None
        self._critic: ParallelModel | None = None
        self._actor_dir: Path | None = None
        self._critic_source: Path | None = None
        self._tokenizer: dict[str, bytes] = {}
        mpu.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def close(self) -> None:
        mpu.destroy_model_parallel()

    # ------------------------------------------------------------------ models

    @property
    def actor(self) -> ParallelModel:
        if self._actor is None:
            raise ModelError("the learner has no actor yet: call load or restore first")
        return self._actor

    @property
    def critic(self) -> ParallelModel:
        if self._critic is None:
            raise ModelError("the learner has no critic yet: call init_critic, or load one")
        return self._critic

    def load(self, actor_dir: Path, critic_dir: Path | None) -> None:
        facts = read_facts(actor_dir)
        self.layout.check(dist.get_world_size(), facts)
        if critic_dir is not None:
            self._same_backbone(actor_dir, facts, critic_dir)
        tokenizer = actor_files.tokenizer_files(actor_dir)
        if not tokenizer:
            raise ModelError(f"{actor_dir} has no tokenizer files; a checkpoint of it could not be sampled from")
        actor = self._built(self._actor, facts, value=False)
        critic = self._built(None, facts, value=True) if critic_dir is not None else None
        actor.wake()
        with ExitStack() as stack:
            found = [(actor, stack.enter_context(self._reader(actor, actor_dir)))]
            if critic is not None and critic_dir is not None:
                found.append((critic, stack.enter_context(self._reader(critic, critic_dir))))
            for model, read in found:  # all of both, before a weight changes
                model.check(read.outline)
            for model, read in found:
                model.load(read)
        actor.start_phase(None)
        self._actor, self._critic = actor, critic
        self._tokenizer, self._actor_dir, self._critic_source = tokenizer, actor_dir, critic_dir
        self._config = (actor_dir / "config.json").read_bytes()

    def init_critic(self) -> None:
        """The actor's backbone, parameter by parameter, and a zero head (spec §2.2)."""
        critic = self._built(None, self.actor.facts, value=True)
        self._awake(self.actor)
        critic.copy_backbone(self.actor)
        self._critic, self._critic_source = critic, None

    def start_phase(self, actor: OptimConfig | None, critic: OptimConfig | None, keep_moments: bool = False) -> None:
        if actor is not None or self._actor is not None:
            self.actor.start_phase(actor, keep_moments=keep_moments)
        if critic is not None or self._critic is not None:
            self.critic.start_phase(critic, keep_moments=keep_moments)

    # ------------------------------------------------------------------ reading

    def values(self, batch: Sequence[TrainSequence]) -> list[np.ndarray]:
        model, plan, mine = self._prepare(batch, self.critic)
        parts: list[tuple[np.ndarray, torch.Tensor]] = []

        def record(output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
            v = self._values(output, s)
            parts.append((s.slots_N, v))
            return v.sum()

        model.run(mine, record, count=1, train=False)
        return streams.split(reduce.flat_result(int(plan.offsets[-1]), parts, self.device), plan)

    def log_probs(self, batch: Sequence[TrainSequence], temperature: float = 1.0) -> list[np.ndarray]:
        model, plan, mine = self._prepare(batch, self.actor)
        parts: list[tuple[np.ndarray, torch.Tensor]] = []

        def record(output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
            log_probs, _ = self._scores(output, s, temperature)
            parts.append((s.slots_N, log_probs))
            return log_probs.sum()

        model.run(mine, record, count=1, train=False)
        return streams.split(reduce.flat_result(int(plan.offsets[-1]), parts, self.device), plan)

    # ------------------------------------------------------------------ updates

    def distil_step(self, batch: Sequence[TrainSequence], lr: float, trajectories: int | None = None) -> Metrics:
        self._trained(self.actor)
        model, plan, mine = self._prepare(batch, self.actor)
        count = trajectories or len(batch)

        def loss(output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
            return -self._scores(output, s, 1.0)[0].sum()

        total, norm = model.update(mine, loss, count=count, lr=lr)
        return {
            "distil/loss": total / count,
            "distil/loss_per_token": total / plan.masked_tokens,
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "train/tokens": float(plan.masked_tokens),
        }

    def critic_step(self, batch: Sequence[TrainSequence], value_clip: float) -> Metrics:
        optim = self._trained(self.critic)
        model, plan, mine = self._prepare(batch, self.critic, ("value_targets", "old_values"))
        sums = ValueSums()

        def loss(output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
            value, more = value_loss(
                self._values(output, s), s.fields["value_targets"], s.fields["old_values"], value_clip=value_clip
            )
            sums.merge(more)
            return value

        _, norm = model.update(mine, loss, count=plan.masked_tokens, lr=optim.lr)
        self._critic_source = None
        total = reduce.value_sums(sums, self.device)
        return {**total.metrics(), "critic/grad_norm": norm, "critic/lr": optim.lr}

    def actor_step(
        self, batch: Sequence[TrainSequence], eps_clip: float, eps_clip_high: float, temperature: float = 1.0
    ) -> Metrics:
        optim = self._trained(self.actor)
        model, plan, mine = self._prepare(batch, self.actor, ("rollout_log_probs", "advantages"))
        sums, ratios = PolicySums(), []

        def loss(output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
            log_probs, entropy = self._scores(output, s, temperature)
            value, more = actor_loss(
                log_probs,
                s.fields["rollout_log_probs"],
                s.fields["advantages"],
                eps_clip=eps_clip,
                eps_clip_high=eps_clip_high,
                entropy=entropy,
            )
            sums.merge(more)
            ratios.append((s.slots_N, torch.from_numpy(more.log_ratios[0]).to(self.device)))
            return value

        _, norm = model.update(mine, loss, count=plan.masked_tokens, lr=optim.lr)
        flat = reduce.flat_result(int(plan.offsets[-1]), ratios, self.device)
        masked = np.concatenate([s.loss_mask for s in batch])
        total = reduce.policy_sums(sums, flat[masked], self.device)
        return {**total.metrics(), **self._route_metrics(batch, plan), "actor/grad_norm": norm, "actor/lr": optim.lr}

    # ------------------------------------------------------------------ checkpoints

    def save(self, path: Path, critic_from: Path | None = None, actor_only: bool = False) -> tuple[str, str | None]:
        carried = critic_from if actor_only else self._critic_source
        carried = carried if carried is not None and (actor_only or carried.is_dir()) else None
        critic = None if actor_only or carried is not None else self._critic
        return folders.save(
            path,
            awake=self._awake,
            actor=self.actor,
            critic=critic,
            carried=carried,
            tokenizer=self._tokenizer,
            config=self._config,
        )

    def restore(self, path: Path) -> None:
        state = folders.read_state(path)
        self.load(path / "actor", path / "critic" if (path / "critic").is_dir() else None)
        self._awake(self.actor)
        folders.restore_optimizer(path, state, self.actor)
        if self._critic is not None:
            self._awake(self._critic)
            folders.restore_optimizer(path, state, self._critic)

    # ------------------------------------------------------------------ inner parts

    def _awake(self, model: ParallelModel) -> None:
        """With off-load, only one of the two colocated models is on the device."""
        if self._offload:
            for other in (self._actor, self._critic):
                if other is not None and other is not model:
                    other.sleep()
            model.wake()

    def _built(self, old: ParallelModel | None, facts: ModelFacts, *, value: bool) -> ParallelModel:
        if old is not None and old.facts == facts:
            return old
        replay = self._use_replay and not value
        return ParallelModel(facts, self.layout, value=value, replay=replay, **self._model_options)  # type: ignore[arg-type]

    @staticmethod
    def _reader(model: ParallelModel, folder: Path) -> weights.Reader:
        return weights.Reader(sorted(folder.glob("*.safetensors")), prefix=folders.PREFIXES[model.name])

    @staticmethod
    def _same_backbone(actor_dir: Path, facts: ModelFacts, critic_dir: Path) -> None:
        theirs = asdict(read_facts(critic_dir))
        for name, value in asdict(facts).items():
            if name != "tied" and theirs[name] != value:
                raise CheckpointError(
                    f"{critic_dir} is a critic of another architecture than the actor {actor_dir}: "
                    f"its {name} is {theirs[name]}, not {value}"
                )

    @staticmethod
    def _trained(model: ParallelModel) -> OptimConfig:
        if model.optim is None:
            raise ConfigError(f"the {model.name} is frozen in this phase: call start_phase with its OptimConfig first")
        return model.optim

    def _prepare(
        self, batch: Sequence[TrainSequence], model: ParallelModel, fields: Sequence[str] = ()
    ) -> tuple[ParallelModel, streams.Plan, list[streams.Stream]]:
        facts, layout = model.facts, self.layout
        self._awake(model)
        check_batch(batch, context_len=facts.context_len, vocab_size=facts.vocab_size)
        for i, seq in enumerate(batch):
            for name in fields:
                if getattr(seq, name) is None:
                    raise streams.BatchError(f"sequence {i} has no {name}, which this update needs")
        ways, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        align = 2 * layout.context if layout.context > 1 else 1
        plan = streams.plan(batch, budget=self._budget, align=align, ways=ways)
        with_routes = model.replay is not None
        if model.replay is not None:
            model.replay.counts.replayed = model.replay.counts.flipped = 0
        mine = streams.streams(
            batch,
            plan,
            range(rank, len(plan.groups), ways),
            context=layout.context,
            context_rank=mpu.get_context_parallel_rank(),
            total_multiple=layout.context * (layout.tensor if layout.sequence_parallel else 1),
            equal=layout.pipeline > 1,
            fields=fields,
            with_routes=with_routes,
            device=self.device,
        )
        return model, plan, mine

    def _values(self, output: torch.Tensor, s: streams.Stream) -> torch.Tensor:
        hidden = self.critic.hidden(output, s, vocabulary=False)
        head: Any = self.critic.raw.output_layer
        return head(hidden).float().squeeze(-1)

    def _scores(self, output: torch.Tensor, s: streams.Stream, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        raw = self.actor.raw
        weight = (
            raw.shared_embedding_or_output_weight()
            if raw.share_embeddings_and_output_weights
            else raw.output_layer.weight
        )
        return scores.token_scores(
            self.actor.hidden(output, s, vocabulary=True),
            s.targets_N,
            weight,
            chunk=self._chunk,
            temperature=temperature,
            vocab_size=self.actor.facts.vocab_size,
        )

    def _route_metrics(self, batch: Sequence[TrainSequence], plan: streams.Plan) -> Metrics:
        if not self._use_replay or not self.actor.facts.num_experts:
            return {}
        counts = self.actor.replay.counts if self.actor.replay is not None else RouteCounts()
        both = torch.tensor([counts.replayed, counts.flipped], dtype=torch.float64, device=self.device)
        dist.all_reduce(both)
        routed = sum(n for n, s in zip(plan.lengths, batch, strict=True) if s.rollout_routed_experts is not None)
        return {
            "train/replayed_token_share": routed / plan.input_tokens,
            "train/route_flip_share": both[1].item() / both[0].item() if both[0] else None,
        }
