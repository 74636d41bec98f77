"""A learner whose work is done elsewhere: every method of the protocol is one named call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.backends.protocols import OptimConfig, TrainSequence


class LearnerCalls(ABC):
    """The methods of `stages.backends.protocols.Learner`, but for `close`, over `_call`."""

    @abstractmethod
    def _call(self, name: str, **kwargs: Any) -> Any:
        """Has the method `name` executed where the models are, and returns its answer."""

    def load(self, actor_dir: Path, critic_dir: Path | None) -> None:
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
        return self._call(
            "actor_step", batch=batch, eps_clip=eps_clip, eps_clip_high=eps_clip_high, temperature=temperature
        )

    def save(self, path: Path) -> tuple[str, str | None]:
        return self._call("save", path=path)

    def save_actor_only(self, path: Path, critic_from: Path | None) -> tuple[str, str | None]:
        return self._call("save_actor_only", path=path, critic_from=critic_from)

    def save_midpoint(self, first_actor: Path, second_actor: Path, path: Path, critic_from: Path | None) -> str:
        """In this process, through the Hugging Face folders: it touches no loaded model."""
        from stages.backends.learner.saving import write_midpoint

        return write_midpoint(first_actor, second_actor, path, critic_from)

    def restore(self, path: Path) -> None:
        self._call("restore", path=path)
