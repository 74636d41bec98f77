"""One model (actor or critic) of this rank: Megatron's DDP, schedule and optimiser around a `Backbone`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module

from stages.backends.learner.megatron import modules, weights
from stages.backends.learner.megatron.config import transformer_config
from stages.backends.learner.megatron.facts import ModelFacts
from stages.backends.learner.megatron.layout import Layout
from stages.backends.learner.megatron.masters import MASTER, MOMENTS, Masters
from stages.backends.learner.megatron.replay import ModelReplay
from stages.backends.learner.megatron.streams import Stream
from stages.backends.protocols import OptimConfig
from stages.errors import UpdateError

log = logging.getLogger(__name__)
LossSum = Callable[[torch.Tensor, Stream], torch.Tensor]  # (hidden [s, 1, H], stream) -> sum over its masked tokens


class ParallelModel:
    """This rank's share of one model. Every method is collective: all ranks call it in the same order."""

    def __init__(
        self,
        facts: ModelFacts,
        layout: Layout,
        *,
        value: bool,
        bf16: bool,
        recompute: bool,
        transformer_engine: bool,
        replay: bool,
        device: torch.device,
    ) -> None:
        self.name = "critic" if value else "actor"
        self.facts, self.layout, self.device = facts, layout, device
        self.optim: OptimConfig | None = None  # None: frozen in this phase
        self.updates = 0
        config = transformer_config(
            facts, layout, bf16=bf16, recompute=recompute, transformer_engine=transformer_engine
        )
        self.raw = modules.build_model(
            config,
            vocab_size=weights.padded_vocab(facts.vocab_size),
            context_len=facts.context_len,
            rope=facts.rope_theta,
            tied=facts.tied,
            value=value,
            te=transformer_engine,
        )
        setattr(self.raw, "model_type", ModelType.encoder_or_decoder)  # noqa: B010  # read by core's schedules
        self.raw.to(device)
        self.replay = ModelReplay(self.raw) if replay and facts.num_experts else None
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=layout.distributed_optimizer, grad_reduce_in_fp32=bf16
            ),
            Float16Module(config, self.raw) if bf16 else self.raw,
        )
        self._optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.0,
                min_lr=0.0,
                weight_decay=0.0,
                adam_eps=1e-8,
                clip_grad=1.0,
                bf16=bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=layout.distributed_optimizer,
            ),
            [self.ddp],
        )
        self.masters = Masters(self.inner_optimizers, sharded=layout.distributed_optimizer)
        self._schedule = get_forward_backward_func()
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.ddp.no_sync
        config.grad_scale_func = None

    # ------------------------------------------------------------------ weights

    def check(self, outline: Callable[[str], torch.Tensor]) -> None:
        """Raises ModelError for a folder that `load` could not use, from names and shapes alone."""
        for _ in weights.cuts(self.raw, outline, vocab_size=self.facts.vocab_size):
            pass

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor]) -> None:
        """Weights by Hugging Face name, into the float32 masters too."""
        for p, tensor in weights.cuts(self.raw, read, vocab_size=self.facts.vocab_size):
            p.copy_(tensor)
            self.masters.write(p, MASTER, tensor)

    @torch.no_grad()
    def copy_backbone(self, other: ParallelModel) -> None:
        """Another model's backbone, parameter by parameter, and a head of zero."""
        theirs = dict(other.raw.named_parameters())
        for name, p in self.raw.named_parameters():
            head = name.startswith("output_layer.")
            tensor = torch.zeros_like(p) if head else other.masters.read(theirs[name], MASTER)
            p.copy_(tensor)
            self.masters.write(p, MASTER, tensor)

    def export(self, what: str, *, prefix: str) -> dict[str, torch.Tensor]:
        """The masters or a moment by Hugging Face name, as far as this rank must write them. Collective."""
        return weights.export(
            self.raw, vocab_size=self.facts.vocab_size, prefix=prefix, read=lambda p: self.masters.read(p, what)
        )

    # ------------------------------------------------------------------ colocation

    def sleep(self) -> None:
        """Frees the gradients on the device; weights, masters and moments go to host memory."""
        self.ddp.offload_grad_buffers()
        if self.device.type == "cpu":
            return  # the rest is there
        self._optimizer.offload_to_cpu()
        for buffer in self._buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        for p in self.raw.parameters():
            if p.is_cuda and p.untyped_storage().size():  # one that no buffer holds
                p.data = p.data.cpu()

    def wake(self) -> None:
        """Undoes `sleep`; nothing happens to a model that is awake."""
        if self.device.type != "cpu":
            for buffer in self._buffers:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            for p in self.raw.parameters():
                if not p.is_cuda:
                    p.data = p.data.to(self.device)
            self._optimizer.restore_from_cpu()
        self.ddp.restore_grad_buffers()

    @property
    def _buffers(self) -> list[Any]:
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]

    # ------------------------------------------------------------------ optimiser

    @property
    def inner_optimizers(self) -> list[Any]:
        """Core's optimisers with parameters: experts have one of their own."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [o for o in chained if not getattr(o, "is_stub_optimizer", False)]

    def start_phase(self, optim: OptimConfig | None, *, keep_moments: bool = False) -> None:
        """New settings and, unless kept, moments of zero. The float32 master weights stay.

        A model that was frozen has no moments to keep.
        """
        keep_moments = keep_moments and self.optim is not None
        self.optim = optim
        if optim is None:
            return
        for o in self.inner_optimizers:
            o.config.clip_grad = optim.clip_grad
            for group in o.optimizer.param_groups:
                group.update(lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        if not keep_moments:
            self._reset_moments()

    def load_moment(self, what: str, read: Callable[[str], torch.Tensor]) -> None:
        """One of MOMENTS by Hugging Face name."""
        for p, tensor in weights.cuts(self.raw, read, vocab_size=self.facts.vocab_size):
            self.masters.write(p, what, tensor)

    def set_updates(self, updates: int) -> None:
        """The count that Adam's bias correction reads."""
        self.updates = updates
        for o in self.inner_optimizers:
            for group in o.optimizer.param_groups:
                if not isinstance(o.optimizer, torch.optim.AdamW):  # a fused Adam counts per group
                    group["step"] = updates
                    continue
                for p in group["params"]:
                    at = p.device if o.optimizer.defaults.get("fused") else None
                    o.optimizer.state[p]["step"] = torch.tensor(float(updates), device=at)

    def _reset_moments(self) -> None:
        for o in self.inner_optimizers:
            for group in o.optimizer.param_groups:
                for p in group["params"]:
                    o.optimizer.state[p] = {what: torch.zeros_like(p) for what in MOMENTS}
        self.set_updates(0)

    def update(self, streams: Sequence[Stream], loss_sum: LossSum, *, count: int, lr: float) -> tuple[float, float]:
        """One optimiser update of `loss_sum / count`; (sum of the loss over all ranks, gradient norm before clipping).

        Raises UpdateError on every rank, with the weights unchanged, when loss or gradient is not finite.
        """
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        total = self.run(streams, loss_sum, count=count, train=True)
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        bad = torch.tensor([float(not (math.isfinite(total) and math.isfinite(float(norm))))], device=self.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            self.ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            raise UpdateError(
                f"the {self.name} loss ({total}) or gradient norm ({float(norm)}) is not finite; "
                "the update was refused and no weight changed"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.updates += 1
        return total, float(norm)

    # ------------------------------------------------------------------ running

    def run(self, streams: Sequence[Stream], loss_sum: LossSum, *, count: int, train: bool) -> float:
        """Forward (and backward) over this rank's micro-batches; the loss summed over all ranks."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        first_rank = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        counted = False

        def forward(it: Iterator[Stream], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            stream = next(it)
            if self.replay is not None:
                self.replay.forward(self._own_routes(stream))
            hidden = model(stream.ids_s[None], stream.positions_s[None], None, packed_seq_params=_packed(stream))
            if self.replay is not None:
                self.replay.backward()

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
                nonlocal counted
                value = loss_sum(output, stream) if len(stream.rows_N) else output.float().sum() * 0.0
                if mpu.get_tensor_model_parallel_rank() == 0:
                    total.add_(value.detach().double())
                # the denominator is the whole batch's: named once, on one rank
                share = 0 if counted or not first_rank else count
                counted = True
                return value, torch.tensor(share, dtype=torch.int, device=self.device), {}

            return hidden, loss

        with torch.set_grad_enabled(train):
            self._schedule(
                forward_step_func=forward,
                data_iterator=iter(streams),
                model=[self.ddp],
                num_microbatches=len(streams),
                seq_length=len(streams[0].ids_s) * self.layout.context,
                micro_batch_size=1,
                forward_only=not train,
            )
        if self.replay is not None:
            self.replay.clear()
        dist.all_reduce(total)
        return total.item()

    def _own_routes(self, stream: Stream) -> torch.Tensor | None:
        """Routes of the tokens that this rank's routers see: sequence parallelism cuts them as it cuts activations."""
        routes = stream.routed_sLK
        if routes is None or not self.layout.sequence_parallel:
            return routes
        return routes.chunk(self.layout.tensor)[mpu.get_tensor_model_parallel_rank()]

    def hidden(self, output: torch.Tensor, stream: Stream, *, vocabulary: bool) -> torch.Tensor:
        """[N, H]: the states that a head will read."""
        return modules.whole_hidden(self.raw, output, vocabulary=vocabulary).index_select(0, stream.rows_N)


def _packed(stream: Stream) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=stream.ends,
        cu_seqlens_kv=stream.ends,
        max_seqlen_q=stream.longest,
        max_seqlen_kv=stream.longest,
    )
