"""One fresh batch of attempts, scored by the frozen pre-update critic: what a local step trains on (spec §3, §5, §7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stages.advantage import (
    Estimator,
    Handover,
    SegmentNodes,
    TimeLimit,
    TrajectoryAdvantages,
    node_positions,
    segment_nodes,
    trajectory_advantages,
    whiten,
)
from stages.backends.protocols import Learner, TrainSequence
from stages.certificate import Certificate, certify
from stages.config import RPRConfig, SamplingConfig
from stages.context import StageContext, attempts
from stages.domain import EndReason, Phase, Segment, Task, Trajectory
from stages.errors import BatchError
from stages.handover import ScoredAttempt, handover_metrics
from stages.oversampling import Race, kept_indices
from stages.records import Record, SurplusDropped, TrainedOn
from stages.rewards import RewardModel
from stages.rollout import AttemptSpec
from stages.tasks.draw import draw_tasks
from stages.values import EVBreakdown

TRUNCATED = frozenset({EndReason.TURN_CAP, EndReason.TOKEN_CAP, EndReason.CONTEXT_OVERFLOW, EndReason.TIME_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A global batch with everything frozen before its update."""

    trajectories: tuple[Trajectory, ...]
    sequences: tuple[TrainSequence, ...]  # one per trained segment
    trained_on: tuple[TrainedOn, ...]  # one per trajectory
    metrics: dict[str, float | None]
    certificate: Certificate  # the gap still missing


def collect(
    ctx: StageContext, config: RPRConfig, pool: Sequence[Task], phase: Phase, step: int
) -> Generator[Record, None, tuple[list[Trajectory], dict[str, float | None]]]:
    """The first `global_batch_size` finished attempts that have a verdict, and what is logged about the others.

    The surplus is cancelled once the batch is full; every `complete_surplus_every`-th step it is completed instead, so that
    what dropping it shifts can be estimated. Either way it is no sample (spec §7).

    Finish order is (turns, attempt index): an attempt of fewer turns finishes in an earlier wave turn, and timing plays
    no part. Raises BatchError below `min_batch_fraction`.
    """
    n = config.over_sampling_batch_size
    prompts = -(-n // config.n_samples_per_prompt)
    tasks = draw_tasks(pool, config.draw, n=prompts, seed=(*ctx.seed, phase, step))
    specs = [
        AttemptSpec(task=task, attempt=a, key=(i, a))
        for i, task in enumerate(tasks)
        for a in range(config.n_samples_per_prompt)
    ][:n]
    completed = step % config.complete_surplus_every == 0
    race = Race(config.global_batch_size) if n > config.global_batch_size and not completed else None
    sampling = SamplingConfig(max_new_tokens=ctx.max_new_tokens)
    done = yield from attempts(ctx, phase, specs, sampling, step=step, race=race)
    counts = [t.verdict.counts for t in done]
    kept = kept_indices([len(t.turns) for t in done], counts, config.global_batch_size)
    if len(kept) < config.min_batch_fraction * config.global_batch_size:
        raise BatchError(
            f"{phase.value} step {step}: only {len(kept)} of {config.global_batch_size} attempts have a verdict "
            f"(min_batch_fraction {config.min_batch_fraction}). Look at the sandbox and the verifier logs; no weight was changed."
        )
    chosen = set(kept)
    cut = {i for i, t in enumerate(done) if race is not None and t.end_reason is EndReason.CANCELLED}
    dropped = tuple(t.id for i, t in enumerate(done) if (counts[i] or i in cut) and i not in chosen)
    if dropped:
        yield SurplusDropped(phase=phase, step=step, trajectory_ids=dropped, completed=not cut)
    metrics: dict[str, float | None] = {
        "rollout/masked": 1 - sum(counts) / (len(done) - len(cut)),
        "rollout/dropped": float(len(dropped)),
    }
    return [done[i] for i in kept], metrics


def score(learner: Learner, config: RPRConfig, trajectories: Sequence[Trajectory], reward: RewardModel) -> Batch:
    """Values, rewards, advantages and targets of a batch. Nothing is updated.

    Raises DriftError when a loss-region token is not what the sampler returned.
    """
    certificate = certify(trajectories)
    rewards = [reward.score(t) for t in trajectories]
    # a sub-call that is not trained on has no node (spec §3.4)
    segments = [(i, s) for i, t in enumerate(trajectories) for s in t.segments if s.loss_mask.any()]
    plain = [_sequence(s) for _, s in segments]
    values = learner.values([_valued(s, config.estimator) for s in plain])
    ends = _end_values(learner, config, trajectories, segments)
    nodes: list[list[SegmentNodes]] = [[] for _ in trajectories]
    for (i, segment), v, end in zip(segments, values, ends, strict=True):
        nodes[i].append(segment_nodes(segment, v, end_value=end, estimator=config.estimator))
    sequences: list[TrainSequence] = []
    ev = EVBreakdown()
    excluded = 0
    at = 0
    spans: list[tuple[int, int]] = []  # of `sequences`, per trajectory
    for trajectory, own, r in zip(trajectories, nodes, rewards, strict=True):
        result = _advantages(config, own, r, trajectory)
        mine, at = list(zip(plain[at : at + len(own)], values[at : at + len(own)], strict=True)), at + len(own)
        spans.append((len(sequences), len(sequences) + (0 if result.excluded else len(own))))
        if result.excluded:
            excluded += 1
            continue
        for seg, adv, (sequence, v) in zip(own, result.segments, mine, strict=True):
            ev.add(family=trajectory.family, turn_ids=seg.turn_ids, values=seg.values, returns=adv.returns)
            sequences.append(
                replace(
                    sequence,
                    advantages=seg.to_tokens(adv.advantages),
                    value_targets=seg.to_tokens(adv.value_targets),
                    old_values=v,
                )
            )
    if config.whiten_advantages:
        white = whiten([s.advantages[s.loss_mask] for s in sequences if s.advantages is not None])
        for i, w in enumerate(white):
            spread = np.zeros(len(sequences[i].tokens), dtype=np.float32)
            spread[sequences[i].loss_mask] = w
            sequences[i] = replace(sequences[i], advantages=spread)
    return Batch(
        trajectories=tuple(trajectories),
        sequences=tuple(sequences),
        trained_on=tuple(
            TrainedOn(
                trajectory_id=t.id,
                reward=r,
                values=tuple(s.old_values for s in sequences[a:b] if s.old_values is not None),
                advantages=tuple(s.advantages for s in sequences[a:b] if s.advantages is not None),
            )
            for t, r, (a, b) in zip(trajectories, rewards, spans, strict=True)
        ),
        metrics={
            **ev.metrics(),
            **_rollout_metrics(trajectories, rewards),
            **certificate.metrics(),
            **_handover_metrics(config, trajectories, nodes, rewards),
            "train/excluded": float(excluded),
            **({} if config.estimator is Estimator.TB_GAE else {"advantage/lambda_token": config.lambda_token}),
        },
        certificate=certificate,
    )


def _valued(sequence: TrainSequence, estimator: Estimator) -> TrainSequence:
    """The tokens whose values are needed. `token_all` passes through observations too; the critic never trains on them."""
    if estimator is not Estimator.TOKEN_ALL:
        return sequence
    mask = np.zeros(len(sequence.tokens), dtype=bool)
    mask[node_positions(sequence.loss_mask, estimator)] = True
    return replace(sequence, loss_mask=mask)


def with_log_probs(learner: Learner, batch: Batch) -> Batch:
    """The batch with the learner's log-probabilities of its tokens before the update, for the gap of each (spec §6.3)."""
    found = iter(learner.log_probs(batch.sequences, temperature=1.0))
    kept = tuple(replace(t, log_probs=tuple(next(found) for _ in t.advantages)) for t in batch.trained_on)
    return replace(batch, trained_on=kept)


def _sequence(segment: Segment) -> TrainSequence:
    return TrainSequence(
        tokens=segment.tokens,
        loss_mask=segment.loss_mask,
        rollout_log_probs=segment.rollout_log_probs,
        rollout_routed_experts=segment.rollout_routed_experts,
    )


def _end_values(
    learner: Learner, config: RPRConfig, trajectories: Sequence[Trajectory], segments: Sequence[tuple[int, Segment]]
) -> list[float | None]:
    """V of the final prefix, where it is needed: truncated attempts that bootstrap, and summarised segments."""
    counts = Counter(i for i, _ in segments)
    wanted = [
        counts[i] > 1 or (config.time_limit == "bootstrap" and trajectories[i].end_reason in TRUNCATED)
        for i, _ in segments
    ]
    probes = [
        TrainSequence(  # one more token, whose prefix is the whole segment
            tokens=np.append(s.tokens, np.int32(0)),
            loss_mask=np.append(np.zeros(len(s.tokens), dtype=bool), True),
            rollout_log_probs=np.zeros(len(s.tokens) + 1, dtype=np.float32),
        )
        for (_, s), want in zip(segments, wanted, strict=True)
        if want
    ]
    found = iter(learner.values(probes)) if probes else iter(())
    return [float(next(found)[-1]) if want else None for want in wanted]


def _advantages(
    config: RPRConfig, nodes: Sequence[SegmentNodes], reward: float, trajectory: Trajectory
) -> TrajectoryAdvantages:
    gamma, lam = config.clocks
    return trajectory_advantages(
        nodes,
        reward=reward,
        gamma=gamma,
        lam=lam,
        estimator=config.estimator,
        handover=Handover(config.handover),
        truncated=trajectory.end_reason in TRUNCATED,
        time_limit=TimeLimit(config.time_limit),
    )


def _handover_metrics(
    config: RPRConfig,
    trajectories: Sequence[Trajectory],
    nodes: Sequence[Sequence[SegmentNodes]],
    rewards: Sequence[float],
) -> dict[str, float | None]:
    """Metrics with and without the hand-over (spec §3.4); {} at once where no attempt was summarised."""
    summarised = [
        ScoredAttempt(segments=tuple(own), reward=r, truncated=t.end_reason in TRUNCATED)
        for t, own, r in zip(trajectories, nodes, rewards, strict=True)
        if len(own) > 1
    ]
    if not summarised:
        return {}
    gamma, lam = config.clocks
    return handover_metrics(
        summarised, gamma=gamma, lam=lam, estimator=config.estimator, time_limit=TimeLimit(config.time_limit)
    )


def _rollout_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float | None]:
    n = len(trajectories)
    failed = sum(r for t, r in zip(trajectories, rewards, strict=True) if not t.strict)
    return {
        "rollout/attempts": float(n),
        "rollout/success": sum(t.strict for t in trajectories) / n,
        "rollout/reward_mean": sum(rewards) / n,
        "rollout/failure_reward_share": failed / sum(rewards) if sum(rewards) else None,
        "rollout/turns_mean": sum(len(t.turns) for t in trajectories) / n,
        "rollout/tokens_mean": sum(t.sampled_tokens for t in trajectories) / n,
        "rollout/truncated": sum(t.end_reason in TRUNCATED for t in trajectories) / n,
    }
