"""The verifier of a sandbox: a fresh jail on the dead agent's last state, and what its results mean. Every backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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

ALWAYS = frozenset(
    {
        "test_verdicts",
        "test_agent_is_dead_before_the_tests_run",
        "test_environment_of_shell_and_scripts",
    }
)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.fixture
def machine(request: pytest.FixtureRequest, started: Machine) -> Machine:
    skip_slow_half(request, started, ALWAYS, ("docker", "bubblewrap-user"))
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


def test_an_interpreter_of_the_verifier_is_shut_from_its_start(machine: Machine, tmp_path: Path) -> None:
    """Else a program of the agent's could open the memory of the test runner before that shuts itself off."""
    test_sh = r"""
    python3 -c 'import time; print("up", flush=True); time.sleep(9)' > up & p=$!
    for i in {1..500}; do [ -s up ] && break; sleep 0.01; done; cat up
    for what in environ maps mem; do head -c 1 /proc/$p/$what && echo "$what can be read"; done
    for what in environ maps; do head -c 1 /proc/self/$what > /dev/null && echo "own $what"; done
    kill $p; exit 0
    """
    with machine.box(make_task(tmp_path, test_sh=test_sh, checks=())) as box:
        report = box.verify()
    assert report.verdict is Verdict.PASSED, report
    assert "up\n" in report.log
    assert "own environ\nown maps\n" in report.log
    assert "can be read" not in report.log


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
        ("head -c 1G /dev/zero; echo 1 > /logs/verifier/reward.txt", Verdict.PASSED),
        ("printf '\\377\\376\\n'; echo 0 > /logs/verifier/reward.txt", Verdict.FAILED),
    ],
)
def test_result_files_without_a_manifest(machine: Machine, tmp_path: Path, test_sh: str, verdict: Verdict) -> None:
    with machine.box(make_task(tmp_path, test_sh=test_sh, checks=(), verifier_timeout_s=60.0)) as box:
        report = box.verify()
    assert report.verdict is verdict
    assert len(report.log) < 70_000


DEEP = "printf '[%.0s' {1..100000}"
UNUSABLE = {  # what the verifier does -> what is said of it
    "echo nan > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "echo inf > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "echo 1e999 > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "echo passed > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "echo 1 1 > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    ": > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "printf '\\377\\376' > /logs/verifier/reward.txt": "reward.txt is not one finite number",
    "mkdir /logs/verifier/reward.txt": "reward.txt is not a plain file",
    "mkdir /logs/verifier/reward.json": "reward.json is not a plain file",
    "head -c 5M /dev/zero > /logs/verifier/reward.json": "reward.json is not a plain file of sane size",
    "echo '{\"reward\": NaN}' > /logs/verifier/reward.json": "reward.json cannot be used",
    "echo '{\"reward\": -Infinity}' > /logs/verifier/reward.json": "reward.json cannot be used",
    "echo '{\"reward\": true}' > /logs/verifier/reward.json": "reward.json cannot be used",
    'echo \'{"reward": "1"}\' > /logs/verifier/reward.json': "reward.json cannot be used",
    'echo \'{"reward": {"a": 1}}\' > /logs/verifier/reward.json': "reward.json cannot be used",
    "echo '[1]' > /logs/verifier/reward.json": "reward.json cannot be used",
    f"{DEEP} > /logs/verifier/reward.json": "reward.json cannot be used",
    "echo '{]' > /logs/verifier/ctrf.json": "ctrf.json is not a CTRF report",
    'echo \'{"results": {"tests": [{"name": "a"}]}}\' > /logs/verifier/ctrf.json': "ctrf.json is not a CTRF report",
    f"{DEEP} > /logs/verifier/ctrf.json": "ctrf.json is not a CTRF report",
    "exit 137": "ended by a signal",
    "exit 127": "could not run",
    "sleep 50": "did not end within its time limit",
}


@pytest.mark.parametrize("test_sh", UNUSABLE)
def test_results_that_mean_nothing_give_no_verdict(machine: Machine, tmp_path: Path, test_sh: str) -> None:
    """Nor on a pristine image: the verifier itself is at fault, is named, and the attempt is masked, never scored."""
    limit = 0.2 if "sleep" in test_sh else 30.0  # a pristine image gets three times as much, twice
    with machine.box(make_task(tmp_path, test_sh=test_sh, checks=(), verifier_timeout_s=limit)) as box:
        report = box.verify()
    assert report.verdict is Verdict.VERIFIER_ERROR
    assert UNUSABLE[test_sh] in report.log.rpartition("[no verdict: ")[2]


def test_environment_of_shell_and_scripts(machine: Machine, tmp_path: Path) -> None:
    sh = 'echo "$SHARED|$OURS|$HIDDEN|$PATH|$LD_PRELOAD"; [ "$OURS" = tests ] && [ "$(cat said)" = "a  b||solved" ]'
    task = replace(
        make_task(tmp_path, test_sh=sh, checks=(), solve_sh='echo "$SHARED|$OURS|$HIDDEN" > said'),
        env={"SHARED": "a  b", "PATH": "/app/bin:/usr/bin:/bin", "LD_PRELOAD": "/app/x.so"},
        verifier_env={"OURS": "tests"},
        solution_env={"HIDDEN": "solved"},
    )
    with machine.box(task) as box:
        assert box.say('echo "$SHARED|$OURS|$HIDDEN|$PATH"', 20).endswith("a  b|||/app/bin:/usr/bin:/bin")
        machine.wait(box.sandbox.run_solution())  # type: ignore[attr-defined]
        report = box.verify()
    assert report.verdict is Verdict.PASSED, report
    assert "a  b|tests||/opt/rsi/bin:/usr/sbin:/usr/bin:/sbin:/bin|\n" in report.log


def test_breaking_the_verifier_does_not_pay(machine: Machine, tmp_path: Path) -> None:
    """The same silence is the agent's fault where a solved pristine image gives a verdict, and ours where it does not."""
    sh = "[ -e trap ] && sleep 60\n" + TEST_SH
    with machine.box(make_task(tmp_path, test_sh=sh, verifier_timeout_s=1.0)) as box:
        box.run(SOLVE_SH + "touch trap")
        report = box.verify()
        assert report.verdict is Verdict.FAILED
        assert report.flags == ("broke_verifier",)
        assert {c.status for c in report.checks} == {CheckStatus.NOT_RUN}


def test_reference_solution_runs_as_an_agent(machine: Machine, tmp_path: Path) -> None:
    with machine.box(make_task(tmp_path)) as box:
        assert machine.wait(box.sandbox.run_solution()).exit_code == 0  # type: ignore[attr-defined]
        assert box.verify().verdict is Verdict.PASSED


# how a verifier writes its reward -> whether that can be told from a forger's writing
HABITS = {
    "twice and with a mode": (
        "echo 0 > $r; sh prog; a=$(cat answer.txt); [ $a = 42 ]; echo $((! $?)) > $r; chmod 644 $r",
        True,
    ),
    "once more for a success": ("echo 0 > $r; sh prog; a=$(cat answer.txt); [ $a = 42 ] && echo 1 > $r; true", False),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_verifier_may_write_twice_but_the_same_whatever_it_finds(
    machine: Machine, tmp_path: Path, habit: str
) -> None:
    script, told_apart = HABITS[habit]
    task = make_task(
        tmp_path,
        test_sh=f"r=/logs/verifier/reward.txt\n{script}\n",
        solve_sh="echo 42 > answer.txt; echo true > prog\n",
        checks=(),
    )
    outcomes = {}
    for agent, (answer, program) in {
        "honest": (42, "true"),
        "wrong": (41, "true"),
        "forger": (41, "echo 1 > $r"),
    }.items():
        with machine.box(task) as box:
            box.run(
                f"echo {answer} > answer.txt; echo '{program}' > prog; sed -i 's#$r#/logs/verifier/reward.txt#' prog"
            )
            report = box.verify()
            outcomes[agent] = (report.verdict, "result_rewritten" in report.flags)
    assert outcomes["honest"] == ((Verdict.PASSED, False) if told_apart else (Verdict.FAILED, True))
    assert outcomes["wrong"] == (Verdict.FAILED, False)
    assert outcomes["forger"] == (Verdict.FAILED, True)
