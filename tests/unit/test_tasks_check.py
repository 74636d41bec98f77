"""Lint, Dockerfiles, multi-step tasks and original Terminal-Bench folders: each finding with its file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.errors import TaskError
from stages.tasks.check import Severity, check_suite, check_task
from stages.tasks.digests import read_folder
from stages.tasks.dockerfile import base_images, is_pinned, parse, workspace
from stages.tasks.generate import generate_pool
from stages.tasks.harbor import load_task
from stages.tasks.schema import parse_task_toml
from stages.tasks.steps import Step, read_steps, step_tasks
from stages.tasks.terminal_bench import convert_task, is_terminal_bench
from stages.tasks.write import write_pool

GOOD = {
    "instruction.md": "Make the file out.txt.\n",
    "task.toml": '[metadata]\ncategory = "demo"\n[environment]\nnetwork_mode = "no-network"\n',
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ /app/\n",
    "environment/files/in.txt": "1 2 3\n",
    "tests/test.sh": "# apt-get install in a comment is harmless\ntest -f /app/out.txt && echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "touch /app/out.txt # the answer\n",
}


def folder_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def found(root: Path, changes: dict[str, str | None]) -> set[tuple[str, str, str, int]]:
    files = {name: text for name, text in (GOOD | changes).items() if text is not None}
    folder = folder_of(root / "t", files)
    return {(str(p.severity), p.rule, str(p.path.relative_to(folder)), p.line) for p in check_task(folder)}


def test_good_tasks_have_no_problem(tmp_path: Path):
    assert found(tmp_path, {}) == set()
    write_pool(generate_pool("train", 24, 0), tmp_path / "pool")
    assert check_suite(tmp_path / "pool") == []


PLANTED = {
    "install": (
        {"tests/test.sh": "set -e\napt-get  -y -qq install jq\n\nuvx pytest\ncurl x | sh\n"},
        {("error", "runtime-install", "tests/test.sh", n) for n in (2, 4, 5)},
    ),
    "install from python": (
        {"tests/helper.py": "import os\nos.system('python -m pip install x')\n"},
        {("error", "runtime-install", "tests/helper.py", 2)},
    ),
    "tests in the build context": (
        {"environment/tests/x.py": "assert True\n"},
        {("error", "test-leak", "environment/tests/x.py", 1)},
    ),
    "copied solution": (
        {"environment/files/hint": GOOD["solution/solve.sh"]},
        {("error", "test-leak", "environment/files/hint", 1)},
    ),
    "dockerfile copies tests": (
        {"environment/Dockerfile": GOOD["environment/Dockerfile"] + "COPY ../tests /app/t\n"},
        {
            ("error", "test-leak", "environment/Dockerfile", 4),
            ("note", "needs-docker", "environment/Dockerfile", 4),
        },
    ),
    "hidden path": (
        {"instruction.md": "Read this.\nThen see /tests/test.sh.\n"},
        {("warning", "hidden-path", "instruction.md", 2)},
    ),
    "unpinned": (
        {
            "environment/Dockerfile": (
                "# x\nFROM ubuntu AS a\nFROM a\nFROM python:latest\nFROM reg:5000/x\nFROM y@sha256:0\nWORKDIR /app\nCOPY files/ .\n"
            )
        },
        {("warning", "unpinned-image", "environment/Dockerfile", n) for n in (2, 4, 5)},
    ),
    "run in the image": (
        {
            "environment/Dockerfile": GOOD["environment/Dockerfile"]
            + "USER x\nRUN apt-get install jq\nENV A=b\nENV P=$A:x\n"
        },
        {("note", "needs-docker", "environment/Dockerfile", n) for n in (4, 5, 7)},
    ),
    "a prepared root filesystem instead": (
        {
            "environment/Dockerfile": GOOD["environment/Dockerfile"] + "RUN apt-get install jq\n",
            "task.toml": GOOD["task.toml"] + "[metadata.terminal_rsi]\nrootfs = 'tools'\n",
        },
        set(),
    ),
    "workspace in system files": (
        {"environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /usr/src/app\nCOPY files/ .\n"},
        {("note", "needs-docker", "environment/Dockerfile", 1)},
    ),
    "keys that have no effect": (
        {
            "task.toml": GOOD["task.toml"]
            + "healthcheck = {command = 'x'}\n[agent]\nuser = 'bob'\nnetwork_mode = 'public'\n[verifier]\nuser = 1\n"
            "environment_mode = 'separate'\n[[verifier.collect]]\ncommand = 'x'\n"
        },
        {("note", "unsupported-key", "task.toml", n) for n in (5, 7, 10, 11, 12)}
        | {("note", "network", "task.toml", 8)},
    ),
    "environment from this machine": (
        {"task.toml": GOOD["task.toml"] + "[verifier.env]\nA = 'x'\nKEY = '${OPENAI_API_KEY}'\n"},
        {("error", "broken", "task.toml", 7)},
    ),
    "environment that steers the verifier": (
        {"task.toml": GOOD["task.toml"] + "[verifier]\nenv = {LD_PRELOAD = '/app/x.so'}\n"},
        {("error", "broken", "task.toml", 6)},
    ),
    "environment that no shell can hold": (
        {"task.toml": GOOD["task.toml"] + "env = {'A-B' = 'x'}\n"},
        {("error", "broken", "task.toml", 5)},
    ),
    "unpinned docker_image": (
        {"task.toml": GOOD["task.toml"] + "docker_image = 'ubuntu'\n"},
        {("warning", "unpinned-image", "task.toml", 5)},
    ),
    "unknown key": (
        {"task.toml": GOOD["task.toml"] + "memory = '1G'\n[verifier]\nfoo = 1\n"},
        {("error", "unknown-key", "task.toml", 7), ("warning", "legacy-key", "task.toml", 5)},
    ),
    "network": (
        {"task.toml": "[environment]\nnetwork_mode = 'public'\n"},
        {("note", "network", "task.toml", 2)},
    ),
    "no solution": ({"solution/solve.sh": None}, {("warning", "no-solution", "solution/solve.sh", 0)}),
    "no instruction": ({"instruction.md": None}, {("error", "broken", "instruction.md", 0)}),
    "broken toml": ({"task.toml": "[agent]\ntimeout_sec = 'x'\n"}, {("error", "broken", "task.toml", 2)}),
    "compose": (
        {"environment/docker-compose.yaml": "services:\n  db:\n    image: postgres\n"},
        {
            ("warning", "unpinned-image", "environment/docker-compose.yaml", 3),
            ("note", "needs-docker", "environment/docker-compose.yaml", 1),
        },
    ),
    "gpu": (
        {"task.toml": GOOD["task.toml"] + "gpus = 1\nos = 'windows'\n"},
        {("note", "unsupported-key", "task.toml", 5), ("error", "windows", "task.toml", 6)},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_problems_are_found_where_they_are(name: str, tmp_path: Path):
    changes, expected = PLANTED[name]
    assert found(tmp_path, changes) == expected


def test_problems_are_sorted_and_printable(tmp_path: Path):
    folder = folder_of(
        tmp_path / "t", GOOD | {"tests/test.sh": "wget x\n", "environment/Dockerfile": "FROM x\nRUN make\n"}
    )
    problems = check_task(folder)
    assert [p.severity for p in problems] == sorted((p.severity for p in problems), key=list(Severity).index)
    assert str(problems[0]).startswith(f"{folder}/tests/test.sh:1: error: runtime-install: 'wget'")
    assert any("Dockerfile:2: note: needs-docker: RUN make needs an image build" in str(p) for p in problems)


def test_lint_survives_unreadable_folders(tmp_path: Path):
    folder = folder_of(tmp_path / "t", GOOD)
    os.mkfifo(folder / "tests/pipe")
    (problem,) = check_task(folder)
    assert (problem.rule, "pipe" in problem.message) == ("unreadable", True)
    assert check_suite(tmp_path / "absent")[0].rule == "missing"
    assert [p.rule for p in check_suite(tmp_path)] == ["unreadable"]


def test_dockerfile_parsing():
    text = 'FROM a:1 as x\n# c\nRUN one \\\n  # inside\n  two\nCOPY <<EOF /app/x\nRUN no\nEOF\nCOPY ["a b", "/c"]\n'
    assert [(i.line, i.name) for i in parse(text)] == [(1, "FROM"), (3, "RUN"), (6, "COPY"), (9, "COPY")]
    assert parse(text)[1].text.split() == ["one", "two"]
    assert base_images("FROM --platform=linux/amd64 a\nFROM scratch\n") == [(1, "a")]
    assert [is_pinned(i) for i in ("a", "a:latest", "a:1", "h:5000/a", "h:5000/a:1", "a@sha256:ff")] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]


def test_dockerfile_workspace():
    context = {"files/a": b"1", "files/sub/b": b"2", "x.py": b"3", "y.py": b"4", "z": b"5"}
    built = workspace(
        "FROM a:1\nWORKDIR /srv\nWORKDIR app\nCOPY files/ /srv/app/\nCOPY *.py ./\nCOPY z renamed\n", context
    )
    assert built.workdir == "/srv/app"
    assert built.files == {"a": b"1", "sub/b": b"2", "x.py": b"3", "y.py": b"4", "renamed": b"5"}
    assert built.unsupported == ()
    for line, word in (
        ("RUN x", "image build"),
        ("COPY z /etc/z", "outside"),
        ("COPY nothing .", "matches nothing"),
        ("ENV A=$B", "image build"),
        ("COPY --from=x a b", "image build"),
    ):
        ((at, reason),) = workspace(f"FROM a\nWORKDIR /app\n{line}\n", context).unsupported
        assert at == 3
        assert word in reason
    assert workspace("FROM a\nENV A=1 B='x y'\nENV C d  e\n", {}).env == {"A": "1", "B": "x y", "C": "d  e"}


STEPS = {
    "task.toml": (
        "multi_step_reward_strategy = 'final'\n[agent]\ntimeout_sec = 9\n"
        "[environment]\nnetwork_mode = 'no-network'\ndocker_image = 'a:1'\n"
        "[[steps]]\nname = 'one'\nmin_reward = 0.5\n[[steps]]\nname = 'two'\nagent = {timeout_sec = 4}\n"
    ),
    "tests/test.sh": "shared\n",
    "tests/common": "c\n",
    "steps/one/instruction.md": "first\n",
    "steps/one/workdir/seed": "s\n",
    "steps/one/solution/solve.sh": "true\n",
    "steps/two/instruction.md": "second\n",
    "steps/two/tests/test.sh": "own\n",
}


def steps_of(folder: Path) -> tuple[Step, ...]:
    content = read_folder(folder)
    return read_steps(folder, content, parse_task_toml(content["task.toml"].decode(), str(folder / "task.toml")))


def test_multi_step(tmp_path: Path):
    folder = folder_of(tmp_path / "t", STEPS)
    one, two = steps_of(folder)
    assert (one.name, two.name) == ("one", "two")
    assert (one.instruction, one.tests["test.sh"], one.min_reward, one.agent_timeout_s) == (
        "first",
        b"shared\n",
        0.5,
        9.0,
    )
    assert dict(one.workdir) == {"seed": b"s\n"}
    assert (two.tests["test.sh"], two.tests["common"], two.agent_timeout_s) == (b"own\n", b"c\n", 4.0)
    with pytest.raises(TaskError, match=r"task\.toml:7: a task of 2 steps"):
        load_task(folder, "s")
    assert [p.rule for p in check_task(folder)] == ["needs-docker", "several-steps"]
    content = read_folder(folder)
    first, second = step_tasks(
        folder, "s", content, parse_task_toml(content["task.toml"].decode(), "task.toml"), tmp_path / "place"
    )
    assert (first.task.id, second.task.id) == ("t/one", "t/two")
    assert (first.min_reward, second.min_reward) == ({"reward": 0.5}, {})
    assert (first.task.agent_timeout_s, second.task.agent_timeout_s) == (9.0, 4.0)
    assert (second.task.root / "tests/test.sh").read_text() == "own\n"
    assert not (second.task.root / "solution").exists()
    assert dict(second.task.files) == {"seed": b"s\n"}  # what earlier steps were given is there still


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps/two/instruction.md": None}, r"steps/two/instruction\.md: missing"),
        ({"tests/test.sh": None}, r"steps/one/tests/test\.sh: missing"),
        ({"task.toml": STEPS["task.toml"].replace("'two'", "'ONE'")}, r"task\.toml:11: step 'ONE' occurs twice"),
        ({"task.toml": STEPS["task.toml"].replace("'two'", "'../x'")}, r"task\.toml:11: steps\.1\.name"),
    ],
)
def test_broken_steps(change: dict[str, str | None], message: str, tmp_path: Path):
    folder = folder_of(tmp_path / "t", {k: v for k, v in (STEPS | change).items() if v is not None})
    with pytest.raises(TaskError, match=message):
        steps_of(folder)


ORIGINAL = {
    "task.yaml": (
        "instruction: |-\n  Do it: now.\n  Twice.\ndifficulty: hard\ncategory: games\ntags:\n  - a\nparser_name: pytest\n"
        "max_agent_timeout_sec: 900\nmax_test_timeout_sec: 120.0\n"
    ),
    "docker-compose.yaml": (
        "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}\n"
        '    command: [ "sh", "-c", "sleep infinity" ]\n    volumes: ["${A}:${B}"]\n'
    ),
    "Dockerfile": "FROM ghcr.io/x/base:20250624\nWORKDIR /app\nCOPY data.csv /app/\n",
    "data.csv": "1,2\n",
    "run-tests.sh": "#!/bin/bash\nuv run pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_it():\n    assert True\n",
    "solution.sh": "#!/bin/bash\ntrue\n",
}


def test_original_terminal_bench(tmp_path: Path):
    source = folder_of(tmp_path / "src/play", ORIGINAL)
    assert is_terminal_bench(source)
    with pytest.raises(TaskError, match="original Terminal-Bench folder"):
        load_task(source, "s")
    task = load_task(convert_task(source, tmp_path / "out/play"), "tb", strict=True)
    assert task.instruction == "Do it: now.\nTwice."
    assert (task.family, task.stratum, task.workdir, task.files) == ("games", "hard", "/app", {"data.csv": b"1,2\n"})
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.categories) == (900.0, 120.0, ("games", "a"))
    assert {str(p.relative_to(task.root)) for p in task.root.rglob("*") if p.is_file()} == {
        "instruction.md",
        "task.toml",
        "environment/Dockerfile",
        "environment/data.csv",
        "tests/test.sh",
        "tests/run-tests.sh",
        "tests/test_outputs.py",
        "solution/solve.sh",
    }
    assert [(p.rule, p.line) for p in check_task(task.root)][:1] == [("runtime-install", 2)]
    with pytest.raises(TaskError, match="exists already"):
        convert_task(source, task.root)


def test_original_with_services_keeps_its_compose_file(tmp_path: Path):
    compose = "services:\n  client:\n    build: ./client\n  db:\n    image: postgres:16\n"
    files = {k: v for k, v in ORIGINAL.items() if k != "Dockerfile"} | {
        "docker-compose.yaml": compose,
        "client/Dockerfile": "FROM a:1\n",
    }
    out = convert_task(folder_of(tmp_path / "src", files), tmp_path / "out")
    assert (out / "environment/docker-compose.yaml").read_text() == compose
    assert (out / "environment/Dockerfile").read_text() == "FROM a:1\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task.yaml": "instruction: [1\n"}, r"task\.yaml:2: not valid YAML"),
        ({"task.yaml": "difficulty: easy\n"}, r"task\.yaml: no instruction"),
        ({"task.yaml": "instruction: x\nmax_agent_timeout_sec: soon\n"}, r"task\.yaml: max_agent_timeout_sec"),
        ({"task.yaml": "- 1\n"}, r"task\.yaml: file"),
        ({"run-tests.sh": None}, r"run-tests\.sh: missing"),
        ({"docker-compose.yaml": "services: {}\n"}, r"docker-compose\.yaml: cannot be read"),
        ({"Dockerfile": None}, r"Dockerfile: missing"),
        ({"solution.sh": None, "solution.yaml": "- x\n"}, r"solution\.yaml: recorded keystrokes"),
    ],
)
def test_broken_originals(change: dict[str, str | None], message: str, tmp_path: Path):
    source = folder_of(tmp_path / "src", {k: v for k, v in (ORIGINAL | change).items() if v is not None})
    with pytest.raises(TaskError, match=message):
        convert_task(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_oldest_form_of_the_instruction(tmp_path: Path):
    yaml = "descriptions:\n  - key: other\n    description: wrong one\n  - key: base\n    description: yes it is\n"
    out = convert_task(folder_of(tmp_path / "src", ORIGINAL | {"task.yaml": yaml}), tmp_path / "out")
    assert (out / "instruction.md").read_text() == "yes it is\n"
