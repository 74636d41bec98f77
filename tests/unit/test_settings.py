"""Settings come from the environment, and only from there."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator.settings import Settings, get_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "DATABASE_URL", "ARTIFACT_URL", "CONSOLE_HOST", "CONSOLE_PORT", "PREFECT_PORT", "SECRET_FILE"):
        monkeypatch.delenv(f"RSI_{name}", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults(tmp_path: Path) -> None:
    found = Settings()
    assert found.home == tmp_path / ".rsi"
    assert (found.console_host, found.console_port, found.prefect_port) == ("127.0.0.1", 8400, 4310)
    assert found.embedded_database
    assert found.artifacts == str(tmp_path / ".rsi/artifacts")
    assert found.secret_path == tmp_path / ".rsi/secret"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_HOME", "/data/rsi")
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/rsi")
    monkeypatch.setenv("RSI_ARTIFACT_URL", "s3://bucket/rsi")
    monkeypatch.setenv("RSI_SECRET_FILE", "/run/secret")
    found = Settings()
    assert (found.database_url, found.artifacts) == ("postgresql://db/rsi", "s3://bucket/rsi")
    assert not found.embedded_database
    assert found.secret_path == Path("/run/secret")
    monkeypatch.setenv("RSI_DATABASE_URL", "postgresql://ours/rsi")  # ours goes first
    assert Settings().database_url == "postgresql://ours/rsi"


def test_a_port_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSI_CONSOLE_PORT", "70000")
    with pytest.raises(ValidationError, match="65535"):
        Settings()


def test_one_reading_per_process() -> None:
    get_settings.cache_clear()
    assert get_settings() is get_settings()
    get_settings.cache_clear()
