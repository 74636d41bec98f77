"""`rsi users` against a real database, and what it leaves in the audit log."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.store import Store
from stages.errors import RsiError

Rsi = Callable[..., str]


@pytest.fixture
def rsi(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rsi:
    monkeypatch.setenv("RSI_HOME", str(tmp_path))
    monkeypatch.setenv("RSI_DATABASE_URL", database_url)

    def run(*words: str, typed: str = "") -> str:
        done = CliRunner().invoke(app, ["users", *words], input=typed)
        if isinstance(done.exception, RsiError):
            return f"error: {done.exception}"
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_people_by_command(rsi: Rsi, store: Store) -> None:
    assert "Nobody yet" in rsi("list")
    assert "at least 8 are needed" in rsi("add", "ada", typed="short\n")
    assert "king" in rsi("add", "ada", "--role", "king", typed="long enough\n")
    assert "The login gate is taken" in rsi("add", "gate", typed="long enough\n")  # the audit log's own word
    assert "Added ada (lead, reviewer)" in rsi(
        "add", "ada", "--role", "lead", "--role", "reviewer", typed="long enough\n"
    )
    for same in ("ada", "Ada"):
        assert "taken" in rsi("add", same, typed="long enough\n")
    added = rsi("add", "bob", "--name", "Bob", "--link")
    found = re.search(r"http://127\.0\.0\.1:8400/sign-in/link\?key=(\S+)", added)
    assert found is not None
    user = store.sign_in_links.use(found[1])
    assert user is not None
    assert (user.login, user.roles, user.password_hash) == ("bob", ["analyst"], None)
    assert "bob: admin, lead." in rsi("roles", "bob", "--role", "lead", "--role", "admin")
    store.sign_ins.open(user.id or 0, "test")
    assert "1 sign-in(s) ended" in rsi("disable", "bob")
    assert "bob" not in rsi("list")
    assert "yes" in rsi("list", "--disabled")
    assert "is disabled" in rsi("link", "bob")
    assert "may sign in again" in rsi("enable", "bob")
    assert "/sign-in/link?key=" in rsi("link", "bob")
    assert "no account `local`" in rsi("link")  # the database is somebody's own
    for command in ("roles", "disable", "enable", "link"):
        assert "carl" in rsi(command, "carl")
    told = [(row.actor, row.action, row.object_id) for row in store.audit_trail.list(object_id="bob").items]
    actions = ["user.link", "user.enable", "user.disable", "user.roles", "user.link", "user.add"]
    assert told == [("cli", action, "bob") for action in actions]
