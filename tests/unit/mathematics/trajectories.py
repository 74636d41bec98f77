"""Builds small trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from stages.domain import CheckResult, CheckRole, CheckStatus, EndReason, Stratum, Trajectory, Turn, Verdict

_STATUS = {"p": CheckStatus.PASSED, "f": CheckStatus.FAILED, "n": CheckStatus.NOT_RUN}


def trajectory(
    name: str,
    scenario: str = "",
    *,
    gate: str = "",
    family: str = "net",
    verdict: Verdict = Verdict.FAILED,
    turns: int = 1,
    nop: int = 0,
    stratum: Stratum = Stratum.EASY,
) -> Trajectory:
    """`scenario` and `gate`: one letter per check, p passed, f failed, n not run."""
    letters: Sequence[tuple[str, CheckRole]] = [
        *((c, CheckRole.SCENARIO) for c in scenario),
        *((c, CheckRole.GATE) for c in gate),
    ]
    return Trajectory(
        id=name,
        task_id="task",
        family=family,
        stratum=stratum,
        attempt=0,
        seed=0,
        turns=tuple(Turn(index=i, action="", observation="", exit_code=0) for i in range(turns)),
        segments=(),
        checks=tuple(CheckResult(id=str(i), role=role, status=_STATUS[c]) for i, (c, role) in enumerate(letters)),
        end_reason=EndReason.DONE,
        verdict=verdict,
        weight_version="0",
        nop_progress=nop,
    )
