"""What every phase needs, and how phases run attempts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stages.backends.protocols import Backends
from stages.chat import Chat
from stages.config import HarnessName, RolloutConfig, SamplingConfig
from stages.domain import Phase, Task, Trajectory
from stages.oversampling import Race
from stages.records import AttemptFinished, Progress, Record
from stages.rollout import AttemptSpec, run_attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One stage's services, settings and place in the cycle."""

    backends: Backends
    chat: Chat
    rollout: RolloutConfig
    seed: tuple[object, ...]  # (cycle seed, stage name, arm): every random choice derives from it
    namespace: str  # the cycle's own id: makes record ids unique, and never touches a random choice
    max_new_tokens: int  # output tokens per turn while training
    work_dir: Path  # step checkpoints and candidates; safe to delete once the stage is done

    def with_harness(self, name: HarnessName | None) -> StageContext:
        """The same services with another harness; None: as it is."""
        return self if name is None else replace(self, rollout=self.rollout.model_copy(update={"harness": name}))


def attempts(
    ctx: StageContext,
    phase: Phase,
    specs: Sequence[AttemptSpec],
    sampling: SamplingConfig,
    *,
    step: int = 0,
    race: Race | None = None,
) -> Generator[Record, None, list[Trajectory]]:
    """Run `specs` (to the end of `race`, if given); yields one `AttemptFinished` each and a `Progress` per wave; returns the trajectories in order."""
    done: list[Trajectory] = []
    waves = run_attempts(
        specs,
        backends=ctx.backends,
        chat=ctx.chat,
        config=ctx.rollout,
        sampling=sampling,
        seed=(*ctx.seed, phase.value, step),
        namespace=ctx.namespace,
        race=race,
    )
    for wave in waves:
        for trajectory in wave:
            yield AttemptFinished(phase=phase, trajectory=trajectory, step=step)
        done += wave
        passed = sum(t.strict for t in done)
        yield Progress(phase=phase, done=len(done), total=len(specs), text=f"{passed}/{len(done)} passed")
    return done


def serve(ctx: StageContext, actor: Path, version: str) -> None:
    """Load weights into the sampler, unless it already has them."""
    sampler = ctx.backends.sampler
    if sampler.weight_version != version:
        ctx.backends.run(sampler.update_weights_from_disk(actor, version))


def repeat(tasks: Sequence[Task], k: int) -> list[AttemptSpec]:
    """k attempts at each task, side by side: equal prompts of one wave are computed once."""
    return [AttemptSpec(task=t, attempt=a, key=(t.id, a)) for t in tasks for a in range(k)]
