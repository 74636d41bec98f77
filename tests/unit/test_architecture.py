"""The house rules, enforced: who imports whom, what loads late, how long a file may be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("stages", "orchestrator", "webui")
HEAVY = ("torch", "transformers", "megatron", "sglang")
LONGEST = 400  # lines
BIN = Path(sys.executable).parent


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)


def test_imports_go_one_way() -> None:
    done = tool("lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code", ["import webui.app", "from orchestrator.cli import app; app(['--help'])"])
def test_the_console_and_the_command_line_load_no_model_code(code: str) -> None:
    loaded = f"import sys, atexit; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules])); {code}"
    done = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("[]"), done.stdout


def python_files() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert len(lengths) > 50
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST} == {}


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "helpers", "manager", "misc", "common"}
    assert [path for path in python_files() if path.stem in drawers or path.parent.name in drawers] == []


def test_prefect_and_sql_stay_in_their_rooms() -> None:
    """Prefect: flows, gate, workers, embedded. SQL statements: store (and the embedded server's own databases)."""
    rooms = {
        "prefect": (
            "orchestrator/flows.py",
            "orchestrator/gate.py",
            "orchestrator/workers.py",
            "orchestrator/embedded/",
        ),
        "sqlalchemy": (
            "orchestrator/store/",
            "orchestrator/models/",
            "orchestrator/embedded/",
            "orchestrator/doctor.py",
        ),
        "sqlmodel": ("orchestrator/store/", "orchestrator/models/"),
    }
    for package, allowed in rooms.items():
        for path in python_files():
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(allowed):
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            found = [line for line in lines if line.strip().startswith((f"import {package}", f"from {package}"))]
            assert found == [], f"{name} imports {package}: {found}"
