"""`rsi tasks check | convert`, options that cannot be used, exit codes, the client's manners, and the CI examples."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

from orchestrator.chat_endpoint import ChatEndpoint, ContextFull, Reply
from orchestrator.cli import app
from orchestrator.commands.serve import named_model
from orchestrator.commands.tasks import _plain
from orchestrator.task_runs import Attempt, exit_code, fresh_log_folder, loaded_task, runnable, sandbox_backend
from stages.domain import EndReason, Verdict
from stages.errors import ConfigError, ModelError, RsiError, SamplerError, SandboxUnavailable, TaskError
from tests.unit.test_tasks_check import GOOD, ORIGINAL, folder_of

EXAMPLES = Path(__file__).resolve().parents[2] / "infra" / "ci-examples"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)


def rsi(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --------------------------------------------------------------------------- check and convert


def test_check_prints_places_and_counts(tmp_path: Path) -> None:
    good = folder_of(tmp_path / "good", GOOD)
    assert rsi("tasks", "check", str(good)).exit_code == 0
    folder_of(tmp_path / "bad", GOOD | {"tests/test.sh": "set -e\npip install x\n", "task.toml": "colour = 1\n"})
    done = rsi("tasks", "check", str(tmp_path))  # a suite: both folders
    assert done.exit_code == 1
    assert f"{tmp_path}/bad/tests/test.sh:2: error: runtime-install: " in done.stdout
    assert f"{tmp_path}/bad/task.toml:1: error: unknown-key: " in done.stdout
    assert str(good) not in done.stdout
    assert re.search(r"^2 errors, \d+ warnings?, \d+ notes?\.$", done.stdout, re.M)


def test_check_as_json_even_with_names_that_are_no_utf8(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", GOOD)
    (folder / "environment/tests").mkdir()
    with open(bytes(folder / "environment/tests") + b"/x\xff.py", "w") as file:
        file.write("assert True\n")
    done = rsi("tasks", "check", str(folder), "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["errors"] == 1
    assert document["problems"][0]["rule"] == "test-leak"
    assert document["problems"][0]["path"].endswith("x\\udcff.py")
    assert rsi("tasks", "check", str(folder)).exit_code == 1


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", {k: v for k, v in GOOD.items() if not k.startswith("solution/")})
    done = rsi("tasks", "check", str(folder))
    assert done.exit_code == 0
    assert "warning: no-solution" in done.stdout


def test_convert_and_load_an_original_folder(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "play", ORIGINAL)
    assert rsi("tasks", "convert", str(source), str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out/tests/run-tests.sh").exists()
    with loaded_task(source) as loaded:
        assert loaded.id == "play"
        root = loaded.root
        assert (root / "task.toml").exists()
    assert not root.exists()  # the conversion was for this run only
    done = rsi("tasks", "check", str(source))  # one task, not a suite of its subfolders
    assert done.exit_code == 1
    assert "original Terminal-Bench" in done.stdout


# --------------------------------------------------------------------------- what cannot be run


def fails(*arguments: str) -> str:
    done = rsi(*arguments)
    assert isinstance(done.exception, RsiError), done.output  # `main` prints it in one line, exit code 2
    return str(done.exception)


def test_bad_options_are_named(tmp_path: Path) -> None:
    task = str(folder_of(tmp_path / "t", GOOD))
    assert "oracle, nop, shell" in fails("tasks", "run", task, "--agent", "orakel")
    assert "--model" in fails("tasks", "run", task, "--agent", "nop", "--model", "x")
    assert "--temperature" in fails("tasks", "run", task, "--agent", "oracle", "--temperature", "1")
    assert "--need 3" in fails("tasks", "run", task, "--agent", "nop", "--attempts", "2", "--need", "3")
    assert "one attempt" in fails("tasks", "run", task, "--agent", "shell", "--attempts", "2")
    assert "podman" in fails("tasks", "run", task, "--agent", "nop", "--backend", "podman")
    assert "{instruction}" in fails("tasks", "run", task, "--agent", "http://127.0.0.1:9/v1", "--prompt", "go")
    assert "http(s)" in fails("tasks", "run", task, "--agent", "ftp://host/v1")
    assert "OPENAI_API_KEY" in fails("tasks", "run", task, "--agent", "https://me:secret@host/v1")
    assert "Nothing is running" in fails("tasks", "run", task, "--agent", "checkpoint:3")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"task.toml": "[metadata\n"}, "task.toml"),
        ({"task.toml": None}, "task.toml: missing"),
        ({"instruction.md": None}, "instruction.md: missing"),
        ({"tests/test.sh": None}, "test.sh: missing"),
        ({"environment/Dockerfile": None}, "Dockerfile: missing"),
    ],
)
def test_a_malformed_folder_is_one_clear_error(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    files = {name: text for name, text in (GOOD | changes).items() if text is not None}
    assert said in fails("tasks", "run", str(folder_of(tmp_path / "t", files)), "--agent", "nop")
    assert "no such task folder" in fails("tasks", "run", str(tmp_path / "absent"), "--agent", "nop")


def test_bubblewrap_refuses_what_it_would_run_wrongly(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", GOOD | {"environment/Dockerfile": "FROM a:1\nRUN make\nWORKDIR /app\n"})
    with loaded_task(folder) as loaded:
        with pytest.raises(TaskError, match=r"RUN make.*--backend docker"):
            runnable(loaded, "bubblewrap")
        assert runnable(loaded, "bubblewrap", anyway=True).needs_docker == ()
        assert runnable(loaded, "docker") is loaded


def test_an_absent_docker_backend_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "stages.backends.sandbox.docker", None)
    with pytest.raises(SandboxUnavailable, match="use --backend bubblewrap"):
        sandbox_backend("docker")
    with pytest.raises(ConfigError, match="bubblewrap or docker"):
        sandbox_backend("chroot")


def test_logs_are_never_overwritten(tmp_path: Path) -> None:
    folder = fresh_log_folder(tmp_path / "a/b")
    (folder / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="not empty"):
        fresh_log_folder(folder)
    with pytest.raises(ConfigError, match="--log"):
        fresh_log_folder(folder / "result.json")


@pytest.mark.parametrize(
    "verdicts, need, code",
    [
        ("P", 1, 0),
        ("F", 1, 1),
        ("?", 1, 3),
        ("PF", 2, 1),
        ("PF", 1, 0),
        ("P?", 2, 3),
        ("F?", 2, 1),
        ("F?", 1, 3),
        ("PP?", 2, 0),
    ],
)
def test_exit_codes(verdicts: str, need: int, code: int) -> None:
    meaning = {"P": Verdict.PASSED, "F": Verdict.FAILED, "?": Verdict.INFRA_ERROR}
    rows = [Attempt(number=n, verdict=meaning[v], end=EndReason.DONE) for n, v in enumerate(verdicts, 1)]
    assert exit_code(rows, need) == code


def test_terminals_obey_no_sandbox() -> None:
    assert _plain("a\x1b]0;title\x07b\udcff\n\tä") == "a\\x1b]0;title\\x07b\\udcff\n\tä"


# --------------------------------------------------------------------------- naming a model


def test_models_by_folder(tmp_path: Path) -> None:
    assert named_model("shipped").config().rollout.observation_chars == 64
    with pytest.raises(ModelError, match="no such folder"):
        named_model(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        named_model(str(tmp_path))
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/config.json").write_text("{}")
    found = named_model(str(tmp_path))
    assert found.folder == tmp_path / "actor"
    assert found.config().recipe == "paper"


def test_serve_refuses_before_it_loads(tmp_path: Path) -> None:
    assert "no config.json" in fails("serve", str(tmp_path))
    assert "Nothing is running" in fails("serve", "3/RPR-2")


# --------------------------------------------------------------------------- the client


def ask(
    handle: Callable[[httpx.Request], httpx.Response], *, model: str | None = "m", naps: list[float] | None = None
) -> Reply:
    async def nap(seconds: float) -> None:
        if naps is not None:
            naps.append(seconds)

    async def once() -> Reply:
        endpoint = ChatEndpoint(
            "http://host/v1?key=q",
            model=model,
            temperature=0.5,
            key="sk-secret",
            transport=httpx.MockTransport(handle),
            sleep=nap,
        )
        async with endpoint:
            return await endpoint.reply([{"role": "user", "content": "x"}])

    return asyncio.run(once())


def said(text: object, reason: str = "stop") -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": reason}]})


def test_a_reply_is_asked_for_as_openai_does() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "only"}]})
        return said("ls sk-secret", "length")

    reply = ask(handle, model=None)
    assert reply == Reply(text="ls ***", cut=True)  # even an endpoint that echoes the key puts it into no log
    assert [r.url.path for r in seen] == ["/v1/models", "/v1/chat/completions"]
    assert seen[1].headers["authorization"] == "Bearer sk-secret"
    assert json.loads(seen[1].content) == {
        "model": "only",
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0.5,
    }


def test_busy_endpoints_are_asked_again() -> None:
    answers = iter([httpx.Response(429, headers={"retry-after": "7"}), httpx.Response(503), said("done")])
    naps: list[float] = []
    assert ask(lambda _: next(answers), naps=naps).text == "done"
    assert naps == [0.0, 7.0, 2.0]
    with pytest.raises(SamplerError, match="no answer after 4 tries: HTTP 500"):
        ask(lambda _: httpx.Response(500, text="sorry"))


@pytest.mark.parametrize(
    "answer, said_of_it",
    [
        (httpx.Response(401, json={"error": {"message": "bad key sk-secret"}}), r"401: bad key \*\*\*; check OPENAI"),
        (httpx.Response(200, text="<html>sk-secret"), r"not JSON: '<html>\*\*\*'"),
        (httpx.Response(200, json=[]), "no JSON object"),
        (httpx.Response(200, json={"choices": []}), r"choices\[0\]"),
        (said(None), "no text"),
    ],
)
def test_useless_answers_are_said_without_the_key(answer: httpx.Response, said_of_it: str) -> None:
    with pytest.raises(SamplerError, match=said_of_it) as caught:
        ask(lambda _: answer)
    assert "secret" not in str(caught.value)
    assert "key=q" not in str(caught.value)


def test_a_full_context_is_no_breakdown() -> None:
    full = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    with pytest.raises(ContextFull):
        ask(lambda _: httpx.Response(400, json=full))


def test_several_models_need_a_name() -> None:
    with pytest.raises(ConfigError, match=r"2 models \(a, b\); name one with --model"):
        ask(lambda _: httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]}), model=None)


def test_a_key_that_no_header_can_carry_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatEndpoint("http://host", model="m", temperature=None, key="sk-a\nb")
    assert "sk-a" not in str(caught.value)


# --------------------------------------------------------------------------- CI examples


def test_ci_examples_parse_and_call_what_exists() -> None:
    group = get_command(app).commands["tasks"].commands  # type: ignore[attr-defined]
    yaml.safe_load((EXAMPLES / ".gitlab-ci.yml").read_text())
    argo = yaml.safe_load((EXAMPLES / "argo-workflow.yaml").read_text())
    names = {t["name"] for t in argo["spec"]["templates"]}
    assert {s["template"] for row in argo["spec"]["templates"][0]["steps"] for s in row} <= names
    for name in ("Jenkinsfile", ".gitlab-ci.yml", "argo-workflow.yaml"):
        text = (EXAMPLES / name).read_text().replace("\\\n", " ")
        calls = re.findall(r"rsi tasks (\w+) (.*)", text)
        assert {call[0] for call in calls} == {"check", "run"}, name
        for command, rest in calls:
            known = {o for p in group[command].params for o in p.opts}
            assert set(re.findall(r"(?<=\s)--[a-z]+", " " + rest)) <= known, (name, rest)
        assert all("--json" in rest and "--log" in rest for command, rest in calls if command == "run")
