"""From `stages.domain.Trajectory` to rows. No SQL here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.store.connection import clean_text
from stages.domain import CheckRole, Phase, Trajectory


def trajectory_row(
    t: Trajectory,
    *,
    cycle_id: int | None,
    stage_id: int | None,
    phase: Phase | None,
    step: int,
    suite: str,
    checkpoint_id: int | None,
    artifact: str | None,
) -> dict[str, Any]:
    return {
        "id": t.id,
        "cycle_id": cycle_id,
        "stage_id": stage_id,
        "phase": phase.value if phase else None,
        "step": step,
        "checkpoint_id": checkpoint_id,
        "suite": t.suite or suite,
        "task_id": t.task_id,
        "family": t.family,
        "stratum": t.stratum.value,
        "attempt": t.attempt,
        "seed": t.seed,
        "verdict": t.verdict.value,
        "end_reason": t.end_reason.value,
        "strict": t.strict,
        "progress": t.progress,
        "n_checks": sum(c.role is CheckRole.SCENARIO for c in t.checks),
        "only_gate_failed": t.only_gate_failed,
        "nop_progress": t.nop_progress,
        "n_turns": len(t.turns),
        "n_segments": len(t.segments),
        "n_tokens": sum(len(s.tokens) for s in t.segments),
        "n_sampled": t.sampled_tokens,
        "reward": None,
        "runbook_id": t.runbook_id,
        "flags": list(t.flags),
        "boundaries": {b.value: n for b, n in t.boundaries.items()},
        "drift_tokens": t.drift_tokens,
        "weight_version": t.weight_version,
        "duration_s": t.duration_s,
        "sampler_s": t.sampler_s,
        "sandbox_s": t.sandbox_s,
        "verifier_log": clean_text(t.verifier_log),
        "artifact": artifact,
    }


def turn_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
    for turn in t.turns:
        yield {
            "trajectory_id": t.id,
            "index": turn.index,
            "action": clean_text(turn.action),
            "observation": clean_text(turn.observation),
            "exit_code": turn.exit_code,
            "timed_out": turn.timed_out,
            "segment": turn.segment,
            "start": turn.start,
            "end": turn.end,
            "duration_s": turn.duration_s,
        }


def check_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
    for index, check in enumerate(t.checks):
        yield {
            "trajectory_id": t.id,
            "index": index,
            "check_id": clean_text(check.id),
            "role": check.role.value,
            "status": check.status.value,
            "message": clean_text(check.message),
        }


def segment_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
    for index, segment in enumerate(t.segments):
        yield {
            "trajectory_id": t.id,
            "index": index,
            "kind": segment.kind,
            "n_tokens": len(segment.tokens),
            "n_sampled": int(segment.loss_mask.sum()),
            "weight_versions": list(segment.weight_versions),
        }
