"""Fixtures of the integration tests that need a machine's services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.backends.sandbox.docker import DockerBackend
from tests.integration.sandbox_engine import engine, why_none
from tests.integration.sandbox_kit import Machine


@pytest.fixture(scope="session")
def docker_url() -> Iterator[str]:
    """A Docker engine for this session; skips loudly where none can be had."""
    reason = why_none()
    if reason:
        pytest.skip(f"NO DOCKER ENGINE, its half of the sandbox tests is not run: {reason}")
    with engine() as url:
        yield url


@pytest.fixture(scope="session")
def docker_machine(docker_url: str) -> Iterator[Machine]:
    """A started Docker backend for every module."""
    machine = Machine("docker", DockerBackend(image="prepared", base_url=docker_url))
    yield machine
    machine.close()
