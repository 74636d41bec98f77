"""Tasks of several steps in real sandboxes: order, thresholds, aggregation, and steps whose tests nobody meets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.agents import Agent, Nop, Oracle
from orchestrator.attempt_log import LoggedBackend, LoggedSandbox
from orchestrator.cli import app
from orchestrator.step_runs import loaded_steps, run_steps
from orchestrator.task_runs import Attempt
from stages.backends.sandbox.bubblewrap import BubblewrapBackend
from stages.backends.sandbox.docker import DockerBackend
from stages.domain import EndReason, Task, Verdict
from stages.errors import SandboxError, TaskError
from stages.tasks.digests import read_folder

ONE = """#!/bin/bash
[ "$(cat first.txt 2>/dev/null)" = one ] && r=1 || r=0
[ -f half.txt ] && r=0.6
[ -e seed.txt ] && [ -e data.txt ] || r=0
echo "secret-of-one" > left-behind.txt
touch /tmp/left-behind /root/left-behind
echo $r > /logs/verifier/reward.txt
"""
TWO = """#!/bin/bash
ok() { printf '{"name":"%s","status":"%s"}' "$1" "$2"; }
[ "$(cat second.txt 2>/dev/null)" = two ] && a=passed || a=failed
[ "$(cat later.txt 2>/dev/null)" = given ] && b=passed || b=failed
printf '{"results":{"tests":[%s,%s]}}' "$(ok second $a)" "$(ok staged $b)" > /logs/verifier/ctrf.json
[ $a$b = passedpassed ]
"""
FILES = {
    "task.toml": (
        "[metadata]\ncategory = 'demo'\n[environment]\nnetwork_mode = 'no-network'\n[agent]\ntimeout_sec = 20\n"
        "[[steps]]\nname = 'one'\nmin_reward = 0.5\n[[steps]]\nname = 'two'\n"
    ),
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY data.txt /app/\n",
    "environment/data.txt": "data\n",
    "tests/test.sh": ONE,
    "steps/one/instruction.md": "Write one to first.txt.\n",
    "steps/one/workdir/seed.txt": "seed\n",
    "steps/one/solution/solve.sh": "#!/bin/bash\nexport LOST=1\necho one > first.txt\n",
    "steps/two/instruction.md": "Write two to second.txt.\n",
    "steps/two/workdir/later.txt": "given\n",
    "steps/two/workdir/setup.sh": "echo ran > setup-ran.txt\n",
    "steps/two/tests/test.sh": TWO,
    "steps/two/solution/solve.sh": "#!/bin/bash\ntest -f setup-ran.txt && echo two > second.txt\n",
}


def write(folder: Path, **change: str | None) -> Path:
    for name, text in {**FILES, **{k.replace("__", "/"): v for k, v in change.items()}}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


class Typist(Agent):
    """Types what `says` gives for a step, one script per attempt, and keeps what came."""

    def __init__(self, *says: dict[str, list[str]]) -> None:
        self._says, self.seen = says, list[tuple[str, str]]()

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        number = int(sandbox.log.path.stem.partition("-")[2]) - 1
        lines = self._says[number].get(task.id.rpartition("/")[2], [])
        for line in lines:
            result = await sandbox.run(line)
            self.seen.append((line, result.output.decode(errors="replace").strip()))
        return EndReason.DONE, len(lines)


@pytest.fixture(params=[None, pytest.param(60_001, marks=pytest.mark.full)], ids=["root", "user"])
def many(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Attempt]]:
    """Attempts in sandboxes of this user, and with CI_FULL=1 of a normal one."""

    def attempts(agent: Agent, folder: Path, n: int = 1) -> list[Attempt]:
        with loaded_steps(folder) as plan:
            assert plan is not None
            place = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
            place.mkdir()
            return run_steps(plan, agent, LoggedBackend(BubblewrapBackend(host_uid=request.param), place), n)

    return attempts


@pytest.fixture
def once(many: Callable[..., list[Attempt]]) -> Callable[..., Attempt]:
    return lambda agent, folder: many(agent, folder)[0]


def test_the_oracle_passes_every_step_and_doing_nothing_stops_at_the_first(
    once: Callable[..., Attempt], tmp_path: Path
) -> None:
    folder = write(tmp_path / "t")
    done = once(Oracle(), folder)
    assert (done.verdict, [s.name for s in done.steps]) == (Verdict.PASSED, ["one", "two"])
    assert done.rewards == {"reward": 1.0}
    assert [c.id for c in done.checks] == ["two/second", "two/staged"]
    idle = once(Nop(), folder)
    assert (idle.verdict, [s.name for s in idle.steps]) == (Verdict.FAILED, ["one"])
    assert idle.log is not None
    assert "reward 0 is below min_reward 0.5" in idle.log.read_text()


class Frozen(Typist):
    """Whose harness cannot start at a step, as when tmux was stopped in the step before."""

    def __init__(self, at: str, **says: list[str]) -> None:
        super().__init__(dict(says))
        self._at = at

    async def act(self, sandbox: LoggedSandbox, task: Task) -> tuple[EndReason, int]:
        if task.id.endswith(self._at):
            raise SandboxError("tmux new-session failed in the sandbox: no answer in time")
        return await super().act(sandbox, task)


def test_a_harness_that_an_earlier_step_keeps_from_starting_is_no_escape(
    once: Callable[..., Attempt], tmp_path: Path
) -> None:
    later = once(Frozen("/two", one=["echo one > first.txt"]), write(tmp_path / "t"))
    assert (later.verdict, [s.verdict for s in later.steps]) == (Verdict.FAILED, [Verdict.PASSED, Verdict.FAILED])
    first = once(Frozen("/one"), write(tmp_path / "u"))  # nobody has done anything there yet
    assert first.verdict is Verdict.INFRA_ERROR


def test_the_agents_processes_and_shell_live_on_and_nothing_of_a_verifier_reaches_them(
    once: Callable[..., Attempt], tmp_path: Path
) -> None:
    """A background process counts on, the environment stays, and what the first verifier wrote is nowhere."""
    counting = "(while :; do echo x >> ticks; sleep 0.02; done) & cd /tmp; export KEPT=yes"
    stopped = "sleep 100 & echo $! > /tmp/pid; kill -STOP $!"
    look = (
        "ls -A /app /tmp /root; grep -rls 'secret-of-one' /app /tmp /root /var /run /opt /dev/shm; "
        "ls -d /tests /solution /logs /opt/rsi; grep -c tests /proc/mounts"
    )
    typist = Typist(
        {
            "one": ["echo one > /app/first.txt", stopped, counting],
            "two": [
                "echo $KEPT $PWD; wc -l < /app/ticks; sleep 0.2; wc -l < /app/ticks; cut -d' ' -f3 /proc/$(cat pid)/stat",
                look,
                "echo two > /app/second.txt",
            ],
        }
    )
    done = once(typist, write(tmp_path / "t"))
    assert (done.verdict, done.flags) == (Verdict.PASSED, ())
    seen = [text for _, text in typist.seen]
    kept, before, after, state = seen[3].splitlines()
    assert (kept, state) == ("yes /tmp", "T")  # what the agent had stopped stays so
    assert int(after) > int(before)  # what ran goes on
    assert "left-behind" not in seen[4]
    assert seen[4].count("No such file") == 4
    assert seen[4].splitlines()[-1] == "0"


def test_partial_rewards_thresholds_and_both_strategies(once: Callable[..., Attempt], tmp_path: Path) -> None:
    half = {"one": ["touch half.txt"], "two": ["echo two > second.txt"]}
    done = once(Typist(half), write(tmp_path / "mean"))
    assert [s.rewards for s in done.steps] == [{"reward": 0.6}, {"reward": 1.0}]
    assert done.rewards == {"reward": pytest.approx(0.8)}
    assert done.verdict is Verdict.FAILED  # strict: every step must pass
    final = once(Typist(half), write(tmp_path / "final", **{"task.toml": "multi_step_reward_strategy = 'final'\n" + FILES["task.toml"]}))  # fmt: skip
    assert (final.verdict, final.rewards) == (Verdict.PASSED, {"reward": 1.0})
    strict = FILES["task.toml"].replace("min_reward = 0.5", "min_reward = {reward = 0.5, style = 1.0}")
    stopped = once(Typist(half), write(tmp_path / "named", **{"task.toml": strict}))
    assert (stopped.verdict, len(stopped.steps)) == (Verdict.FAILED, 1)  # a reward that is missing is below everything


CHEATS = {
    # what a step's verifier could be fooled with, tried between two steps
    "waits for tests": "(while :; do cat /tests/test.sh /proc/*/root/tests/test.sh > /app/stolen 2>/dev/null && break; done) &",
    "fakes programs": "mkdir -p /root/bin; printf '#!/bin/sh\\nexit 0\\n' > /root/bin/cat; chmod +x /root/bin/cat; PATH=/root/bin:$PATH",
    "links": "ln -s /tests/test.sh first.txt",
    "hides": "echo one > first.txt; chmod 000 first.txt; mkdir -p d/e; chmod 000 d; rm -f data.txt; touch data.txt; chmod 000 data.txt; rm -f seed.txt",
    "reward file": "mkdir -p /logs/verifier 2>/dev/null; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt",
    "too deep": "n=$(printf 'x%.0s' {1..200}); for i in {1..24}; do mkdir $n; cd -P $n || break; done; echo one > /app/first.txt",
    "bash": "cat() { echo one; }; export -f cat; enable -n test; trap 'echo 1 > /logs/verifier/reward.txt' EXIT",
    "huge hole": "truncate -s 900G hole",
}  # fmt: skip


def test_cheats_between_steps_earn_nothing(many: Callable[..., list[Attempt]], tmp_path: Path) -> None:
    says = [{"one": [command], "two": ["cat /app/stolen", "echo two > second.txt"]} for command in CHEATS.values()]
    done = dict(zip(CHEATS, many(Typist(*says), write(tmp_path / "t"), len(CHEATS)), strict=True))
    for name, attempt in done.items():
        assert attempt.verdict is Verdict.FAILED, name  # a verdict: none of these masks the attempt
        assert len(attempt.steps) == 1, name
        assert attempt.steps[0].rewards in ({"reward": 0.0}, {}), name
    assert done["too deep"].flags == ("broke_verifier",)  # no verifier can look at it, and that is the agent's fault
    assert done["links"].flags == ("link_to_verifier",)


def test_a_step_that_cannot_be_prepared_is_the_agents_failure(once: Callable[..., Attempt], tmp_path: Path) -> None:
    typist = Typist({"one": ["echo one > first.txt", "mkdir later.txt"]})
    done = once(typist, write(tmp_path / "t"))
    assert (done.verdict, [s.verdict for s in done.steps]) == (Verdict.FAILED, [Verdict.PASSED, Verdict.FAILED])
    assert "later.txt could not be put into /app" in done.error
    broken = write(tmp_path / "setup", **{"steps__two__workdir__setup.sh": "echo no; exit 3\n"})
    done = once(Typist({"one": ["echo one > first.txt"]}), broken)
    assert "setup.sh of step two ended with 3: no" in done.error


def test_a_healthcheck_is_tried_before_the_agent_begins(once: Callable[..., Attempt], tmp_path: Path) -> None:
    def check(wanted: int, *more: str) -> str:
        table = ("[steps.healthcheck]", f"command = 'echo x >> tries; [ $(wc -l < tries) = {wanted} ]'", *more)
        return "\n".join((*table, "interval_sec = 0.01\n"))

    def task(name: str, one: str, two: str) -> Path:
        first, _, second = FILES["task.toml"].partition("[[steps]]\nname = 'two'")
        return write(tmp_path / name, **{"task.toml": f"{first}{one}[[steps]]\nname = 'two'{second}{two}"})

    says = {"one": ["cat tries", "rm tries; echo one > first.txt"], "two": ["cat tries", "echo two > second.txt"]}
    typist = Typist(says)
    done = once(typist, task("healthy", check(3), check(2, "retries = 2")))
    assert (done.verdict, done.error) == (Verdict.PASSED, "")
    assert [said for _, said in typist.seen] == ["x\nx\nx", "", "x\nx", ""]
    # what fails before any agent has acted is no verdict on one; later it is what the agent has left
    late = once(Oracle(), task("late", "", check(0)))
    assert (late.verdict, late.steps[1].verdict) == (Verdict.FAILED, Verdict.FAILED)
    assert "healthcheck of step two ended with 1, 3 times in a row" in late.error
    never = once(Oracle(), task("never", check(0), ""))
    assert (never.verdict, never.rewards) == (Verdict.INFRA_ERROR, {})
    assert "healthcheck of step one" in never.error
    slow = "[steps.healthcheck]\ncommand = 'sleep 60'\ntimeout_sec = 0.1\nretries = 1\n"
    assert "did not end in time" in once(Oracle(), task("slow", "", slow)).error


def test_a_broken_verifier_masks_the_attempt(once: Callable[..., Attempt], tmp_path: Path) -> None:
    folder = write(tmp_path / "t", **{"tests__test.sh": "exit 127\n"})
    done = once(Oracle(), folder)
    assert (done.verdict, len(done.steps), done.rewards) == (Verdict.VERIFIER_ERROR, 1, {})


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    (single / "task.toml").write_text("[agent]\n")
    with loaded_steps(single) as plan:
        assert plan is None
    endless = FILES["task.toml"] + "[steps.healthcheck]\ncommand = 'true'\ninterval_sec = inf\n"
    with (
        pytest.raises(TaskError, match=r"task\.toml:\d+: .*interval_sec"),
        loaded_steps(write(tmp_path / "h", **{"task.toml": endless})),
    ):
        raise AssertionError
    with (
        pytest.raises(TaskError, match=r"steps/two.*instruction\.md"),
        loaded_steps(write(tmp_path / "i", **{"steps__two__instruction.md": None})),
    ):
        raise AssertionError
    assert "steps/two/tests/test.sh" in read_folder(tmp_path / "h")


def test_a_backend_without_checks_says_so(tmp_path: Path) -> None:
    class Bare:
        async def run(self, command: str, *, timeout_s: float | None = None) -> None: ...

    with pytest.raises(SandboxError, match="--backend bubblewrap"):
        asyncio.run(LoggedSandbox(Bare(), None).check(None))  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    folder = write(tmp_path / "t")
    arguments = ["tasks", "run", str(folder), "--json", "--log", str(tmp_path / "log"), "--agent"]
    done = CliRunner().invoke(app, [*arguments, "oracle"])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    (only,) = document["attempts"]
    assert (document["task"], only["rewards"]) == ("t", {"reward": 1.0})
    assert [(s["step"], s["verdict"]) for s in only["steps"]] == [("one", "passed"), ("two", "passed")]
    refused = CliRunner().invoke(app, [*arguments, "shell"])
    assert "cannot do tasks of several steps" in str(refused.exception)


@pytest.mark.docker
@pytest.mark.full
def test_the_same_on_a_docker_engine(docker_url: str, tmp_path: Path) -> None:
    cheats = [CHEATS[name] for name in ("waits for tests", "links")]
    honest = {
        "one": ["echo one > first.txt; ln first.txt hard; mkfifo pipe; (while :; do echo x >> ticks; sleep 0.05; done) &"],
        "two": ["wc -l < ticks; sleep 0.5; wc -l < ticks", "ls -A /app /tmp /root; ls -d /tests /logs", "echo two > second.txt"],
    }  # fmt: skip
    typist = Typist(honest, *({"one": [command], "two": ["echo two > second.txt"]} for command in cheats))
    with loaded_steps(write(tmp_path / "t")) as plan:
        assert plan is not None
        results = []
        for agent, n in ((Oracle(), 1), (typist, 1 + len(cheats))):
            place = tmp_path / f"log-{n}"
            place.mkdir()
            backend = DockerBackend(image="prepared", base_url=docker_url)
            results += run_steps(plan, agent, LoggedBackend(backend, place), n)
    oracle, done, *cheated = results
    assert (oracle.verdict, oracle.rewards) == (Verdict.PASSED, {"reward": 1.0})
    assert (done.verdict, done.flags) == (Verdict.PASSED, ())
    seen = dict(typist.seen)
    before, after = seen[honest["two"][0]].splitlines()
    assert int(after) > int(before)
    assert "left-behind" not in seen[honest["two"][1]]
    assert seen[honest["two"][1]].count("No such file") == 2
    for attempt in cheated:
        assert (attempt.verdict, len(attempt.steps)) == (Verdict.FAILED, 1), attempt.error
