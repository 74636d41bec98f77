"""From what a verifier left behind to a verdict per check (spec §1, §7, §9). Pure: no sandbox, no files.

Order of belief: CTRF per-test results, `reward.json`, `reward.txt`, exit code; they must not contradict each other. A verifier
that says nothing usable (time-out, death by signal, unreadable or non-finite results, a script that cannot run) gives *no
verdict*: the backend then asks a pristine image who is at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stages.domain import CheckResult, CheckRole, CheckSpec, CheckStatus, Verdict

_CTRF_STATUS = {
    "passed": CheckStatus.PASSED,
    "failed": CheckStatus.FAILED,
    "skipped": CheckStatus.NOT_RUN,
    "pending": CheckStatus.NOT_RUN,
    "other": CheckStatus.NOT_RUN,
}
_WORSE = (CheckStatus.PASSED, CheckStatus.NOT_RUN, CheckStatus.FAILED)
_EVIDENCE_ONLY = frozenset({"planted_files"})
_CANNOT_RUN = (126, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierOutput:
    """What one verifier run left.

    `results` maps `ctrf.json`, `reward.json`, `reward.txt` to their bytes; a file that is no plain file of sane size is in
    `strange` instead. `channel` is what came through the authenticated descriptor, `nonces` those that were laid out for it.
    """

    exit_code: int | None  # None: timed out
    results: Mapping[str, bytes] = field(default_factory=dict)
    strange: Sequence[str] = ()
    channel: bytes = b""
    nonces: Sequence[str] = ()
    rewritten: Mapping[str, int] = field(
        default_factory=dict
    )  # result file -> times, where it was more than written once
    planted: Sequence[str] = ()  # files in the workspace that only a test runner would heed
    links: Sequence[str] = ()  # links in the workspace that lead to the verifier's own folders
    intact: bool = True  # tests unchanged by the run (digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`verdict` is PASSED, FAILED, or NONE when the verifier gave none; `reason` says why in the last case.

    Flags: `tests_changed`, `inconsistent_result` (files, reports and exit status contradict each other), `forged_report` (a
    line in the channel without a nonce), `stolen_nonce`, `result_rewritten`, `link_to_verifier` (an output that is a link to /tests or the like), `planted_files` (evidence only).
    """

    verdict: Verdict
    checks: tuple[CheckResult, ...]
    flags: tuple[str, ...] = ()
    reason: str = ""
    rewards: Mapping[str, float] = field(
        default_factory=dict
    )  # as the verifier wrote them; {"reward": 0} when it was fooled
    rewritten: Mapping[str, int] = field(default_factory=dict)  # with the flag `result_rewritten`: as in VerifierOutput
    written_so: Judgement | None = None  # with that flag: the judgement if this is how the verifier itself writes


class _Unusable(ValueError):
    pass


def judge(output: VerifierOutput, manifest: Sequence[CheckSpec]) -> Judgement:
    """PASSED iff every required check ran and passed and reward and exit code agree. Empty manifest: what was reported."""
    judgement = _judge(output, manifest)
    if "result_rewritten" not in judgement.flags:
        return judgement
    written_so = _judge(replace(output, rewritten={}), manifest)
    return replace(judgement, rewritten=output.rewritten, written_so=written_so)


def _judge(output: VerifierOutput, manifest: Sequence[CheckSpec]) -> Judgement:
    flags = ["planted_files"] if output.planted else []
    session = read_channel(output.channel, output.nonces)
    flags += ["link_to_verifier"] if output.links else []
    flags += session.flags
    try:
        reported, written = _read(output)
        rewards = [written["reward"]] if "reward" in written else list(written.values())
        if session.cut_short and not session.flags:
            raise _Unusable("pytest began and never ended: something ended its process")
        if manifest and not reported and not rewards and not session.checks:
            raise _Unusable("the verifier reported none of the task's checks (no ctrf.json and no reward file)")
    except _Unusable as error:
        return Judgement(verdict=Verdict.NONE, checks=_not_run(manifest), flags=tuple(flags), reason=str(error))
    if not output.intact:
        flags.append("tests_changed")
    told = [_answer(c.id, session.checks) for c in manifest]
    if output.rewritten and not (session.begun and manifest and all(told)):  # else nothing depends on the files
        flags.append("result_rewritten")
    better = any(
        s is CheckStatus.PASSED and session.checks[i][0] is not s
        for i, (s, _) in reported.items()
        if i in session.checks
    )
    checks = _against(manifest, session.checks, reported)
    paid = all(r >= 1 for r in rewards)
    clean = all(c.status is CheckStatus.PASSED for c in checks)
    overall = output.exit_code == 0 and paid
    # contradictions: a full reward or clean checks beside a failing exit status; a full reward beside a failed check
    if better or (rewards and paid and not (clean and output.exit_code == 0)) or (checks and clean and not overall):
        flags.append("inconsistent_result")
    passed = overall and clean and session.clean
    if set(flags) - _EVIDENCE_ONLY:  # somebody touched the results: none of them counts
        passed, checks, written = False, _not_run(checks, f"not counted: {', '.join(flags)}"), {}
    return Judgement(
        verdict=Verdict.PASSED if passed else Verdict.FAILED,
        checks=checks,
        flags=tuple(dict.fromkeys(flags)),
        rewards=written or {"reward": float(passed)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What pytest said through the channel. `clean`: every session ended, with status 0 (or there was none)."""

    checks: Mapping[str, tuple[CheckStatus, str]]
    flags: tuple[str, ...]
    begun: int
    cut_short: bool
    clean: bool


def read_channel(raw: bytes, nonces: Sequence[str]) -> Session:
    """Lines `NONCE JSON`; a test that is reported twice keeps its worst status."""
    checks: dict[str, tuple[CheckStatus, str]] = {}
    flags: set[str] = set()
    by_session: dict[tuple[str, str], CheckStatus] = {}
    begun, ends = 0, []
    for line in raw.splitlines():
        nonce, _, text = line.decode("utf-8", "replace").partition(" ")
        if nonce == "stolen":
            flags.add("stolen_nonce")
            continue
        try:
            record = json.loads(text) if nonce in nonces else None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            flags.add("forged_report")
        elif "begin" in record:
            begun += 1
        elif "end" in record:
            ends.append(record["end"])
        elif "id" in record:
            name, status = _text(record["id"]), _CTRF_STATUS.get(str(record.get("status")), CheckStatus.FAILED)
            by_session[nonce, name] = status
            if any((n, name) in by_session and by_session[n, name] is not status for n in nonces):
                flags.add("inconsistent_result")
            _keep_worst(checks, name, status, _text(record.get("message", "")))
    return Session(
        checks=checks,
        flags=tuple(sorted(flags)),
        begun=begun,
        cut_short=len(ends) != begun,
        clean=len(ends) == begun and all(e == 0 for e in ends),
    )


def _not_run(checks: Sequence[CheckSpec | CheckResult], message: str = "") -> tuple[CheckResult, ...]:
    return tuple(CheckResult(id=c.id, role=c.role, status=CheckStatus.NOT_RUN, message=message) for c in checks)


def _read(output: VerifierOutput) -> tuple[dict[str, tuple[CheckStatus, str]], dict[str, float]]:
    """What was reported of each check, and the rewards by name."""
    if output.exit_code is None:
        raise _Unusable("the verifier did not end within its time limit")
    if output.exit_code < 0 or output.exit_code >= 128:
        raise _Unusable(f"the verifier was ended by a signal (exit status {output.exit_code})")
    if output.exit_code in _CANNOT_RUN:
        raise _Unusable(f"the verifier could not run (exit status {output.exit_code})")
    if output.strange:
        raise _Unusable(f"/logs/verifier/{output.strange[0]} is not a plain file of sane size")
    ctrf, reward_json, reward_txt = (output.results.get(n) for n in ("ctrf.json", "reward.json", "reward.txt"))
    reported = {} if ctrf is None else _read_ctrf(ctrf)
    values: dict[str, float] = {}
    if reward_json is not None:
        values = _read_rewards(reward_json)
        if ctrf is None and len(values) > 1:
            reported = {
                k: (CheckStatus.PASSED if v >= 1 else CheckStatus.FAILED, f"{v:g}")
                for k, v in values.items()
                if k != "reward"
            }
    elif reward_txt is not None:
        try:
            values = {"reward": _finite(float(reward_txt.decode("ascii").strip()))}
        except (UnicodeDecodeError, ValueError) as error:
            raise _Unusable(f"/logs/verifier/reward.txt is not one finite number: {error}") from error
    return reported, values


def _read_ctrf(raw: bytes) -> dict[str, tuple[CheckStatus, str]]:
    """Test name -> status; a name that occurs twice keeps its worst status."""
    out: dict[str, tuple[CheckStatus, str]] = {}
    try:
        for test in json.loads(raw)["results"]["tests"]:
            _keep_worst(out, _text(test["name"]), _CTRF_STATUS[test["status"]], _text(test.get("message") or ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unusable(f"/logs/verifier/ctrf.json is not a CTRF report: {type(error).__name__}: {error}") from error
    return out


def _keep_worst(out: dict[str, tuple[CheckStatus, str]], name: str, status: CheckStatus, message: str) -> None:
    old = out.get(name)
    if old is None or _WORSE.index(status) > _WORSE.index(old[0]):
        out[name] = (status, message[:2000])


def _read_rewards(raw: bytes) -> dict[str, float]:
    try:
        values = json.loads(raw)
        if not isinstance(values, dict) or not values:
            raise ValueError("not a flat object of numbers")
        return {_text(k): _finite(v) for k, v in values.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise _Unusable(f"/logs/verifier/reward.json cannot be used: {error}") from error


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{str(value)[:40]} is not a finite number")
    return number


def _text(value: object) -> str:
    """JSON can hold halves of characters, which no log and no database takes."""
    return str(value).encode("utf-8", "replace").decode()


_Reports = Mapping[str, tuple[CheckStatus, str]]


def _against(manifest: Sequence[CheckSpec], said: _Reports, reported: _Reports) -> tuple[CheckResult, ...]:
    """`said`: through the channel, which no file overrules. `reported`: by the files."""
    if not manifest:
        rows = {**reported, **said}.items()
        return tuple(CheckResult(id=k, role=CheckRole.SCENARIO, status=s, message=m) for k, (s, m) in rows)
    missing = (CheckStatus.NOT_RUN, "the verifier did not report it")
    out = []
    for check in manifest:
        status, message = _answer(check.id, said) or _answer(check.id, reported) or missing
        out.append(CheckResult(id=check.id, role=check.role, status=status, message=message))
    return tuple(out)


def _answer(check: str, reports: _Reports) -> tuple[CheckStatus, str] | None:
    """What was reported of a check; a manifest may name pytest's tests by their last part, where only one has it."""
    if check in reports:
        return reports[check]
    found = [result for name, result in reports.items() if name.endswith(f"::{check}")]
    return found[0] if len(found) == 1 else None
