"""`rsi tasks audit`: a good task, and each hard reject (spec §9), with real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from tests.integration.sandbox_kit import SOLVE_SH, TEST_SH

CHECKS = "".join(f"[[metadata.terminal_rsi.checks]]\nid = '{name}'\n" for name in ("answer", "listing"))
GOOD = {
    "instruction.md": "Write 42 to answer.txt and list input/ in out/list.txt. Leave input/data.txt alone.\n",
    "task.toml": f"[environment]\nnetwork_mode = 'no-network'\n{CHECKS}[[metadata.terminal_rsi.checks]]\nid = 'untouched'\nrole = 'gate'\n",
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY input/ /app/input/\n",
    "environment/input/data.txt": "data\n",
    "tests/test.sh": TEST_SH,
    "solution/solve.sh": SOLVE_SH,
}


def audit(root: Path, changes: dict[str, str]) -> tuple[int, dict[str, Any]]:
    for name, text in (GOOD | changes).items():
        (root / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "t" / name).write_text(text)
    done = CliRunner().invoke(app, ["--home", str(root / "home"), "tasks", "audit", str(root / "t"), "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def test_a_good_task_scores_everything(tmp_path: Path) -> None:
    code, found = audit(tmp_path, {})
    assert (code, found["score"], found["rejects"]) == (0, 100.0, [])
    assert len(found["dimensions"]) == 8
    assert {d["group"] for d in found["dimensions"]} == {"verifier", "solution", "instruction", "task value"}


BAD = {
    "hidden requirement": {
        "tests/test.sh": TEST_SH + "# /app/comment.txt is none\n[ -e /app/secret.cfg ] || exit $rc\n"
    },
    "test leak": {"environment/input/solve.sh": SOLVE_SH},
    "solution shortcut": {"solution/solve.sh": SOLVE_SH + "echo 1 > /logs/verifier/reward.txt\n"},
    "verifier too weak": {
        "tests/test.sh": TEST_SH.replace("check answer", "check answer true #").replace(
            "check listing", "check listing true #"
        )
    },
}


@pytest.mark.parametrize("reject", BAD)
def test_hard_rejects(tmp_path: Path, reject: str) -> None:
    code, found = audit(tmp_path, BAD[reject])
    assert code == 1
    assert [r.partition(":")[0] for r in found["rejects"]] == [reject]
    place = {
        "hidden requirement": "tests/test.sh:10",
        "test leak": "input/solve.sh:1",
        "solution shortcut": "solve.sh:5",
    }
    assert place.get(reject, "") in found["rejects"][0]
    assert found["score"] < 100


def test_a_solution_that_fails_costs_verifier_and_solution(tmp_path: Path) -> None:
    code, found = audit(tmp_path, {"solution/solve.sh": "true\n"})
    assert code == 0
    assert found["score"] == 100 - 22.5 - 12.5
    assert "answer failed" in next(d["why"] for d in found["dimensions"] if d["name"] == "tells failure from success")
