"""Rank 0 drives, the other ranks follow one command loop.

    learner = start(layout=Layout(tensor=2), max_tokens_per_gpu=8192)   # on every rank, under torchrun
    if learner is not None:                                             # rank 0: a Learner like any other
        with learner: ...                                               # the followers return when it closes

Rank 0 broadcasts each call; errors of ours are found by every rank alike and raised on rank 0. A rank that dies otherwise
takes its group with it (torchrun).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stages.backends.learner.megatron import cpu_shim
from stages.backends.learner.megatron.calls import LearnerCalls
from stages.backends.learner.megatron.layout import Layout
from stages.errors import RsiError

if TYPE_CHECKING:
    from stages.backends.learner.megatron.worker import Worker

log = logging.getLogger(__name__)
CLOSE = "close"


def start(*, layout: Layout, timeout_s: float = 3 * 3600, **options: Any) -> MegatronLearner | None:
    """Joins the process group that torchrun's environment describes and builds this rank's worker.

    options: those of `worker.Worker`. timeout_s: how long a collective may take (steps may last hours).
    Returns the learner on rank 0; on the other ranks follows until it is closed, then returns None.
    Raises ConfigError on every rank when the processes do not fit the layout.
    """
    cpu_shim.install()
    from stages.backends.learner.megatron.worker import Worker  # after the shim: it imports megatron.core

    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    worker = Worker(layout=layout, **options)
    if dist.get_rank() == 0:
        return MegatronLearner(worker)
    follow(worker)
    return None


def follow(worker: Worker) -> None:
    """Executes rank 0's commands until it closes."""
    from stages.backends.learner.megatron import wire

    while True:
        name, kwargs = wire.decode(wire.receive(worker.device))
        if name == CLOSE:
            worker.close()
            return
        try:
            getattr(worker, name)(**kwargs)
        except RsiError as e:  # rank 0 raises the same one to its caller
            log.info("rank %d: %s refused: %s", dist.get_rank(), name, e)


class MegatronLearner(LearnerCalls):
    """Implements `stages.backends.protocols.Learner` over all ranks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._closed = False

    def __enter__(self) -> MegatronLearner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, (RsiError, KeyboardInterrupt)):
            self.close()
        # after any other error the group may be stuck in a collective: leaving ends this rank, and torchrun the others

    def close(self) -> None:
        """Sends the followers home. Idempotent."""
        if not self._closed:
            self._closed = True
            self._send(CLOSE)
            self._worker.close()

    def save_actor_only(self, path: Path, critic_from: Path | None) -> tuple[str, str | None]:
        return self._call("save", path=path, critic_from=critic_from, actor_only=True)

    def _call(self, name: str, **kwargs: Any) -> Any:
        self._send(name, **kwargs)
        return getattr(self._worker, name)(**kwargs)

    def _send(self, name: str, **kwargs: Any) -> None:
        from stages.backends.learner.megatron import wire

        if dist.get_world_size() > 1:
            wire.send(wire.encode(name, kwargs), self._worker.device)
