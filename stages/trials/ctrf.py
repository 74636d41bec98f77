"""CTRF check reports: one `CheckResult` per test. Only our own export marks gates: elsewhere the verifier's result is the gate."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from stages.domain import CheckResult, CheckRole, CheckStatus
from stages.errors import TrialError
from stages.trials.files import read_json

REPORT = "verifier/ctrf.json"
LIMIT = 16 << 20
NAME_CHARS, MESSAGE_CHARS = 500, 2000
STATUS = {
    "passed": CheckStatus.PASSED,
    "failed": CheckStatus.FAILED,
    "skipped": CheckStatus.NOT_RUN,
    "pending": CheckStatus.NOT_RUN,
    "other": CheckStatus.NOT_RUN,
}


def read_checks(trial: Path) -> tuple[CheckResult, ...]:
    """The checks of a trial's report; empty without a report or without a test in it.

    Raises TrialError for a report that cannot be read, an unknown status, or a summary that counts other tests than are
    listed: half a report would look like a worse attempt.
    """
    document = read_json(trial, REPORT, LIMIT)
    return () if document is None else parse_checks(document, str(trial / REPORT))


def parse_checks(document: Any, where: str) -> tuple[CheckResult, ...]:
    """The checks of a CTRF document. A name that occurs again gets `#2`, `#3`, … Raises TrialError."""
    results = document.get("results") if isinstance(document, dict) else None
    tests = results.get("tests") if isinstance(results, dict) else None
    if not isinstance(results, dict) or not isinstance(tests, list):
        raise TrialError(f"{where} is no CTRF report: results.tests is missing")
    _counted(results.get("summary"), tests, where)
    seen: Counter[str] = Counter()
    return tuple(_check(test, seen, f"{where}: test {n + 1}") for n, test in enumerate(tests))


def _counted(summary: Any, tests: list[Any], where: str) -> None:
    if not isinstance(summary, dict):
        return
    if isinstance(promised := summary.get("tests"), int) and promised != len(tests):
        raise TrialError(f"{where}: the summary counts {promised} tests, {len(tests)} are listed")
    listed = Counter(t.get("status") for t in tests if isinstance(t, dict) and isinstance(t.get("status"), str))
    if isinstance(promised := summary.get("passed"), int) and promised != listed["passed"]:
        raise TrialError(f"{where}: the summary counts {promised} passed tests, {listed['passed']} are listed")


def _check(test: Any, seen: Counter[str], where: str) -> CheckResult:
    if not isinstance(test, dict) or not isinstance(test.get("name"), str) or not test["name"]:
        raise TrialError(f"{where} has no name")
    status = test.get("status")
    if not isinstance(status, str) or status not in STATUS:
        raise TrialError(f"{where} ({test['name'][:80]}) has the unknown status {status!r}")
    name = test["name"][:NAME_CHARS]
    seen[name] += 1
    message = test.get("message")
    return CheckResult(
        id=name if seen[name] == 1 else f"{name}#{seen[name]}",
        role=CheckRole.GATE if test.get("extra") == {"role": "gate"} else CheckRole.SCENARIO,
        status=STATUS[status],
        message=message[:MESSAGE_CHARS] if isinstance(message, str) else "",
    )
