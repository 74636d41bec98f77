"""Arms × seeds as a tree of branches: stages on whose settings several arms agree run once, and the arms fork from them.

What a stage depends on is hashed into its key, so the shared prefix follows from the settings and is not declared; a
branch that another experiment has already run is recognised by its key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from orchestrator.experiments.coincide import bare, canonical
from orchestrator.models import StageKind
from orchestrator.plan import Estimate, StagePlan, estimate_stage, plan
from stages.config import CycleConfig

PER_ROUND = {"rsr", "rpr", "rounds", "last_stage"}  # a stage depends on its own round's settings, and on its parent
Run = tuple[str, int]  # arm, seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Consecutive stages that one cycle runs."""

    key: str  # of its last stage
    parent: str | None  # key of the branch that it forks from
    stages: tuple[StagePlan, ...]
    config: CycleConfig  # of the first arm that passes through; `fork` is set when the parent's cycle is known
    runs: tuple[Run, ...]  # that pass through
    ends: tuple[Run, ...]  # that end here
    estimate: Estimate

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def title(self) -> str:
        """`Base…RSR-2`, or one stage."""
        first, last = self.stages[0].name, self.stages[-1].name
        return first if first == last else f"{first}…{last}"

    @property
    def label(self) -> str:
        arms = dict.fromkeys(arm for arm, _ in self.runs)
        return next(iter(arms)) if len(arms) == 1 else f"shared by {len(arms)} arms"


def stage_keys(config: CycleConfig) -> list[tuple[StagePlan, str]]:
    """Every stage from Base on, with the digest of everything that it depends on.

    Defaults are left out, so that a setting which a later version adds leaves the keys of what was run before as they are.
    """
    whole = canonical(bare(config))[0]
    common = whole.model_dump(mode="json", by_alias=True, exclude=PER_ROUND, exclude_defaults=True) | {
        "version": metadata.version("terminal-rsi")
    }
    key, found = "", []
    for stage in plan(whole):
        own = None
        if stage.kind is StageKind.RSR:
            own = whole.rsr_of(stage.round).model_dump(mode="json", exclude_defaults=True)
        elif stage.kind is StageKind.RPR:
            own = whole.rpr_of(stage.round).model_dump(mode="json", exclude_defaults=True)
        text = json.dumps([key, stage.name, common if not key else None, own], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        found.append((stage, key))
    return found


def branches(configs: Mapping[Run, CycleConfig]) -> list[Branch]:
    """The tree, parents before children, seed by seed in the order given."""
    paths = {run: stage_keys(config) for run, config in configs.items()}
    through: dict[str, list[Run]] = {}
    for run, path in paths.items():
        for _, key in path:
            through.setdefault(key, []).append(run)
    ends = {path[-1][1] for path in paths.values()}
    made: dict[str, Branch] = {}
    for run, path in paths.items():
        start, parent = 0, None
        for i, (_, key) in enumerate(path):
            last = i == len(path) - 1
            if not last and through[path[i + 1][1]] == through[key] and key not in ends:
                continue
            stages = tuple(stage for stage, _ in path[start : i + 1])
            if key not in made:
                made[key] = Branch(
                    key=key,
                    parent=parent,
                    stages=stages,
                    config=configs[run].model_copy(update={"last_stage": stages[-1].name}),
                    runs=tuple(through[key]),
                    ends=tuple(r for r in through[key] if paths[r][-1][1] == key),
                    estimate=_sum(configs[run], stages),
                )
            start, parent = i + 1, key
    order = {seed: i for i, seed in enumerate(dict.fromkeys(seed for _, seed in configs))}
    return sorted(made.values(), key=lambda b: order[b.seed])  # stable: parents stay before children


def total(parts: Sequence[Branch]) -> Estimate:
    """What is left to run, together."""
    out = Estimate(attempts=0, updates=0, wall_s=(0.0, 0.0))
    for part in parts:
        out += part.estimate
    return out


def _sum(config: CycleConfig, stages: Sequence[StagePlan]) -> Estimate:
    out = Estimate(attempts=0, updates=0, wall_s=(0.0, 0.0))
    for stage in stages:
        out += estimate_stage(config, stage)
    return out
