"""The parallel learner as a stage sees it: a `Learner` whose work is done by a process group under torchrun."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from stages.backends.learner.megatron.calls import LearnerCalls
from stages.backends.learner.megatron.facts import read_facts
from stages.backends.learner.megatron.group import Group, Limits
from stages.backends.learner.megatron.layout import Layout
from stages.errors import ConfigError


class RemoteLearner(LearnerCalls):
    """Implements `stages.backends.protocols.Learner`. The processes start with the first call and end with `close`.

    options: those of `worker.Worker`. After a LearnerError the next call starts a new, empty group.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        device: str,
        options: dict[str, Any],
        num_threads: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Raises ConfigError before anything starts when this machine lacks the package or the GPUs."""
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                'learner.backend = "megatron" needs megatron-core, which is not installed here: '
                'pip install --no-deps megatron-core==0.16.1, or set learner.backend = "torch"'
            )
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device == "cuda" and gpus < layout.processes:
            raise ConfigError(
                f"layout {layout} needs {layout.processes} GPUs and this machine shows {gpus}; start the cycle on a GPU "
                'worker that has them, choose a smaller layout, or set learner.device = "cpu" (slow: for trials)'
            )
        fused = device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        self.layout, self.device = layout, device
        self._options = {**options, "transformer_engine": fused}
        self._num_threads, self._limits = num_threads, limits or Limits()
        self._group: Group | None = None

    def close(self) -> None:
        """Leaves no process behind. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def load(self, actor_dir: Path, critic_dir: Path | None) -> None:
        self._fits(actor_dir)
        super().load(actor_dir, critic_dir)

    def restore(self, path: Path) -> None:
        if (path / "actor" / "config.json").is_file():  # else the ranks say what is missing
            self._fits(path / "actor")
        super().restore(path)

    def _fits(self, actor_dir: Path) -> None:
        """Raises ModelError or ConfigError before a process starts."""
        self.layout.check(self.layout.processes, read_facts(actor_dir))

    def _call(self, name: str, **kwargs: Any) -> Any:
        if self._group is None or self._group.ended:
            self._group = Group(
                self.layout,
                device=self.device,
                options=self._options,
                num_threads=self._num_threads,
                limits=self._limits,
            )
        return self._group.call(name, **kwargs)
