"""The verifier of a sandbox: a fresh jail on the dead agent's last state, and what its results mean. Every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.domain import CheckStatus, Verdict
from stages.errors import SandboxError
from tests.integration.sandbox_kit import (
    CHECKS,
    KINDS,
    SOLVE_SH,
    TEST_SH,
    Machine,
    make_task,
    skip_slow_half,
    started_machine,
)

ON_DOCKER = frozenset(
    {
        "test_verdicts",
        "test_agent_is_dead_before_the_tests_run",
        "test_breaking_the_verifier_does_not_pay",
    }
)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ON_DOCKER)
    return started


def test_verdicts(machine: Machine, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    wanted = {
        "true": (Verdict.FAILED, ["failed", "failed", "passed"]),
        "echo 42 > answer.txt": (Verdict.FAILED, ["passed", "failed", "passed"]),
        SOLVE_SH: (Verdict.PASSED, ["passed", "passed", "passed"]),
        SOLVE_SH + "echo other > input/data.txt": (Verdict.FAILED, ["passed", "passed", "failed"]),
    }
    for command, (verdict, statuses) in wanted.items():
        with machine.box(task) as box:
            box.run(command)
            report = box.verify()
            assert report.verdict is verdict
            assert [c.status for c in report.checks] == statuses
            assert [(c.id, c.role) for c in report.checks] == [(c.id, c.role) for c in CHECKS]
            assert box.verify() == report


def test_tests_and_solution_exist_only_after_the_agent(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert box.say("ls -d /tests /solution /logs /store /ws /vlogs /opt/rsi 2>/dev/null") == ""
        assert box.say("find / -xdev \\( -name test.sh -o -name solve.sh \\) 2>/dev/null") == ""


_WATCH = """
set -- /proc/[0-9]*; echo "processes: $#"
first=$(ls); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.03; [ "$(ls)" = "$first" ] || echo "changed: $(ls)"; done
"""


def test_agent_is_dead_before_the_tests_run(machine: Machine, tmp_path: Path) -> None:
    """A process of the agent that keeps changing the workspace changes nothing while the tests run."""
    with machine.box(make_task(tmp_path, test_sh=_WATCH + TEST_SH)) as box:
        box.run("(while :; do : > a; sleep 0.01; rm a; sleep 0.01; done) >/dev/null 2>&1 & disown")
        assert box.say("for i in {1..200}; do [ -e a ] && echo made && break; sleep 0.01; done") == "made"
        report = box.verify()
        assert "changed" not in report.log
        seen = int(report.log.partition("processes: ")[2].split()[0])
        assert seen == 1 if machine.kind != "docker" else seen <= 6  # there: init, main process, wrapper, test.sh
        with pytest.raises(SandboxError, match="open a new sandbox"):
            box.run("echo hello")


def test_a_missing_or_skipped_check_has_not_passed(machine: Machine, tmp_path: Path) -> None:
    for rows in ('{"name":"answer","status":"passed"}', '{"name":"answer","status":"passed"},{"name":"listing","status":"skipped"},{"name":"untouched","status":"passed"}'):  # fmt: skip
        sh = f"""echo '{{"results":{{"tests":[{rows}]}}}}' > /logs/verifier/ctrf.json"""
        with machine.box(make_task(tmp_path, test_sh=sh)) as box:
            report = box.verify()
            assert report.verdict is Verdict.FAILED
            assert report.checks[1].status is CheckStatus.NOT_RUN


@pytest.mark.parametrize(
    ("test_sh", "verdict"),
    [
        ("exit 0", Verdict.PASSED),
        ("exit 1", Verdict.FAILED),
        ("echo 1 > /logs/verifier/reward.txt", Verdict.PASSED),
        ("echo 0 > /logs/verifier/reward.txt", Verdict.FAILED),
        ("echo 1 > /logs/verifier/reward.txt; exit 1", Verdict.FAILED),
        ("echo '{\"reward\": 1.0}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt", Verdict.PASSED),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', Verdict.FAILED),
        ("echo nan > /logs/verifier/reward.txt", Verdict.VERIFIER_ERROR),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", Verdict.VERIFIER_ERROR),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", Verdict.VERIFIER_ERROR),
        ("echo '{]' > /logs/verifier/ctrf.json", Verdict.VERIFIER_ERROR),
        ("printf '\\377\\376' > /logs/verifier/reward.txt", Verdict.VERIFIER_ERROR),
        ("kill -9 $$; exit 127", Verdict.VERIFIER_ERROR),
        ("sleep 50", Verdict.VERIFIER_ERROR),
    ],
)
def test_result_files_without_a_manifest(machine: Machine, tmp_path: Path, test_sh: str, verdict: Verdict) -> None:
    limit = 0.7 if "sleep" in test_sh else 30.0
    with machine.box(make_task(tmp_path, test_sh=test_sh, checks=(), verifier_timeout_s=limit)) as box:
        assert box.verify().verdict is verdict


def test_breaking_the_verifier_does_not_pay(machine: Machine, tmp_path: Path) -> None:
    """The same silence is the agent's fault where a solved pristine image gives a verdict, and ours where it does not."""
    sh = "[ -e trap ] && sleep 60\n" + TEST_SH
    with machine.box(make_task(tmp_path, test_sh=sh, verifier_timeout_s=3.0)) as box:
        box.run(SOLVE_SH + "touch trap")
        report = box.verify()
        assert report.verdict is Verdict.FAILED
        assert report.flags == ("broke_verifier",)
        assert {c.status for c in report.checks} == {CheckStatus.NOT_RUN}


def test_reference_solution_runs_as_an_agent(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert machine.wait(box.sandbox.run_solution()).exit_code == 0  # type: ignore[attr-defined]
        assert box.verify().verdict is Verdict.PASSED
