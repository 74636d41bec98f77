"""What joint PPO remembers between two steps, beside the learner: its plan so far, the EV curve, the online scales.

One JSON file per step, written before the step's checkpoint: a step counts as done once its checkpoint is complete, so a
killed run finds the state that belongs to the weights it continues from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stages.backends.learner.checkpoint import MANIFEST
from stages.config import RPRConfig
from stages.domain import FamilyScale, Phase, Trajectory
from stages.recalibration import OnlineScales, ScaleDrift
from stages.rewards import RewardModel
from stages.values import EVPoint, Staleness, staleness

Step = tuple[Phase, int]


@dataclass(slots=True)
class RefineState:
    """Mutable on purpose: it grows by one step at a time."""

    plan: list[Step]
    curve: list[EVPoint] = field(default_factory=list)
    answered: int = 0  # points of the curve that an alarm has already been acted on
    scales: tuple[FamilyScale, ...] = ()  # where they follow the batches; () while they are those of the phase's start

    @classmethod
    def begin(cls, config: RPRConfig) -> RefineState:
        plan = [(Phase.CALIBRATE, s) for s in range(1, config.critic_only_steps + 1)]
        return cls(plan=plan + [(Phase.JOINT, s) for s in range(1, config.joint_steps + 1)])

    # ------------------------------------------------------------------ staleness

    def add(self, phase: Phase, step: int, ev: float | None) -> None:
        self.curve.append(EVPoint(phase=phase, step=step, value=ev))

    def stale(self, patience: int) -> Staleness | None:
        """The alarm at the end of the curve. Once it was acted on, `patience` further steps must pass."""
        return staleness(self.curve[self.answered :], patience=patience)

    def recalibrate(self, index: int, steps: int) -> None:
        """Put `steps` more critic-only updates, each with a fresh batch, behind the plan's entry `index`."""
        last = max((s for phase, s in self.plan if phase is Phase.CALIBRATE), default=0)
        self.plan[index + 1 : index + 1] = [(Phase.CALIBRATE, last + i) for i in range(1, steps + 1)]
        self.answered = len(self.curve)

    def ends_block(self, index: int) -> bool:
        """Whether a plan's entry is the last of its phase, or of a block of critic-only updates."""
        rest = self.plan[index + 1 :]
        if self.plan[index][0] is Phase.CALIBRATE:
            return not rest or rest[0][0] is not Phase.CALIBRATE
        return all(phase is not Phase.JOINT for phase, _ in rest)

    def last_step(self, index: int) -> int:
        """Step number at which the phase, or the block, of a plan's entry ends."""
        phase = self.plan[index][0]
        end = next(i for i in range(index, len(self.plan)) if self.ends_block(i) and self.plan[i][0] is phase)
        return self.plan[end][1]

    def starts_block(self, index: int) -> bool:
        phase, step = self.plan[index]
        if phase is Phase.CALIBRATE:
            return index == 0 or self.plan[index - 1][0] is not Phase.CALIBRATE
        return step == 1

    # ------------------------------------------------------------------ scales

    def reward(self, start: RewardModel) -> RewardModel:
        """The reward of the next batch."""
        return replace(start, scales=self.scales) if self.scales else start

    def follow(self, config: RPRConfig, start: RewardModel, batch: Sequence[Trajectory]) -> tuple[ScaleDrift, ...]:
        """Move the scales by a batch that was scored under the old ones (spec §4.5)."""
        r = config.reward
        online = OnlineScales(
            self.reward(start).scales,
            alpha=r.online_alpha,
            quantile=r.quantile,
            min_attempts=r.online_min_attempts,
            drift_limit=r.drift_limit,
            d_min=r.d_min,
            progress=r.progress,
            at_start=start.scales,
        )
        drifts = online.update(batch)
        self.scales = online.scales
        return drifts

    # ------------------------------------------------------------------ on disk

    def save(self, folder: Path) -> None:
        """Beside the checkpoint that the step is about to write."""
        document = {
            "plan": [[phase.value, step] for phase, step in self.plan],
            "curve": [[p.phase.value, p.step, p.value] for p in self.curve],
            "answered": self.answered,
            "scales": [asdict(s) for s in self.scales],
        }
        path = _file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(document))
        os.replace(new, path)


def step_folder(work_dir: Path, step: Step) -> Path:
    phase, number = step
    return work_dir / "steps" / f"{phase.value}-{number}"


def resumed(work_dir: Path, config: RPRConfig) -> tuple[RefineState, int]:
    """The state after the newest step whose checkpoint is complete, and how many steps of its plan are done."""
    files = (work_dir / "steps").glob("*.json")
    states = [_read(f) for f in files if (f.with_suffix("") / MANIFEST).exists()]
    if states:
        newest = max(states, key=lambda s: len(s.curve))
        return newest, len(newest.curve)
    state = RefineState.begin(config)  # of checkpoints without a state beside them: an older version made them
    complete = [i for i, step in enumerate(state.plan) if (step_folder(work_dir, step) / MANIFEST).exists()]
    done = max(complete, default=-1) + 1
    state.curve = [EVPoint(phase=phase, step=step, value=None) for phase, step in state.plan[:done]]
    return state, done


def forget(folder: Path) -> None:
    """A step's state, once a later one is saved."""
    _file(folder).unlink(missing_ok=True)


def _file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _read(file: Path) -> RefineState:
    document = json.loads(file.read_text())
    return RefineState(
        plan=[(Phase(phase), step) for phase, step in document["plan"]],
        curve=[EVPoint(phase=Phase(phase), step=step, value=value) for phase, step, value in document["curve"]],
        answered=document["answered"],
        scales=tuple(FamilyScale(**s) for s in document["scales"]),
    )
