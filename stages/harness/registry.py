"""Harnesses by name."""

from __future__ import annotations

from stages.config import RolloutConfig
from stages.harness.protocol import Harness
from stages.harness.shell import ShellHarness
from stages.harness.terminus2.harness import Terminus2Harness


def harness_of(config: RolloutConfig) -> Harness:
    """The harness that a rollout's settings name."""
    if config.harness == "shell":
        return ShellHarness(observation_chars=config.observation_chars)
    return Terminus2Harness(output_bytes=config.observation_chars)
