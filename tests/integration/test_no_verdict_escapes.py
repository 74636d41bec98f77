"""Escapes by infra_error: whatever an agent does to its own sandbox, there is a verdict, never a mask. Both backends."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.domain import Limits, Verdict
from tests.integration.sandbox_kit import SOLVE_SH, Machine, make_task, started_machine


@dataclass(frozen=True)
class Escape:
    name: str
    commands: tuple[str, ...]
    verdict: Verdict = Verdict.FAILED
    limits: Limits | None = None


ROOMY = Limits(memory_mb=64, storage_mb=256, inodes=200_000, pids=40, command_timeout_s=10.0)
LIE = r"printf 'R0 / \0declare -x A=1; while :; do :; done\0' >&199"
FILL = "head -c 250M /dev/zero > fill; head -c 250M /dev/zero > ~/fill; head -c 250M /dev/zero > /tmp/fill"

ESCAPES = [
    # what the verifier's search of the workspace meets
    Escape("a huge file of holes", (SOLVE_SH, "truncate -s 8E hole || truncate -s 1T hole; mkdir -p ~/x; truncate -s 1T ~/x/hole"), Verdict.PASSED),
    Escape("a deep tree", (SOLVE_SH, "for i in $(seq 400); do mkdir dddddddddddddddddddddddddddddd && cd dddddddddddddddddddddddddddddd || break; done; touch conftest.py"), Verdict.PASSED),
    Escape("names that are no text", (SOLVE_SH, r"mkdir $'\xff\xfe\n' && touch $'\xff\xfe\n/conftest.py' $'\x1b[31m'; ln -s $'/tmp/\xff' $'l\xff'"), Verdict.PASSED),
    Escape("links to links and long names", (SOLVE_SH, "n=$(printf 'n%.0s' {1..255}); ln -s $n $n; for i in {1..50}; do ln -s l$((i+1)) l$i; done; touch l51; mkfifo p; ln -s $(printf 'a/%.0s' {1..2000}) long"), Verdict.PASSED),
    Escape("links that take for ever to follow", (SOLVE_SH, "t=$(printf 'a/../%.0s' {1..800})a; mkdir a; for i in {1..100}; do ln -s $t l$i; done")),
    Escape("such links where no name reaches", (SOLVE_SH, "t=$(printf 'a/../%.0s' {1..800})a; mkdir a; for i in {1..70}; do ln -s $t l$i; done", "d=$(printf 'd/%.0s' {1..2020}); mkdir -p $d && cd $d && ln -s x $(printf 'n%.0s' {1..200})"), limits=ROOMY),
    Escape("modes that forbid", (SOLVE_SH, "mkdir -p a/b c; touch a/b/f; chmod 0 a/b a c input; ")),
    Escape("the workspace itself forbidden", ("chmod 0 /app; exit", "true", "true")),
    Escape("many names", ("for i in {1..60000}; do echo f$i; done | xargs touch; " , "true"), limits=ROOMY),
    # the shell's restart
    Escape("a restart script that never ends", (LIE, "kill -9 $$", "true")),
    Escape("a restart in a full process table", ("f() { f | f & }; f", "exit", "true", "exec true", "true")),
    Escape("an environment that is too large", ("export A=$(head -c 3000000 /dev/zero | tr '\\0' a)", "exit", "true")),
    Escape("everything stands still", ("kill -STOP -1", "exit", "kill -STOP $PPID $$", "true")),
    Escape("supervisor killed", ("kill -9 -1", "kill -9 $PPID $$", "true")),
    Escape("descriptors of the shell closed", ("exec 198<&- 199>&- 200>&-", "true", "exec 199>/dev/null", "true")),
    Escape("reports without end", ("yes >&199 & exec yes >&199", "true")),
    # memory
    Escape("tmpfs beyond the memory limit", (FILL, "exit", "true", "exec true", "true"), limits=ROOMY),
    Escape("memory in every process", ("for i in {1..30}; do (a=$(head -c 100M /dev/zero | tr '\\0' a); sleep 5) & done; wait", "exit", "true")),
]  # fmt: skip


# of a second or more: with CI_FULL=1 only
SLOW = frozenset({
    "a deep tree", "many names", "everything stands still", "descriptors of the shell closed", "an environment that is too large",
    "memory in every process", "a restart script that never ends",
})  # fmt: skip
ON_DOCKER = frozenset({"a huge file of holes", "tmpfs beyond the memory limit"})


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with started_machine(request) as out:
        yield out


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda e: e.name.replace(" ", "-"))
def test_nothing_that_an_agent_does_is_masked(machine: Machine, tmp_path: Path, escape: Escape) -> None:
    few = escape.name in ON_DOCKER if machine.kind == "docker" else escape.name not in SLOW
    if not few and not os.environ.get("CI_FULL"):
        pytest.skip("with CI_FULL=1 only")
    with machine.box(make_task(tmp_path, limits=escape.limits)) as box:
        for command in escape.commands:
            box.run(command, timeout_s=3 if escape.limits else 1.5)
        report = box.verify()
    report.log.encode()
    assert report.verdict is escape.verdict, report


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("exit 125", Verdict.FAILED),  # what says on Docker that the image is at fault, but said by the agent's program
        (FILL, Verdict.FAILED),
        pytest.param("kill -9 -1; kill -9 $$; exit 1", Verdict.FAILED, marks=pytest.mark.full),
        pytest.param("exec >&- 2>&- </dev/null; sleep 60", Verdict.FAILED, marks=pytest.mark.full),
        pytest.param("truncate -s 1T /logs/verifier/ctrf.json /logs/verifier/x; exit 1", Verdict.FAILED, marks=pytest.mark.full),
        ("exit 0", Verdict.PASSED),
    ],
)  # fmt: skip
def test_nothing_that_a_program_of_the_agent_does_under_the_verifier_is_masked(
    machine: Machine, tmp_path: Path, program: str, verdict: Verdict
) -> None:
    task = make_task(
        tmp_path, test_sh="exec ./prog.sh\n", solve_sh="echo > prog.sh; chmod +x prog.sh", checks=(), limits=ROOMY, verifier_timeout_s=5
    )  # fmt: skip
    with machine.box(task) as box:
        box.run(f"printf '#!/bin/bash\n%s\n' {shlex.quote(program)} > prog.sh; chmod +x prog.sh")
        report = box.verify()
    assert report.verdict is verdict, report


def test_a_state_that_cannot_be_copied_between_steps_is_a_failure(machine: Machine, tmp_path: Path) -> None:
    """Holes stay holes in a copy of bubblewrap's; an engine's archive fills them, beyond the disk of 8 MB."""
    task = make_task(tmp_path)
    with machine.box(task) as box:
        box.run(SOLVE_SH + "truncate -s 20M hole")
        report = machine.wait(box.sandbox.check(task))  # type: ignore[attr-defined]
        assert box.say("echo alive") == "alive"
    assert report.verdict is (Verdict.FAILED if machine.kind == "docker" else Verdict.PASSED), report


@pytest.mark.docker
@pytest.mark.full
def test_an_engine_elsewhere_is_searched_by_names(
    docker_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volumes are not in our file system: an archive of their names says the same, or that it cannot."""
    monkeypatch.setattr("stages.backends.sandbox.docker_state.place_of", lambda client, volume: "")
    said = {
        SOLVE_SH: (Verdict.PASSED, ()),
        SOLVE_SH + "mkdir a; ln -s /tests/test.sh a/answer": (Verdict.FAILED, ("link_to_verifier",)),
        SOLVE_SH + "truncate -s 1T hole": (Verdict.FAILED, ("link_to_verifier",)),
    }
    for commands, (verdict, flags) in said.items():
        with docker_machine.box(make_task(tmp_path)) as box:
            box.run(commands)
            report = box.verify()
        assert (report.verdict, report.flags) == (verdict, flags), report
