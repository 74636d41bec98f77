"""Domain values for tests: plausible, seeded, and awkward where that matters."""

from __future__ import annotations

import numpy as np

from orchestrator import models as m
from orchestrator.store import Store
from stages.domain import (
    Boundary,
    CheckResult,
    CheckRole,
    CheckStatus,
    EndReason,
    Segment,
    Stratum,
    Trajectory,
    Turn,
    Verdict,
)


def segment(rng: np.random.Generator, tokens: int, *, experts: bool = False, kind: str = "policy") -> Segment:
    mask = rng.random(tokens) < 0.3
    return Segment(
        tokens=rng.integers(0, 2**31 - 1, tokens, dtype=np.int32),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -rng.random(tokens), 0).astype(np.float32),
        turn_ids=np.where(mask, rng.integers(0, 9, tokens), -1).astype(np.int32),
        kind=kind,
        rollout_routed_experts=rng.integers(0, 8, (max(tokens - 1, 0), 2, 4), dtype=np.int32) if experts else None,
        weight_versions=("v1", "v2"),
    )


def trajectory(
    number: int,
    *,
    task: str | None = None,
    passed: bool | None = None,
    turns: int = 8,
    tokens: int = 400,
    version: str = "RSR-1",
    suite: str = "train",
    end: EndReason = EndReason.DONE,
) -> Trajectory:
    rng = np.random.default_rng(number)
    won = bool(number % 3 == 0) if passed is None else passed
    status = CheckStatus.PASSED if won else CheckStatus.FAILED
    return Trajectory(
        id=f"{number:024x}",
        task_id=task or f"task-{number % 40}",
        family=f"family-{number % 10}",
        stratum=Stratum.MEDIUM,
        attempt=number % 4,
        seed=int(rng.integers(0, 2**63 - 1)),
        turns=tuple(
            Turn(
                index=i,
                action=f"echo {i}",
                observation=f"{i}\n",
                exit_code=None if i == turns - 1 else 0,
                start=10 * i,
                end=10 * i + 5,
                duration_s=0.01 * i,
            )
            for i in range(turns)
        ),
        segments=(segment(rng, tokens),),
        checks=(
            CheckResult(id="exists", role=CheckRole.SCENARIO, status=CheckStatus.PASSED),
            CheckResult(id="content", role=CheckRole.SCENARIO, status=status, message="" if won else "differs"),
            CheckResult(id="gate", role=CheckRole.GATE, status=status),
        ),
        end_reason=end,
        verdict=Verdict.PASSED if won else Verdict.FAILED,
        weight_version=version,
        boundaries={Boundary.STRICT_PREFIX: turns - 1, Boundary.TRIMMED: 1},
        duration_s=1.5,
        sampler_s=1.0,
        sandbox_s=0.5,
        raw_answers=tuple(f'{{"output_ids": [{i}]}}' for i in range(turns)),
        suite=suite,
    )


def same(a: Trajectory, b: Trajectory) -> bool:
    """Equal in every field and every array, types included."""
    for name in Trajectory.__slots__:
        if name == "segments":
            continue
        if repr(getattr(a, name)) != repr(getattr(b, name)):
            return False
    if len(a.segments) != len(b.segments):
        return False
    return all(_same_segment(x, y) for x, y in zip(a.segments, b.segments, strict=True))


def _same_segment(a: Segment, b: Segment) -> bool:
    for name in Segment.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            if not isinstance(y, np.ndarray) or x.dtype != y.dtype or x.tobytes() != y.tobytes() or x.shape != y.shape:
                return False
        elif x != y:
            return False
    return True


def cycle(store: Store, name: str = "demo", *, seed: int = 0) -> m.Cycle:
    return store.cycles.create(
        m.Cycle(
            name=name,
            recipe="embedded",
            config={"seed": seed},
            config_digest="0" * 64,
            seed=seed,
            base_checkpoint="Base",
        )
    )


def stages(store: Store, cycle_id: int) -> list[m.Stage]:
    """Base, RSR-1, RPR-1, RSR-2, RPR-2."""
    kinds = [("Base", m.StageKind.BASE, 0)]
    kinds += [(f"{k.value.upper()}-{r}", k, r) for r in (1, 2) for k in (m.StageKind.RSR, m.StageKind.RPR)]
    rows = [m.Stage(cycle_id=cycle_id, index=i, kind=k, round=r, name=n) for i, (n, k, r) in enumerate(kinds)]
    return list(store.stages.plan(cycle_id, rows))
