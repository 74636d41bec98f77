"""The three services that a stage sees. It never knows which implementation it has.

`Sampler` and `Sandbox` are asynchronous (many attempts wait at once); `Learner` is synchronous (one device, one update).
Names follow SGLang (`input_ids`, `sampling_params`, `output_token_logprobs`, `weight_version`) and slime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from stages.domain import CheckResult, Task, Verdict

R = TypeVar("R")

# --------------------------------------------------------------------------- sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int = 0  # every request has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    rid: str  # one attempt keeps one rid: its cache is reused while input_ids extends what is cached
    input_ids: Sequence[int]
    sampling_params: SamplingParams
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateAnswer:
    rid: str
    output_ids: tuple[int, ...]  # the stop token included
    output_token_logprobs: tuple[float, ...]  # of the sampled ids: log_softmax(logits / T), full vocabulary
    finish_reason: str  # "stop", "length" or "abort"
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    output_token_sampling_logprobs: tuple[float, ...] | None = None  # over the top-p/top-k support
    routed_experts: np.ndarray | None = None  # int32 [prompt + completion - 1 - start_len, L, K]


class Sampler(Protocol):
    vocab_size: int
    context_len: int
    weight_version: str

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateAnswer]:
        """Answers in request order. A wave: all requests of one call are decoded together."""
        ...

    async def release(self, rids: Sequence[str]) -> None:
        """Forget the caches of finished attempts. Unknown rids are ignored."""
        ...

    async def update_weights_from_disk(self, model_path: Path, weight_version: str) -> None: ...

    async def aclose(self) -> None: ...


# --------------------------------------------------------------------------- learner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSequence:
    """One segment as the learner needs it. All arrays have length T and are aligned with `tokens`.

    Position j of `advantages`, `value_targets`, `old_values` and `rollout_log_probs` belongs to sampled token j, whose
    value and log-probability are read at hidden state j-1 (the prefix before it). Entries outside `loss_mask` are ignored.
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    rollout_log_probs: np.ndarray  # float32 [T]
    advantages: np.ndarray | None = None  # float32 [T]
    value_targets: np.ndarray | None = None  # float32 [T]
    old_values: np.ndarray | None = None  # float32 [T]
    rollout_routed_experts: np.ndarray | None = None  # int32 [T-1, L, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_grad: float = 1.0


class Learner(Protocol):
    """Actor and critic with their optimisers, colocated. Every `*_step` is exactly one optimiser update."""

    def load(self, actor_dir: Path, critic_dir: Path | None) -> None:
        """Weights only; fresh optimisers."""
        ...

    def init_critic(self) -> None:
        """Critic = the actor's backbone with a zero value head (spec §2.2)."""
        ...

    def start_phase(self, *, actor: OptimConfig | None, critic: OptimConfig | None, keep_moments: bool = False) -> None:
        """New optimiser moments for a phase (or, `keep_moments`, the old ones); None leaves that model frozen."""
        ...

    def distil_step(
        self, batch: Sequence[TrainSequence], *, lr: float, trajectories: int | None = None
    ) -> dict[str, float | None]:
        """One update of −Σ_j m_j log π(y_j|h_j): sum over tokens, mean over trajectories (spec §2.1).

        `trajectories`: how many the segments of the batch came from; None: each segment is one.
        """
        ...

    def values(self, batch: Sequence[TrainSequence]) -> list[np.ndarray]:
        """v_j at every masked position, float32 [T] each (0 elsewhere), no gradient."""
        ...

    def log_probs(self, batch: Sequence[TrainSequence], *, temperature: float = 1.0) -> list[np.ndarray]:
        """log π_train(y_j|h_j) at every masked position, float32 [T] each, no gradient."""
        ...

    def critic_step(self, batch: Sequence[TrainSequence], *, value_clip: float) -> dict[str, float | None]: ...

    def actor_step(
        self, batch: Sequence[TrainSequence], *, eps_clip: float, eps_clip_high: float, temperature: float = 1.0
    ) -> dict[str, float | None]: ...

    def save(self, path: Path) -> tuple[str, str | None]:
        """Atomic folder {actor/, critic/, optimiser state, manifest.json}; returns (actor digest, critic digest)."""
        ...

    def save_actor_only(self, path: Path, critic_from: Path | None) -> tuple[str, str | None]:
        """As `save`, with the critic folder `critic_from` carried over byte for byte (RSR: Δφ = 0), or none."""
        ...

    def save_midpoint(self, first_actor: Path, second_actor: Path, path: Path, critic_from: Path | None) -> str:
        """Atomic folder: actor/ is the mean of two actors' weights, critic/ a copy of `critic_from`. Returns the actor's
        digest and changes no loaded model."""
        ...

    def restore(self, path: Path) -> None:
        """Everything that `save` wrote, so that the next step is the one that would have followed."""
        ...

    def close(self) -> None:
        """Leave no process behind. Idempotent."""
        ...


# --------------------------------------------------------------------------- sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """One command in the persistent shell."""

    output: bytes  # stdout and stderr as they came, head and tail kept beyond the cap
    exit_code: int | None  # None: timed out, or the shell ended
    timed_out: bool = False
    restarted: bool = False  # bash had to be started anew; cwd and environment were kept
    truncated_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    verdict: Verdict
    checks: tuple[CheckResult, ...] = ()
    flags: tuple[str, ...] = ()
    log: str = ""
    duration_s: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)  # as the verifier wrote them; empty without a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One row of `rsi doctor`: what this machine's sandbox can enforce, tested, not assumed."""

    name: str
    enforced: bool
    detail: str


class Shell(Protocol):
    """All that a harness may do in a sandbox."""

    async def run(self, command: str, *, timeout_s: float | None = None) -> CommandResult: ...


class Sandbox(Shell, Protocol):
    """One attempt's machine: fresh filesystem, one persistent bash, no network."""

    async def verify(self) -> VerifierReport:
        """Kill every process of the agent, then run the task's tests in a second, fresh sandbox on the final state."""
        ...

    async def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        ...


class SandboxBackend(Protocol):
    name: str

    async def start(self) -> None:
        """Raises SandboxUnavailable where the machine cannot run it."""
        ...

    async def open(self, task: Task) -> Sandbox: ...

    async def capabilities(self) -> Sequence[Capability]: ...

    async def aclose(self) -> None: ...


class Backends:
    """What a stage is given, and the event loop on which its asynchronous services live.

    Stages are plain generators; `run` drives the loop for as long as one call lasts. Use it as a context manager: on exit
    the sandboxes, the sampler and the learner are closed.
    """

    def __init__(self, *, sampler: Sampler, learner: Learner, sandbox: SandboxBackend) -> None:
        self.sampler, self.learner, self.sandbox = sampler, learner, sandbox
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._runner.run(coroutine)

    def __enter__(self) -> Backends:
        self.run(self.sandbox.start())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self.sandbox.aclose())
            self.run(self.sampler.aclose())
        finally:
            self.learner.close()
            self._runner.close()
