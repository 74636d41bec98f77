"""`rsi tasks run` in real sandboxes: every kind of agent, its verdict, its JSON and its log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import models as m
from orchestrator.cli import app
from orchestrator.commands.serve import named_model
from orchestrator.embedded import ports
from orchestrator.store import Store
from stages.errors import CheckpointError, StoreError, TaskError
from stages.tasks.generate import generate_pool
from stages.tasks.harbor import load_task
from stages.tasks.write import write_pool
from tests import factories
from tests.integration.sandbox_kit import SOLVE_SH, TEST_SH
from tests.scripted import keys

KEY = "sk-loopback-secret"
TASK_TOML = """[metadata]
category = "demo"
[[metadata.terminal_rsi.checks]]
id = "answer"
[[metadata.terminal_rsi.checks]]
id = "listing"
[[metadata.terminal_rsi.checks]]
id = "untouched"
role = "gate"
[environment]
network_mode = "no-network"
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite") / "answer"
    for name, text in {
        "instruction.md": "Write 42 to answer.txt and list input/ in out/list.txt.\n",
        "task.toml": TASK_TOML,
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY input/ /app/input/\n",
        "environment/input/data.txt": "data\n",
        "tests/test.sh": TEST_SH,
        "solution/solve.sh": SOLVE_SH,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def run(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)

    def once(*options: str, folder: Path = task, typed: str | None = None) -> dict[str, Any]:
        arguments = ["tasks", "run", str(folder), *options, "--json", "--log", str(tmp_path / "log")]
        done = CliRunner().invoke(app, arguments, input=typed)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        document: dict[str, Any] = json.loads(done.stdout)  # nothing else stands there
        assert done.exit_code == document["exit_code"]
        assert document == json.loads((tmp_path / "log/result.json").read_text())
        return document

    return once


def statuses(attempt: dict[str, Any]) -> dict[str, str]:
    return {c["id"]: c["status"] for c in attempt["checks"]}


def log_of(attempt: dict[str, Any]) -> str:
    return Path(attempt["log"]).read_text()


# --------------------------------------------------------------------------- without a model


def test_the_oracle_passes(run: Callable[..., dict[str, Any]]) -> None:
    document = run("--agent", "oracle", "--attempts", "2")
    assert (document["verdict"], document["exit_code"], document["passed"]) == ("passed", 0, 2)
    first, second = document["attempts"]
    assert first["progress"] == first["scenario_checks"] == 2
    assert [c["role"] for c in first["checks"]] == ["scenario", "scenario", "gate"]
    assert set(statuses(second).values()) == {"passed"}
    assert first["log"] != second["log"]
    assert "$ bash /solution/solve.sh\n" in log_of(first)


def test_doing_nothing_fails_with_no_progress(run: Callable[..., dict[str, Any]]) -> None:
    document = run("--agent", "nop")
    assert (document["verdict"], document["exit_code"]) == ("failed", 1)
    (only,) = document["attempts"]
    assert only["progress"] == 0
    assert statuses(only) == {"answer": "failed", "listing": "failed", "untouched": "passed"}


def test_a_person_types(run: Callable[..., dict[str, Any]]) -> None:
    typed = "mkdir out; cd out\n\necho data.txt > list.txt\necho 42 > ../answer.txt; printf 'no end'\nfalse\ndone\nrm ../answer.txt\n"
    document = run("--agent", "shell", typed=typed)
    assert document["exit_code"] == 0
    (only,) = document["attempts"]
    assert only["turns"] == 4
    text = log_of(only)
    assert "no end\n# exit 0" in text
    assert "$ false\n# exit 1" in text
    assert "rm ../answer.txt" not in text  # after `done` nothing is run


def test_the_end_of_input_ends_the_attempt(run: Callable[..., dict[str, Any]]) -> None:
    document = run("--agent", "shell", typed="echo 42 > answer.txt\n")
    assert document["attempts"][0]["progress"] == 1
    assert document["exit_code"] == 1


def test_a_verifier_that_cannot_judge_gives_no_verdict(
    run: Callable[..., dict[str, Any]], task: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(task, broken)
    (broken / "tests/test.sh").write_text("#!/bin/bash\necho nothing to report\nexit 127\n")
    document = run("--agent", "oracle", folder=broken)
    assert (document["verdict"], document["exit_code"], document["verdicts"]) == ("no_verdict", 3, 0)
    (only,) = document["attempts"]
    assert only["verdict"] == "verifier_error"
    assert "no verdict" in only["error"]
    assert "nothing to report" in log_of(only)


def test_an_oracle_without_a_solution(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    folder = tmp_path / "unsolved"
    shutil.copytree(task, folder, ignore=shutil.ignore_patterns("solution"))
    done = CliRunner().invoke(app, ["tasks", "run", str(folder), "--agent", "oracle", "--log", str(tmp_path / "log")])
    assert isinstance(done.exception, TaskError)
    assert "solve.sh is missing" in str(done.exception)


def test_people_see_every_check(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(app, ["tasks", "run", str(task), "--agent", "nop"])
    assert done.exit_code == 1
    rows = [line.split() for line in done.stdout.splitlines()]
    for row in (["1", "answer", "scenario", "failed"], ["1", "untouched", "gate", "passed"]):
        assert row in rows
    (place,) = (tmp_path / "home/task-runs").iterdir()
    assert (place / "attempt-1.log").exists()


def test_an_original_terminal_bench_folder(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "hello"
    for name, text in {
        "task.yaml": "instruction: Make hello.txt.\n",
        "run-tests.sh": "test -f /app/hello.txt\n",
        "docker-compose.yaml": "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n",
        "Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
        "solution.sh": "#!/bin/bash\ntouch hello.txt\n",
    }.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert run("--agent", "oracle", folder=folder)["task"] == "hello"


# --------------------------------------------------------------------------- models


def test_the_shipped_model(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """On one of the pool's easiest tasks, which it solves more often than not."""
    write_pool(generate_pool("train", 1, 5), tmp_path / "pool")
    (folder,) = (p for p in (tmp_path / "pool").iterdir() if p.is_dir())
    document = run("--agent", "checkpoint:shipped", "--attempts", "8", "--need", "1", folder=folder)
    assert document["verdicts"] == 8
    assert len({a["log"] for a in document["attempts"]}) == 8
    specs = load_task(folder, "x").checks
    for attempt in document["attempts"]:
        assert [c["id"] for c in attempt["checks"]] == [s.id for s in specs]
        text = log_of(attempt)
        assert text.count("\n$ ") == attempt["turns"] - (attempt["end_reason"] == "done") > 0
        assert f"# the agent ended: {attempt['end_reason']}" in text
    assert document["exit_code"] == 0


class _Endpoint(ThreadingHTTPServer):
    """Replies from a script, by the number of assistant messages that it is shown."""

    def __init__(self, script: list[str], status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.status = script, status
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: _Endpoint

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append(body)
        self.server.keys.add(self.headers.get("authorization"))
        said = sum(m["role"] == "assistant" for m in body["messages"])
        answer: dict[str, Any] = {"error": {"message": f"not for {KEY}"}}
        if self.server.status == 200:
            message = {"role": "assistant", "content": self.server.script[said]}
            answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def endpoint(script: list[str], status: int = 200) -> Iterator[_Endpoint]:
    server = _Endpoint(script, status)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_behind_a_url(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    script = ["mkdir out && ls input > out/list.txt", "cat nothing", f"echo 42 > answer.txt; echo {KEY}", " done\n"]
    with endpoint(script) as server:
        document = run("--agent", server.url, "--model", "m", "--temperature", "0.25")
    assert (document["exit_code"], document["agent"]) == (0, server.url + "/chat/completions")
    (only,) = document["attempts"]
    assert (only["turns"], only["end_reason"]) == (4, "done")
    assert server.keys == {f"Bearer {KEY}"}
    last = server.seen[-1]
    assert (last["model"], last["temperature"]) == ("m", 0.25)
    assert [m["role"] for m in last["messages"]] == ["user", "assistant"] * 3 + ["user"]
    assert "Write 42 to answer.txt" in last["messages"][0]["content"]
    assert last["messages"][4]["content"] == "err cat: nothing: No such file or directory"
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.skipif(shutil.which("tmux", path="/usr/bin:/bin") is None, reason="no tmux on this machine")
def test_a_model_behind_a_url_in_the_terminus2_harness(run: Callable[..., dict[str, Any]]) -> None:
    script = [keys("mkdir out; ls input > out/list.txt\n", "echo 42 > answer.txt\n"), *[keys(done=True)] * 2]
    with endpoint(script) as server:
        document = run("--agent", server.url, "--model", "m", "--harness", "terminus2")
    assert document["exit_code"] == 0
    (only,) = document["attempts"]
    assert (only["turns"], only["end_reason"]) == (3, "done")
    messages = server.seen[-1]["messages"]
    assert "Write 42 to answer.txt" in messages[0]["content"]
    assert messages[2]["content"].startswith("New Terminal Output:")
    assert "Are you sure" in messages[4]["content"]


def test_the_turn_cap_and_several_attempts(
    run: Callable[..., dict[str, Any]], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    capped = tmp_path / "capped"
    shutil.copytree(task, capped)
    with (capped / "task.toml").open("a") as file:
        file.write("\n[metadata.terminal_rsi]\nmax_turns = 5\n")
    with endpoint(["true"] * 30) as server:
        document = run("--agent", server.url, "--model", "m", "--attempts", "3", folder=capped)
    assert [(a["end_reason"], a["turns"]) for a in document["attempts"]] == [("turn_cap", 5)] * 3
    assert document["exit_code"] == 1
    assert server.keys == {None}


def test_an_endpoint_that_refuses_gives_no_verdict(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with endpoint([], status=403) as server:
        document = run("--agent", server.url, "--model", "m")
    assert document["exit_code"] == 3
    (only,) = document["attempts"]
    assert only["verdict"] == "infra_error"
    assert "HTTP 403: not for ***; check OPENAI_API_KEY" in only["error"]
    assert only["error"] in log_of(only)


def test_an_endpoint_that_is_not_there_gives_no_verdict(run: Callable[..., dict[str, Any]]) -> None:
    with endpoint([]) as gone:
        url = gone.url
    document = run("--agent", url, "--model", "m")
    assert document["exit_code"] == 3
    assert "cannot be reached" in document["attempts"][0]["error"]


# --------------------------------------------------------------------------- models by name


def test_stored_checkpoints_by_every_name(
    store: Store, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saved"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/config.json").write_text("{}")
    first, second = factories.cycle(store, "a"), factories.cycle(store, "b")

    def save(cycle: m.Cycle, name: str, digest: str, path: Path = folder) -> int:
        made = m.Checkpoint(cycle_id=cycle.id, name=name, actor_digest=digest * 32, path=str(path), retained=True)
        row = store.checkpoints.save(made)
        assert row.id is not None
        return row.id

    number = save(first, "RPR-1", "ab")
    save(first, "Base", "cd")
    other = save(second, "Base", "ef")
    gone = save(second, "RSR-1", "98", tmp_path / "deleted")
    (tmp_path / str(number)).mkdir()  # a folder of that name changes nothing
    for reference in (str(number), f"{first.id}/rpr-1", "RPR-1", "abababab"):
        assert named_model(reference) == named_model("RPR-1")
    assert named_model("RPR-1").folder == folder / "actor"
    assert named_model("RPR-1").settings == first.config
    assert named_model("efefefef").settings == second.config
    with pytest.raises(StoreError, match=rf"2 checkpoints are called Base: .*{other} \(cycle {second.id}\)"):
        named_model("Base")
    with pytest.raises(StoreError, match="neither a folder nor a checkpoint"):
        named_model("RPR-7")
    with pytest.raises(StoreError, match="neither a folder nor a checkpoint"):
        named_model("saved", folders=False)
    with pytest.raises(CheckpointError, match="deleted: no such folder"):
        named_model(str(gone))


def test_a_served_checkpoint_is_an_agent(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rsi serve` in its own process, `rsi tasks run` against it."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    write_pool(generate_pool("train", 1, 5), tmp_path / "pool")
    (folder,) = (p for p in (tmp_path / "pool").iterdir() if p.is_dir())
    port = ports.pick_free()
    command = [sys.executable, "-m", "orchestrator.cli", "serve", "shipped", "--port", str(port), "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            deadline = time.monotonic() + 90
            while ports.is_free(port):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            url = f"http://127.0.0.1:{port}/v1"
            document = run("--agent", url, "--prompt", "{instruction}", "--attempts", "8", "--need", "1", folder=folder)
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert document["verdicts"] == 8
    assert document["exit_code"] == 0
