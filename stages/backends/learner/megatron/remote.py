"""The parallel learner as a stage sees it: a `Learner` whose work is done by a process group under torchrun."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.backends.learner.megatron.facts import read_facts
from stages.backends.learner.megatron.group import Group, Limits
from stages.backends.learner.megatron.layout import Layout
from stages.backends.protocols import OptimConfig, TrainSequence
from stages.errors import ConfigError


class RemoteLearner:
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
        self._call("load", actor_dir=actor_dir, critic_dir=critic_dir)

    def init_critic(self) -> None:
        self._call("init_critic")

    def start_phase(self, *, actor: OptimConfig | None, critic: OptimConfig | None, keep_moments: bool = False) -> None:
        self._call("start_phase", actor=actor, critic=critic, keep_moments=keep_moments)

    def distil_step(
        self, batch: Sequence[TrainSequence], *, lr: float, trajectories: int | None = None
    ) -> dict[str, float | None]:
        return self._call("distil_step", batch=batch, lr=lr, trajectories=trajectories)

    def values(self, batch: Sequence[TrainSequence]) -> list[np.ndarray]:
        return self._call("values", batch=batch)

    def log_probs(self, batch: Sequence[TrainSequence], *, temperature: float = 1.0) -> list[np.ndarray]:
        return self._call("log_probs", batch=batch, temperature=temperature)

    def critic_step(self, batch: Sequence[TrainSequence], *, value_clip: float) -> dict[str, float | None]:
        return self._call("critic_step", batch=batch, value_clip=value_clip)

    def actor_step(
        self, batch: Sequence[TrainSequence], *, eps_clip: float, eps_clip_high: float, temperature: float = 1.0
    ) -> dict[str, float | None]:
        clip = {"eps_clip": eps_clip, "eps_clip_high": eps_clip_high}
        return self._call("actor_step", batch=batch, temperature=temperature, **clip)

    def save(self, path: Path) -> tuple[str, str | None]:
        return self._call("save", path=path)

    def save_actor_only(self, path: Path, critic_from: Path | None) -> tuple[str, str | None]:
        return self._call("save_actor_only", path=path, critic_from=critic_from)

    def save_midpoint(self, first_actor: Path, second_actor: Path, path: Path, critic_from: Path | None) -> str:
        """In this process: it touches no loaded model."""
        from stages.backends.learner.saving import write_midpoint

        return write_midpoint(first_actor, second_actor, path, critic_from)

    def restore(self, path: Path) -> None:
        if (path / "actor" / "config.json").is_file():  # else the ranks say what is missing
            self._fits(path / "actor")
        self._call("restore", path=path)

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
