"""The two stages, phase by phase (spec §2). Pure composition: what is finished already comes from `Finished`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.backends.learner.checkpoint import MANIFEST, digest_weights
from stages.clock import with_token_clock
from stages.config import EvaluateConfig, RPRConfig, RSRConfig
from stages.context import StageContext, serve
from stages.distil import distil
from stages.domain import Decision, FamilyScale, Phase, Runbook, Task, Trajectory
from stages.errors import CheckpointError, SamplerError, StopRequested
from stages.evaluate import Option, select
from stages.explore import explore
from stages.profile import profile, reward_model
from stages.records import CheckpointSaved, PhaseDone, PhaseStarted, Progress, Record, RunbookReviewed
from stages.refine import refine
from stages.replay import Demonstration, replay
from stages.review import ModelReviewer, PolicyMode, ReviewContext, review_runbook, review_with_model
from stages.rewrite import Planner, rewrite
from stages.tasks.harbor import Suite
from stages.warmup import cold_critic, warm_up

SEED_CRITIC = "seed critic"  # what the checkpoint of a warm-up is called


class ReviewPending(StopRequested):
    """The human gate is open: people have not yet given the verdicts that the recipe asks for."""


class Finished(Protocol):
    """What earlier, interrupted runs of this stage completed. Every method returns None for a phase that is not done."""

    def trajectories(self, phase: Phase) -> list[Trajectory] | None: ...

    def runbooks(self) -> list[Runbook] | None: ...

    def approved(self) -> set[str] | None:
        """Ids of the runbooks that passed the whole gate, people included. From then on it takes no verdict."""
        ...

    def demonstrations(self) -> list[Demonstration] | None: ...

    def scales(self) -> tuple[FamilyScale, ...] | None: ...

    def selected(self, phase: Phase) -> str | None:
        """Label of the candidate that was kept."""
        ...


class NothingFinished:
    """A stage that starts afresh."""

    def trajectories(self, phase: Phase) -> list[Trajectory] | None:
        return None

    def runbooks(self) -> list[Runbook] | None:
        return None

    def approved(self) -> set[str] | None:
        return None

    def demonstrations(self) -> list[Demonstration] | None:
        return None

    def scales(self) -> tuple[FamilyScale, ...] | None:
        return None

    def selected(self, phase: Phase) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint's two folders; the critic is None before the first warm-up."""

    actor: Path
    critic: Path | None


def run_rsr(
    ctx: StageContext,
    config: RSRConfig,
    validate: EvaluateConfig,
    *,
    name: str,
    parent: Weights,
    parent_name: str,
    pool: Sequence[Task],
    validation: Suite,
    planner: Planner | None = None,
    reviewer: ModelReviewer | None = None,
    finished: Finished | None = None,
) -> Generator[Record, None, Weights]:
    """RSR-k: explore, rewrite, review, replay, distil (spec §2.1). The critic's folder is passed on untouched.

    Raises ReviewPending when the recipe wants people's verdicts and they are not there yet.
    """
    finished = finished or NothingFinished()
    tasks: Mapping[str, Task] = {t.id: t for t in pool}
    demonstrations = finished.demonstrations()
    if demonstrations is None:
        serve(ctx, parent.actor, parent_name)
        books = yield from _books(ctx, config, pool, tasks, planner, reviewer, parent_name, finished)
        demonstrations = yield from replay(ctx, config.replay, books, tasks)
    chosen = yield from distil(
        ctx,
        config.distil,
        validate,
        demonstrations,
        tasks,
        validation,
        actor_dir=parent.actor,
        critic_dir=parent.critic,
        selected=finished.selected(Phase.DISTIL),
        harness=config.replay.harness,
    )
    critic = parent.critic if chosen.is_parent else _critic_beside(chosen.actor_dir)
    if _digest(critic) != _digest(parent.critic):
        raise CheckpointError(
            f"{name}: the critic beside {chosen.actor_dir} is not its parent's; RSR must not touch it"
        )
    yield _checkpoint(name, chosen.actor_dir, critic, parent_kept=chosen.is_parent)
    return Weights(actor=chosen.actor_dir, critic=critic)


def _books(
    ctx: StageContext,
    config: RSRConfig,
    pool: Sequence[Task],
    tasks: Mapping[str, Task],
    planner: Planner | None,
    reviewer: ModelReviewer | None,
    parent_name: str,
    finished: Finished,
) -> Generator[Record, None, list[Runbook]]:
    """Runbooks that passed the leak gate."""
    explored = finished.trajectories(Phase.EXPLORE)
    if explored is None:
        explored = yield from explore(ctx, config.explore, pool)
    books = finished.runbooks()
    if books is None:
        planner = planner or Planner(name=parent_name, sampler=ctx.backends.sampler, chat=ctx.chat)
        books = yield from rewrite(ctx, config.rewrite, explored, tasks, planner)
    approved = finished.approved()
    if approved is None:
        approved = yield from _review(ctx, config, books, explored, tasks, reviewer)
        decided = finished.approved()  # with what people said; in mode `auto`, too, they may speak meanwhile
        if decided is None and config.review.policy == "human":
            raise ReviewPending(
                f"{len(books)} runbooks wait for people's verdicts; the cycle goes on by itself afterwards"
            )
        approved = approved if decided is None else decided
    return [b for b in books if b.id in approved]


def _review(
    ctx: StageContext,
    config: RSRConfig,
    books: Sequence[Runbook],
    explored: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    reviewer: ModelReviewer | None,
) -> Generator[Record, None, set[str]]:
    """Rules first, then the model if there is one. With policy `human`, people's verdicts follow (spec §2.1)."""
    yield PhaseStarted(phase=Phase.REVIEW, total=len(books))
    sources = {t.id: t for t in explored}
    approved: set[str] = set()
    findings = unanswered = 0
    for i, book in enumerate(books):
        context = ReviewContext.for_task(
            tasks[book.task_id],
            sources.get(book.source_trajectory_id),
            max_lines=config.review.max_lines,
            max_line_chars=config.review.max_line_chars,
            # of the harness that replays: this one types every line, so every literal is a value
            literal_lines=ctx.with_harness(config.replay.harness).rollout.harness == "shell",
        )
        rules = review_runbook(book, context, PolicyMode(config.review.policy))
        verdicts = [rules]
        findings += len(rules.findings)
        yield RunbookReviewed(review=rules)
        if reviewer is not None:
            try:
                verdict = ctx.backends.run(review_with_model(book, context, reviewer, rules))
            except SamplerError:
                unanswered += 1  # no answer is no verdict
            else:
                if verdict is not None:
                    verdicts.append(verdict)
                    yield RunbookReviewed(review=verdict)
        if all(v.decision is Decision.APPROVE for v in verdicts):
            approved.add(book.id)
        if i % 50 == 49:
            yield Progress(phase=Phase.REVIEW, done=i + 1, total=len(books))
    facts: dict[str, float | int | str | None] = {
        "runbooks": len(books),
        "approved": len(approved),
        "findings": findings,
    }
    if reviewer is not None:
        facts["unanswered"] = unanswered
    yield PhaseDone(phase=Phase.REVIEW, facts=facts)
    return approved


def run_rpr(
    ctx: StageContext,
    config: RPRConfig,
    validate: EvaluateConfig,
    *,
    name: str,
    parent: Weights,
    parent_name: str,
    pool: Sequence[Task],
    validation: Suite,
    finished: Finished | None = None,
) -> Generator[Record, None, Weights]:
    """RPR-k: profile, warm up (without a critic to inherit), calibrate, joint PPO, select (spec §2.2, §2.3).

    `parent.critic`: the critic that enters. With `critic_reset: seed` the caller gives φ_seed; with `cold` it is ignored.
    """
    finished = finished or NothingFinished()
    profiled, scales = finished.trajectories(Phase.PROFILE), finished.scales()
    if profiled is None or scales is None:
        serve(ctx, parent.actor, parent_name)
        profiled, scales = yield from profile(ctx, config, pool)
    profiled = [t for t in profiled if t.verdict.counts]
    config = with_token_clock(config, profiled)
    reward = reward_model(config, scales)
    critic = parent.critic if config.inherit_critic else None
    if config.critic_reset == "cold":
        critic = cold_critic(ctx, config, actor_dir=parent.actor)
    elif critic is None:
        critic = ctx.work_dir / "seed-critic" / "critic"
        if not (critic.parent / MANIFEST).exists():
            critic = yield from warm_up(ctx, config, profiled, reward, actor_dir=parent.actor)
        else:  # the record that follows the save may have been lost with the process
            yield PhaseDone(phase=Phase.WARMUP, facts={"critic_digest": digest_weights(critic)})
        yield CheckpointSaved(
            name=f"{name} {SEED_CRITIC}",
            path=critic.parent,
            actor_digest=digest_weights(parent.actor),
            critic_digest=digest_weights(critic),
        )
    candidates = yield from refine(ctx, config, pool, reward, actor_dir=parent.actor, critic_dir=critic)
    options = [Option(label=f"step {s}", actor_dir=folder / "actor", step=s) for s, folder in candidates]
    done = finished.selected(Phase.JOINT)
    chosen = next((o for o in options if o.label == done), None)
    if chosen is None:
        chosen = yield from select(ctx, validate, validation, Phase.JOINT, options)
    critic = chosen.actor_dir.parent / "critic"
    yield _checkpoint(name, chosen.actor_dir, critic, step=chosen.step)
    return Weights(actor=chosen.actor_dir, critic=critic)


def _critic_beside(actor: Path) -> Path | None:
    critic = actor.parent / "critic"
    return critic if critic.is_dir() else None


def _digest(folder: Path | None) -> str | None:
    return digest_weights(folder) if folder else None


def _checkpoint(
    name: str, actor: Path, critic: Path | None, step: int | None = None, *, parent_kept: bool = False
) -> CheckpointSaved:
    return CheckpointSaved(
        name=name,
        path=actor.parent if actor.name == "actor" else actor,  # a base model is a folder without parts
        actor_digest=digest_weights(actor),
        critic_digest=_digest(critic),
        step=step,
        retained=True,
        parent_kept=parent_kept,
    )
