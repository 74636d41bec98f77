"""Stage settings. Every default is spec §2.3's or is marked "ours"; recipes override them and say why.

Light on purpose: importing this module loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.advantage import Estimator
from stages.domain import Stratum
from stages.rewards import Progress, RewardKind

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
HarnessName = Literal["shell", "terminus2"]


class Strict(BaseModel):
    """Frozen, and an unknown key is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(Strict):
    """How one kind of call is sampled. Training needs temperature and top-p 1 (spec §5)."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: PositiveInt = 8192  # spec §7: output tokens per turn


class RolloutConfig(Strict):
    """How attempts are run (spec §7)."""

    harness: HarnessName = "terminus2"
    max_turns: PositiveInt | None = None  # None: each task's own limit
    max_context_tokens: PositiveInt = 96_000  # input limit
    observation_chars: PositiveInt = 10_000
    wave_size: PositiveInt = 128  # attempts decoded together, in lockstep; ours
    lanes: PositiveInt = 2  # waves in flight: one decodes while the other's shells run; ours
    max_tokens_per_attempt: PositiveInt | None = None
    # terminus2: when to summarise. accumulated=n: the conversation has n tokens; free_below=n: fewer than n are left
    compaction: str = Field(default="accumulated=32000", pattern=r"^(off|(accumulated|free_below)=[1-9]\d{0,8})$")
    train_summaries: bool = False  # sub-calls are turns that are trained on (spec §3.4)
    sampler_threads: PositiveInt | None = None  # embedded sampler; None: as torch has it

    def compaction_at(self, context_len: int) -> int | None:
        """Tokens of a conversation from which on it is summarised; None: never."""
        rule, _, n = self.compaction.partition("=")
        if rule == "off":
            return None
        return int(n) if rule == "accumulated" else min(self.max_context_tokens, context_len) - int(n) + 1


class SamplerConfig(Strict):
    """Who samples. Where SGLang servers are is no part of a recipe: `RSI_SGLANG_URLS` (see `orchestrator.settings`)."""

    backend: Literal["embedded", "sglang"] = "embedded"
    timeout_s: float = Field(default=1800.0, gt=0)  # sglang: longest wait for one answer, and for one update of weights


class TaskDraw(Strict):
    """How tasks are drawn from the pool. Weights are relative; a stratum without a weight is not drawn."""

    n_tasks: PositiveInt | None = None  # None: the whole pool
    stratum_weights: dict[Stratum, float] | None = None  # None: as the pool has them


class ExploreConfig(Strict):
    draw: TaskDraw = TaskDraw()
    attempts_per_task: PositiveInt = 4  # K (spec §2.1)
    sampling: SamplingConfig = SamplingConfig()


class RewriteConfig(Strict):
    planner: str = "actor"  # or the folder of another model
    runbooks_per_task: PositiveInt = 1
    max_pass_rate: Fraction = 1.0  # explore only tasks whose success rate is at most this one; ours
    sampling: SamplingConfig = SamplingConfig(temperature=0.6)


class ReviewConfig(Strict):
    policy: Literal["auto", "human"] = "auto"
    model: Path | None = None  # folder of a reviewing model; None: rules and people only
    max_lines: PositiveInt = 40
    max_line_chars: PositiveInt = 400
    required_reviewers: PositiveInt = 1


class ReplayConfig(Strict):
    attempts_per_runbook: PositiveInt = 4  # M (spec §2.1)
    harness: HarnessName | None = None  # the target harness; None: rollout.harness
    sampling: SamplingConfig = SamplingConfig()
    only_faithful: bool = False  # keep only replays with no turn beyond the runbook and no failed command; ours
    control_runbooks: int = Field(default=0, ge=0)  # also replay this many with no and with another task's runbook


class DistilConfig(Strict):
    lr: float = Field(default=1e-6, gt=0)
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 32
    clean_sampling: Literal["per_task", "pooled"] = "per_task"
    distil_prompt: Literal["without_runbook", "as_executed"] = "without_runbook"
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear"] = "constant"
    clip_grad: float = Field(default=1.0, gt=0)
    candidates: tuple[str, ...] = ("last",)  # "parent", "epoch-N", "last", "midpoint": chosen on validation

    @model_validator(mode="after")
    def _candidates(self) -> DistilConfig:
        known = {"parent", "last", "midpoint", *(f"epoch-{i}" for i in range(1, self.epochs))}
        if not self.candidates or (unknown := set(self.candidates) - known):
            wrong = sorted(unknown) if self.candidates else "none"
            raise ValueError(f"candidates: {wrong}; with {self.epochs} epochs there are {', '.join(sorted(known))}")
        return self


class RSRConfig(Strict):
    explore: ExploreConfig = ExploreConfig()
    rewrite: RewriteConfig = RewriteConfig()
    review: ReviewConfig = ReviewConfig()
    replay: ReplayConfig = ReplayConfig()
    distil: DistilConfig = DistilConfig()


class RewardConfig(Strict):
    kind: RewardKind = RewardKind.FDR
    progress: Progress = Progress.RAW
    quantile: Fraction = 0.90
    d_min: float = Field(default=1.0, ge=0)
    min_attempts: PositiveInt = 5  # families with fewer profiles borrow their stratum's scale; ours
    recalibrate: bool = False  # D'_f = c_f · D_f (spec §4.5)
    online: bool = False  # scales follow each batch instead of being frozen for the phase (spec §4.5)
    online_alpha: float = Field(default=0.05, gt=0, le=1)
    online_min_attempts: PositiveInt = 20  # of a family in a batch; with fewer its scale stays
    drift_limit: float = Field(default=0.25, gt=0)  # |ΔD/D| since the phase began: above, the step alarms

    @model_validator(mode="after")
    def _online(self) -> RewardConfig:
        if self.online and not self.kind.needs_scales:
            raise ValueError(f"reward.online: {self.kind.value} has no family scales; only fdr and spr have")
        return self


class ProfileConfig(Strict):
    draw: TaskDraw = TaskDraw(n_tasks=2560)  # spec §4.5
    attempts_per_task: PositiveInt = 1


class WarmupConfig(Strict):
    """Critic warm-up, once, before RPR-1 (spec §2.2). It trains on the profiling attempts."""

    epochs: PositiveInt = 1
    batch_size: PositiveInt = 32
    lr: float = Field(default=1.5e-5, gt=0)


class RPRConfig(Strict):
    """Recipe of one RPR stage (spec §2.3, §5)."""

    reward: RewardConfig = RewardConfig()
    profile: ProfileConfig = ProfileConfig()
    warmup: WarmupConfig = WarmupConfig()
    inherit_critic: bool = True
    critic_reset: Literal["cold", "seed"] | None = (
        None  # instead of the parent's critic: zero head, or φ_seed (spec §2.4)
    )
    num_critic_only_steps: Literal[4] = 4
    calibrate: bool = True  # False leaves the four updates out: in experiments only
    joint_steps: PositiveInt = 20
    keep_steps: tuple[PositiveInt, ...] = ()  # candidates for selection; empty: the last step only
    draw: TaskDraw = TaskDraw()
    global_batch_size: PositiveInt = 256
    over_sampling_batch_size: PositiveInt = 288
    complete_surplus_every: PositiveInt = 10  # every n-th step the surplus is completed, to see what cutting it shifts
    min_batch_fraction: Fraction = 0.5
    n_samples_per_prompt: PositiveInt = 1
    max_new_tokens: PositiveInt = 8192  # output tokens per turn; training samples at temperature 1, top-p 1 (spec §5)
    actor_lr: float = Field(default=5e-7, gt=0)
    critic_lr: float = Field(default=1.5e-5, gt=0)
    eps_clip: float = Field(default=0.30, gt=0)
    eps_clip_high: float = Field(default=5.00, gt=0)
    value_clip: float = Field(default=4.00, gt=0)
    actor_clip_grad: float = Field(default=1.0, gt=0)
    critic_clip_grad: float = Field(default=100.0, gt=0)
    estimator: Estimator = Estimator.TB_GAE  # the token baselines are for experiments (spec §3.1)
    gamma_turn: Fraction = 1.0  # clocks of tb_gae
    lambda_turn: Fraction = 1.0
    gamma_token: Fraction = 1.0  # clocks of token_all and token_policy
    lambda_token: Fraction = 1.0
    lambda_token_per_turn: Fraction | None = None  # λ_token = this^(1 / mean nodes per turn of the profiling attempts)
    whiten_advantages: bool = False
    keep_log_probs: bool = False  # ours: the learner's log-probabilities of every token, one more actor forward a step
    time_limit: Literal["terminal", "bootstrap", "mask"] = "terminal"
    handover: Literal["full", "value_only", "none"] = "full"
    ev_alarm_steps: PositiveInt = 5  # joint steps in a row with EV < 0 that mean a stale critic; ours
    ev_alarm: Literal["page", "recalibrate", "stop"] = "page"  # recalibrate: four more critic-only updates, marked

    @model_validator(mode="after")
    def _sizes(self) -> RPRConfig:
        if self.over_sampling_batch_size < self.global_batch_size:
            raise ValueError("over_sampling_batch_size must be at least global_batch_size")
        if any(s > self.joint_steps for s in self.keep_steps):
            raise ValueError("keep_steps names a step beyond joint_steps")
        if self.critic_reset and not self.inherit_critic:
            raise ValueError(
                "inherit_critic = false warms a new critic up, critic_reset replaces it without: choose one"
            )
        if self.lambda_token_per_turn is not None and self.estimator is Estimator.TB_GAE:
            raise ValueError("lambda_token_per_turn is a clock of token_all and token_policy; tb_gae has lambda_turn")
        if self.lambda_token_per_turn is not None and self.lambda_token != 1.0:
            raise ValueError("give lambda_token or lambda_token_per_turn, not both")
        return self

    @property
    def critic_only_steps(self) -> int:
        """Calibration updates that this stage really makes."""
        return self.num_critic_only_steps if self.calibrate else 0

    @property
    def clocks(self) -> tuple[float, float]:
        """(γ, λ) of the chosen estimator: per turn for `tb_gae`, per token otherwise."""
        if self.estimator is Estimator.TB_GAE:
            return self.gamma_turn, self.lambda_turn
        return self.gamma_token, self.lambda_token

    def departures(self) -> tuple[str, ...]:
        """What makes this stage non-standard, for labels; () for the specification's own recipe."""
        found = []
        if not self.calibrate:
            found.append("no calibration")
        if self.critic_reset:
            found.append(f"critic reset: {self.critic_reset}")
        if self.ev_alarm == "recalibrate":
            found.append("critic recalibrated when it is stale")
        if self.reward.online:
            found.append("family scales follow the batches")
        if self.estimator is not Estimator.TB_GAE:
            found.append(f"advantages: {self.estimator.value}")
        return tuple(found)


class EvaluateConfig(Strict):
    """Mean@k (spec §7, §8)."""

    attempts_per_task: PositiveInt = 3
    sampling: SamplingConfig = SamplingConfig(temperature=0.6, top_p=0.95)
    n_tasks: PositiveInt | None = None  # a fixed prefix of the suite, same for every checkpoint


class LayoutConfig(Strict):
    """How the Megatron learner is spread over processes (GPUs); Megatron's and slime's names."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False

    @property
    def processes(self) -> int:
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        return model * self.data_parallel_size


class LearnerConfig(Strict):
    backend: Literal["torch", "megatron"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"  # "cuda": the cycle goes to the GPU pool
    gpu_class: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9_-]{0,39})?$")  # a queue of the GPU pool; empty: any
    layout: LayoutConfig = LayoutConfig()  # megatron only
    max_tokens_per_gpu: PositiveInt = 8192
    log_probs_chunk_size: PositiveInt = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    offload: bool = False  # the model that does not compute, and its optimiser, wait in host memory
    num_threads: PositiveInt | None = None
    use_rollout_routing_replay: bool = True

    @model_validator(mode="after")
    def _layout(self) -> LearnerConfig:
        layout = self.layout
        if self.gpu_class and self.device != "cuda":
            raise ValueError('learner.gpu_class chooses among GPU workers; set learner.device = "cuda" with it')
        if self.backend == "torch" and layout.processes > 1:
            raise ValueError(f'learner.layout asks for {layout.processes} processes; backend = "torch" has one')
        if layout.sequence_parallel and layout.tensor_model_parallel_size == 1:
            raise ValueError("learner.layout.sequence_parallel needs tensor_model_parallel_size > 1")
        experts = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
        if layout.processes % (experts * layout.pipeline_model_parallel_size):
            raise ValueError(
                f"learner.layout: {layout.processes} processes cannot hold groups of expert_model_parallel_size × "
                f"expert_tensor_parallel_size × pipeline_model_parallel_size = "
                f"{experts * layout.pipeline_model_parallel_size}"
            )
        return self


class ForkConfig(Strict):
    """Where a cycle begins instead of at Base: after a finished stage of another cycle."""

    cycle: PositiveInt
    stage: str  # e.g. "RSR-2"; its checkpoint is the parent of this cycle's first stage


class CycleConfig(Strict):
    """One cycle: the loop from Base to the last checkpoint."""

    name: str = Field(min_length=1, max_length=120)
    recipe: str = "paper"
    seed: int = Field(default=0, ge=0, lt=2**31)
    rounds: int = Field(default=2, ge=1, le=8)
    direct_ppo: bool = False  # no RSR stages: RPR straight from Base (spec §2.4)
    fork: ForkConfig | None = None  # None: from Base
    last_stage: str = ""  # stop after this stage; empty: after the last one
    experiment: str = ""  # "NAME/ARM" of the experiment that it belongs to
    model: Path | None = None  # Hugging Face folder; None: the model that ships with the package
    pool: Path | Literal["embedded"] = "embedded"
    pool_size: PositiveInt = 1200  # embedded pool only
    validation_suite: Path | Literal["embedded"] = "embedded"
    validation_size: PositiveInt = 60  # embedded suites only
    reported_suites: tuple[str, ...] = ("embedded:heldout-names", "embedded:heldout-combinations")
    reported_size: PositiveInt = 40  # embedded suites only
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    learner: LearnerConfig = LearnerConfig()
    rsr: tuple[RSRConfig, ...] = (RSRConfig(),)  # round r uses entry min(r, last)
    rpr: tuple[RPRConfig, ...] = (RPRConfig(),)
    validate_: EvaluateConfig = Field(default=EvaluateConfig(attempts_per_task=1), alias="validate")
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _lists(self) -> CycleConfig:
        if not self.rsr or not self.rpr:
            raise ValueError("rsr and rpr each need at least one entry")
        if self.pool != "embedded" and self.validation_suite == "embedded":
            raise ValueError(
                "the pool is yours, so name your own validation_suite (in the recipe, or --set validation_suite=DIR): "
                "what selects must be like what trains"
            )
        if not self.experiment and not all(r.calibrate for r in self.rpr):
            raise ValueError(
                "rpr.calibrate = false: exactly four critic-only updates are the contract (spec §2.3); only an experiment's "
                "arm may leave them out (`rsi experiment run`)"
            )
        return self

    def uses_harness(self, name: HarnessName) -> bool:
        """Whether any phase runs attempts in this harness."""
        return name in (self.rollout.harness, *(r.replay.harness for r in self.rsr))

    def rsr_of(self, round_: int) -> RSRConfig:
        """Settings of round 1, 2, …"""
        return self.rsr[min(round_, len(self.rsr)) - 1]

    def rpr_of(self, round_: int) -> RPRConfig:
        return self.rpr[min(round_, len(self.rpr)) - 1]
