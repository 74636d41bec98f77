"""From what a verifier left behind to a verdict per check (spec §1, §7, §9). Pure: no sandbox, no files.

Order of belief: CTRF per-test results, `reward.json`, `reward.txt`, exit code; they must not contradict each other. A verifier
that says nothing usable (time-out, death by signal, unreadable or non-finite results, a script that cannot run) gives *no
verdict*: the backend then asks a pristine image who is at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stages.domain import CheckResult, CheckRole, CheckSpec, CheckStatus, Verdict

_CTRF_STATUS = {
    "passed": CheckStatus.PASSED,
    "failed": CheckStatus.FAILED,
    "skipped": CheckStatus.NOT_RUN,
    "pending": CheckStatus.NOT_RUN,
    "other": CheckStatus.NOT_RUN,
}
_CANNOT_RUN = (126, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierOutput:
    """What one verifier run left: `results` maps `ctrf.json`, `reward.json`, `reward.txt` to bytes (absent: None)."""

    exit_code: int | None  # None: timed out
    results: Mapping[str, bytes | None] = field(default_factory=dict)
    intact: bool = True  # tests unchanged by the run (digest)
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`verdict` is PASSED, FAILED, or NONE when the verifier gave none; `reason` says why in the last case."""

    verdict: Verdict
    checks: tuple[CheckResult, ...]
    flags: tuple[str, ...] = ()
    reason: str = ""


class _Unusable(ValueError):
    pass


def judge(output: VerifierOutput, manifest: Sequence[CheckSpec]) -> Judgement:
    """PASSED iff every required check ran and passed and reward and exit code agree. Empty manifest: what was reported."""
    try:
        reported, rewards = _read(output)
        if manifest and not reported and not rewards:
            raise _Unusable("the verifier reported none of the task's checks (no ctrf.json and no reward file)")
    except _Unusable as error:
        return Judgement(verdict=Verdict.NONE, checks=_not_run(manifest), reason=str(error))
    flags: list[str] = []
    if not output.intact:
        flags.append("tests_changed")
    checks = _against(manifest, reported)
    paid = all(r >= 1 for r in rewards)
    clean = all(c.status is CheckStatus.PASSED for c in checks)
    overall = output.exit_code == 0 and paid
    # contradictions: a full reward or clean checks beside a failing exit status; a full reward beside a failed check
    if (rewards and paid and not (clean and output.exit_code == 0)) or (checks and clean and not overall):
        flags.append("inconsistent_result")
    passed = overall and clean and output.intact
    return Judgement(verdict=Verdict.PASSED if passed else Verdict.FAILED, checks=checks, flags=tuple(flags))


def _not_run(manifest: Sequence[CheckSpec]) -> tuple[CheckResult, ...]:
    return tuple(CheckResult(id=c.id, role=c.role, status=CheckStatus.NOT_RUN) for c in manifest)


def _read(output: VerifierOutput) -> tuple[dict[str, tuple[CheckStatus, str]], list[float]]:
    if output.exit_code is None:
        raise _Unusable("the verifier did not end within its time limit")
    if output.exit_code < 0 or output.exit_code >= 128:
        raise _Unusable(f"the verifier was ended by a signal (exit status {output.exit_code})")
    if output.exit_code in _CANNOT_RUN:
        raise _Unusable(f"the verifier could not run (exit status {output.exit_code})")
    ctrf, reward_json, reward_txt = (output.results.get(n) for n in ("ctrf.json", "reward.json", "reward.txt"))
    reported = {} if ctrf is None else _read_ctrf(ctrf)
    rewards: list[float] = []
    if reward_json is not None:
        values = _read_rewards(reward_json)
        rewards = [values["reward"]] if "reward" in values else list(values.values())
        if ctrf is None and len(values) > 1:
            reported = {
                k: (CheckStatus.PASSED if v >= 1 else CheckStatus.FAILED, f"{v:g}")
                for k, v in values.items()
                if k != "reward"
            }
    elif reward_txt is not None:
        try:
            rewards = [_finite(float(reward_txt.decode("ascii").strip()))]
        except (UnicodeDecodeError, ValueError) as error:
            raise _Unusable(f"/logs/verifier/reward.txt is not one finite number: {error}") from error
    return reported, rewards


def _read_ctrf(raw: bytes) -> dict[str, tuple[CheckStatus, str]]:
    """Test name -> status; a name that occurs twice keeps its worst status."""
    out: dict[str, tuple[CheckStatus, str]] = {}
    order = [CheckStatus.PASSED, CheckStatus.NOT_RUN, CheckStatus.FAILED]
    try:
        for test in json.loads(raw)["results"]["tests"]:
            status, message = _CTRF_STATUS[test["status"]], str(test.get("message") or "")[:2000]
            old = out.get(str(test["name"]))
            if old is None or order.index(status) > order.index(old[0]):
                out[str(test["name"])] = (status, message)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unusable(f"/logs/verifier/ctrf.json is not a CTRF report: {type(error).__name__}: {error}") from error
    return out


def _read_rewards(raw: bytes) -> dict[str, float]:
    try:
        values = json.loads(raw)
        if not isinstance(values, dict) or not values:
            raise ValueError("not a flat object of numbers")
        return {str(k): _finite(v) for k, v in values.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise _Unusable(f"/logs/verifier/reward.json cannot be used: {error}") from error


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _against(manifest: Sequence[CheckSpec], reported: Mapping[str, tuple[CheckStatus, str]]) -> tuple[CheckResult, ...]:
    if not manifest:
        return tuple(CheckResult(id=k, role=CheckRole.SCENARIO, status=s, message=m) for k, (s, m) in reported.items())
    missing = (CheckStatus.NOT_RUN, "the verifier did not report it")
    return tuple(
        CheckResult(id=c.id, role=c.role, status=reported.get(c.id, missing)[0], message=reported.get(c.id, missing)[1])
        for c in manifest
    )
