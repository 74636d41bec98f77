"""Fixtures of the integration tests that need a machine's services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.sandbox_engine import engine, why_none


@pytest.fixture(scope="session")
def docker_url() -> Iterator[str]:
    """A Docker engine for this session; skips loudly where none can be had."""
    reason = why_none()
    if reason:
        pytest.skip(f"NO DOCKER ENGINE, its half of the sandbox tests is not run: {reason}")
    with engine() as url:
        yield url
