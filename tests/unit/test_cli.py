"""The command line: it teaches, it is quick, and it prints errors without a traceback."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from orchestrator.cli import app
from orchestrator.recipes import parse_overrides
from stages.errors import ConfigError


def run(*arguments: str, home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RSI_HOME": str(home), "COLUMNS": "120", **extra}
    environment.pop("DATABASE_URL", None)
    command = [sys.executable, "-m", "orchestrator.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def commands() -> list[tuple[str, ...]]:
    """Every command's path."""
    found: list[tuple[str, ...]] = []

    def walk(command: object, path: tuple[str, ...]) -> None:
        if children := getattr(command, "commands", None):
            for name, child in children.items():
                walk(child, (*path, name))
        else:
            found.append(path)

    walk(get_command(app), ())
    return found


def test_the_promised_commands_are_there() -> None:
    promised = """up, down, status, doctor, demo, worker, setup, console, reconcile, cycle launch, cycle list, cycle show, cycle pause,
        cycle resume, cycle cancel, cycle logs, checkpoint list, checkpoint show, checkpoint export, suite generate,
        suite list, model build, users add"""
    assert {tuple(p.split()) for p in promised.split(",")} <= set(commands())


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_help_page_has_an_example(path: tuple[str, ...]) -> None:
    command = get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    assert f"rsi {' '.join(path)}" in (command.help or "")
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{parameter.name} has no help"


def test_help_is_quick(tmp_path: Path) -> None:
    """Measured by processor time, which other work on the machine does not change much."""
    before = os.times()
    assert run("--help", home=tmp_path).returncode == 0
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 0.5


def test_errors_have_no_traceback_unless_asked_for(tmp_path: Path) -> None:
    failed = run("cycle", "list", home=tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: Nothing is running in")
    assert "rsi up" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Traceback" in run("cycle", "list", home=tmp_path, RSI_DEBUG="1").stderr


def test_a_model_is_built_in_a_new_folder_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        failed = run("model", "build", str(taken), home=tmp_path / "home")
        assert (failed.returncode, failed.stderr) == (
            2,
            f"error: {taken} exists already. Name a new folder, or remove it.\n",
        )
    below = run("model", "build", str(tmp_path / "file" / "x"), home=tmp_path / "home")
    assert "cannot be made" in below.stderr
    assert "Traceback" not in below.stderr


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    failed = run("status", home=tmp_path, RSI_CONSOLE_PORT="many")
    assert failed.returncode == 2
    assert "RSI_CONSOLE_PORT" in failed.stderr
    assert "'many'" in failed.stderr


def test_looking_starts_and_writes_nothing(tmp_path: Path) -> None:
    begun = time.monotonic()
    home = tmp_path / "home"
    assert run("status", home=home).returncode == 1
    assert run("down", home=home).returncode == 0
    assert not home.exists()
    assert time.monotonic() - begun < 60


def test_overrides_are_toml_values_or_plain_words() -> None:
    given = ["rounds=1", "evaluate.sampling.temperature=0.5", "rpr.0.keep_steps=[4, 6]", "name=first try", 'recipe="x"']
    assert parse_overrides(given) == {
        "rounds": 1,
        "evaluate.sampling.temperature": 0.5,
        "rpr.0.keep_steps": [4, 6],
        "name": "first try",
        "recipe": "x",
    }
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_overrides(["rounds"])
