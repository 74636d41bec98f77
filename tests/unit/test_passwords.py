import pytest

from orchestrator.passwords import hash_password, verify_password
from stages.errors import ConfigError


def test_only_the_right_password_is_accepted() -> None:
    stored = hash_password("correct horse")
    assert "correct" not in stored
    assert stored != hash_password("correct horse")  # salted
    assert verify_password(stored, "correct horse")
    assert not verify_password(stored, "correct horsf")


@pytest.mark.parametrize("stored", [None, "", "not a hash"])
def test_no_or_broken_hash_lets_nobody_in(stored: str | None) -> None:
    assert not verify_password(stored, "nobody")


def test_short_passwords_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8"):
        hash_password("short")
