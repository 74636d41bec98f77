"""The settings that the launch form shows, with what they mean. All others are reached by "key = value" lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    path: str
    label: str
    help: str = ""
    source: str = "ours"


def _s(path: str, label: str, help: str = "", source: str = "ours") -> Setting:
    return Setting(path=path, label=label, help=help, source=source)


CYCLE = (
    _s("name", "Name", "Shown in every list."),
    _s("seed", "Seed", "Of everything random: the same seed gives the same digests on one machine type."),
    _s("rounds", "Rounds", "RSR and RPR pairs; each adds two checkpoints.", "spec §2"),
)
DATA = (
    _s(
        "pool", "Training pool", '"embedded", or a folder of tasks in Harbor layout below a folder of RSI_FOLDER_ROOTS.'
    ),
    _s("pool_size", "Pool size", "Generated tasks; embedded pool only."),
    _s(
        "validation_suite",
        "Validation suite",
        "Protected: checkpoints are chosen on it, never on a reported suite.",
        "spec §8",
    ),
    _s("validation_size", "Validation size", "Tasks; embedded suite only."),
    _s("reported_suites", "Reported suites", "Separated by commas: embedded:heldout-names, or folders."),
    _s("reported_size", "Reported size", "Tasks of each embedded suite."),
    _s("validate.attempts_per_task", "Validation attempts a task"),
    _s("evaluate.attempts_per_task", "Reported attempts a task", "k of Mean@k.", "spec §8"),
    _s("evaluate.n_tasks", "Reported tasks", "A fixed prefix, the same for every checkpoint. Empty: the whole suite."),
)
ROLLOUT = (
    _s(
        "sampler.backend",
        "Sampler",
        "embedded: the model in the worker's own process. sglang: the servers of RSI_SGLANG_URLS; equal seeds then promise no "
        "equal digests.",
    ),
    _s(
        "rollout.harness", "Harness", "shell: one command a turn; terminus2: JSON keystrokes and compaction.", "spec §7"
    ),
    _s("rollout.max_turns", "Turns at most", "Empty: each task's own limit.", "spec §7"),
    _s("rollout.max_context_tokens", "Context tokens", "Input limit.", "spec §7"),
    _s("rollout.wave_size", "Wave size", "Attempts decoded together. A pause takes effect between waves."),
)
RSR = (
    _s("explore.attempts_per_task", "Explore attempts a task", "K.", "spec §2.1"),
    _s("explore.draw.n_tasks", "Explored tasks", "Empty: the whole pool."),
    _s(
        "explore.draw.stratum_weights",
        "Strata of explored tasks",
        "Relative weights, e.g. easy = 2, hard = 1. Empty: as the pool has them.",
    ),
    _s("rewrite.planner", "Planner", '"actor", or the folder of another model.', "spec §2.1"),
    _s("rewrite.runbooks_per_task", "Runbooks a task"),
    _s("rewrite.max_pass_rate", "Pass rate at most", "Only tasks that are solved at most this often are rewritten."),
    _s(
        "review.policy",
        "Review policy",
        '"human": the cycle suspends after the automatic leak checks, and people decide.',
        "spec §2.1",
    ),
    _s("review.required_reviewers", "Verdicts a runbook", "How many reviewers must agree."),
    _s("review.max_lines", "Runbook lines at most"),
    _s("replay.attempts_per_runbook", "Replays a runbook", "M.", "spec §2.1"),
    _s("replay.only_faithful", "Only faithful replays", "No turn beyond the runbook, no failed command."),
    _s("replay.control_runbooks", "Control runbooks", "Also replayed with no runbook and with another task's."),
    _s("distil.lr", "Distillation learning rate"),
    _s("distil.epochs", "Epochs"),
    _s("distil.batch_size", "Batch size"),
    _s("distil.clean_sampling", "Clean sampling", "One demonstration a task, or all of them.", "spec §2.1"),
    _s("distil.candidates", "Candidates", 'Chosen on validation: "parent", "midpoint", "epoch-N", "last".'),
)
RPR = (
    _s("reward.kind", "Reward", "", "spec §4"),
    _s("reward.quantile", "Quantile of a family's scale", "", "spec §4.2"),
    _s("reward.recalibrate", "Recalibrate families", "", "spec §4.5"),
    _s("reward.online", "Scales follow the batches", "Instead of being frozen for the phase.", "spec §4.5"),
    _s("profile.draw.n_tasks", "Profiled tasks", "Empty: the whole pool.", "spec §4.5"),
    _s("warmup.lr", "Warm-up learning rate", "Of the critic, once, before RPR-1.", "spec §2.2"),
    _s(
        "inherit_critic",
        "Inherit the critic",
        "Carried through RSR unchanged, then calibrated by exactly four critic-only updates.",
        "spec §2.3",
    ),
    _s("joint_steps", "Joint steps", "", "spec §2.3"),
    _s("keep_steps", "Candidates", "Steps whose checkpoints compete on validation. Empty: the last one."),
    _s("global_batch_size", "Batch size", "Attempts a step.", "spec §2.3"),
    _s("over_sampling_batch_size", "Oversampled to", "The slow tail is cut; at least the batch size.", "spec §7"),
    _s("complete_surplus_every", "Complete the surplus every", "n-th step, to see what cutting it shifts.", "spec §7"),
    _s("draw.n_tasks", "Tasks", "Empty: the whole pool."),
    _s("draw.stratum_weights", "Strata", "Relative weights. Empty: as the pool has them."),
    _s("max_new_tokens", "Tokens a turn", "", "spec §7"),
    _s("actor_lr", "Actor learning rate", "", "spec §2.3"),
    _s("critic_lr", "Critic learning rate", "", "spec §2.3"),
    _s("eps_clip", "Clip below", "ε_l: ratios stay above 1 − ε_l.", "spec §5"),
    _s("eps_clip_high", "Clip above", "ε_h: ratios stay below 1 + ε_h.", "spec §5"),
    _s("value_clip", "Value clip", "ε_V.", "spec §5"),
    _s("actor_clip_grad", "Actor gradient norm at most", "", "spec §2.3"),
    _s("critic_clip_grad", "Critic gradient norm at most", "", "spec §2.3"),
    _s("gamma_turn", "γ a turn", "", "spec §3.2"),
    _s("lambda_turn", "λ a turn", "", "spec §3.2"),
    _s("whiten_advantages", "Whiten advantages", "", "spec §5"),
    _s("keep_log_probs", "Keep the learner's log-probabilities", "For the token view; one more actor forward a step."),
    _s("time_limit", "Attempts out of time", "", "spec §3.3"),
    _s("handover", "Summaries", "How value is handed over a summary.", "spec §3.4"),
    _s("ev_alarm_steps", "A critic is stale after", "Joint steps in a row with EV < 0.", "spec §3.5"),
    _s("ev_alarm", "What a stale critic does", "Page somebody, add critic-only updates, or stop the stage."),
)
LEARNER = (
    _s("learner.max_tokens_per_gpu", "Tokens a micro-batch", "Of one device."),
    _s("learner.dtype", "Number format"),
    _s("learner.num_threads", "Threads", "Part of the digest claim. Empty: as torch has it."),
)
